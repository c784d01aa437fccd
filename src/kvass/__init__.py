"""kvass: keeps, ships and reuses the KV caches of language models, outside the engine."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvass.cache import Explanation, KVCache, KVView, LoadResult, Match, Pool, StoredChunk, StoreTicket
    from kvass.config import Settings
    from kvass.errors import (
        ConfigError,
        CorruptObjectError,
        InputError,
        KvassError,
        ModelFilesError,
        TierError,
        TierFullError,
        TierUnavailableError,
        UnsupportedModelError,
    )
    from kvass.keys import Namespace
    from kvass.spec import KVSpec, LayerGroup, RopeSpec

__version__ = "0.1.0"

_WHERE = {
    "Explanation": "cache",
    "KVCache": "cache",
    "KVView": "cache",
    "LoadResult": "cache",
    "Match": "cache",
    "Pool": "cache",
    "StoreTicket": "cache",
    "StoredChunk": "cache",
    "Settings": "config",
    "ConfigError": "errors",
    "CorruptObjectError": "errors",
    "InputError": "errors",
    "KvassError": "errors",
    "ModelFilesError": "errors",
    "TierError": "errors",
    "TierFullError": "errors",
    "TierUnavailableError": "errors",
    "UnsupportedModelError": "errors",
    "Namespace": "keys",
    "KVSpec": "spec",
    "LayerGroup": "spec",
    "RopeSpec": "spec",
}

__all__ = [
    "ConfigError",
    "CorruptObjectError",
    "Explanation",
    "InputError",
    "KVCache",
    "KVSpec",
    "KVView",
    "KvassError",
    "LayerGroup",
    "LoadResult",
    "Match",
    "ModelFilesError",
    "Namespace",
    "Pool",
    "RopeSpec",
    "Settings",
    "StoreTicket",
    "StoredChunk",
    "TierError",
    "TierFullError",
    "TierUnavailableError",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(import_module(f"kvass.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'kvass' has no attribute {name!r}")

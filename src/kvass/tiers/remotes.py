"""The stores that can be a remote tier: one line each. Their libraries are imported when one is opened."""

from collections.abc import Iterator
from importlib import import_module

from kvass.config import Settings
from kvass.tiers.store import Store

_STORES = {
    "redis": ("redis_url", "kvass.tiers.redis", "RedisStore"),
    "mooncake": ("mooncake_master", "kvass.tiers.mooncake", "MooncakeStore"),
    "s3": ("s3_url", "kvass.tiers.s3", "S3Store"),
}
"""By tier name, nearest first: the setting that turns it on, and where its class is."""


def configured(settings: Settings) -> Iterator[tuple[str, Store]]:
    """The stores that the settings turn on, nearest first. Raises ConfigError for wrong settings, and for
    an extra that is not installed."""
    for name, (setting, module, store) in _STORES.items():
        if getattr(settings, setting):
            kind: type[Store] = getattr(import_module(module), store)
            yield name, kind.open(settings)

"""The transformers engine: attach to an existing model, or drive one for a server."""

from kvass.engines.transformers.answering import Answering, PromptLogits, Scope, Step, Usage
from kvass.engines.transformers.connector import attach, detach
from kvass.engines.transformers.engine import Engine
from kvass.engines.transformers.identity import identify, kv_spec
from kvass.engines.transformers.load import (
    LoadedModel,
    encode_chat,
    encode_text,
    load_model,
    render_chat,
    shared_with,
)
from kvass.engines.transformers.pool_cache import PoolCache, TorchPool
from kvass.engines.transformers.sampling import Sampling

__all__ = [
    "Answering",
    "Engine",
    "LoadedModel",
    "PoolCache",
    "PromptLogits",
    "Sampling",
    "Scope",
    "Step",
    "TorchPool",
    "Usage",
    "attach",
    "detach",
    "encode_chat",
    "encode_text",
    "identify",
    "kv_spec",
    "load_model",
    "render_chat",
    "shared_with",
]

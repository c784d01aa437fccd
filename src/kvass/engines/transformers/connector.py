"""One line for an existing program: `attach(model)`, and `model.generate` reuses what was read before."""

import functools
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from kvass.cache import KVCache
from kvass.chunks import MAX_TOKEN_ID
from kvass.engines.transformers.identity import Identity, identify
from kvass.engines.transformers.pool_cache import PoolCache, TorchPool
from kvass.errors import UnsupportedModelError

log = logging.getLogger("kvass.engines")

_OTHER_MODES = (
    "past_key_values", "cache_implementation", "assistant_model", "inputs_embeds", "pixel_values",
    "encoder_outputs", "prompt_lookup_num_tokens", "position_ids", "negative_prompt_ids", "custom_generate",
)  # fmt: skip


def attach(
    model: PreTrainedModel, cache: KVCache | None = None, *, tenant_salt: str = "", epoch: str = ""
) -> KVCache:
    """Let `model.generate` load what is stored of a prompt, and store prompt and answer.

    Calls that kvass does not handle (batches, beams, padding, a cache of the caller's own, ...) run as
    before. Returns the cache (by default `KVCache.open()`); close it, or use it as a context manager.
    Raises UnsupportedModelError for a model that kvass does not handle, leaving the model as it was.
    """
    if model.device.type != "cpu":
        raise UnsupportedModelError(f"the model is on {model.device}; attach handles the CPU so far")
    known = identify(model, tenant_salt=tenant_salt, epoch=epoch)
    store = cache if cache is not None else KVCache.open()
    original: Any = getattr(model.generate, "_kvass_original", model.generate)
    state = _Attached(original, model, store, tenant_salt, epoch, known)

    @functools.wraps(original)
    def generate(inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        return state.generate(inputs, *args, **kwargs)

    generate._kvass_original = original  # type: ignore[attr-defined]
    model.generate = generate  # type: ignore[assignment]
    return store


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`. The cache stays open."""
    original = getattr(model.generate, "_kvass_original", None)
    if original is not None:
        model.generate = original


class _Attached:
    def __init__(
        self,
        original: Any,
        model: PreTrainedModel,
        cache: KVCache,
        tenant_salt: str,
        epoch: str,
        known: Identity,
    ):
        self._original = original
        self._model = model
        self._cache = cache
        self._salt = tenant_salt
        self._epoch = epoch
        self._known = known

    def generate(self, inputs: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        if args or not self._handles(ids, kwargs):
            return self._original(inputs, *args, **kwargs)
        assert ids is not None
        self._known = identify(self._model, tenant_salt=self._salt, epoch=self._epoch, known=self._known)
        namespace = self._known.namespace
        prompt = ids[0].to(torch.int64).numpy()
        held = PoolCache(TorchPool(namespace.spec, len(prompt) + self._room(kwargs)))
        match = self._cache.lookup(prompt, namespace, limit=len(prompt) - 1)
        loaded = self._cache.load(match, held.pool).tokens if match else 0
        held.set_length(loaded)
        out = self._original(inputs, **kwargs, past_key_values=held)
        sequence = out if isinstance(out, torch.Tensor) else out.sequences
        computed = min(held.get_seq_length(), sequence.shape[1])
        if computed > loaded:
            self._cache.store(sequence[0, :computed].numpy(), namespace, held.pool)
        return out

    def _handles(self, ids: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this call is one sequence, sampled token by token from a plain prompt."""
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
            return False
        if ids.device.type != "cpu" or int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID:
            return False
        if self._model.training or torch.is_autocast_enabled("cpu"):
            return False
        if any(kwargs.get(name) is not None for name in _OTHER_MODES) or kwargs.get("use_cache") is False:
            return False
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool((mask == 1).all()):
            return False
        return all(
            self._option(name, kwargs) in (None, 1) for name in ("num_beams", "num_return_sequences")
        ) and self._option("prompt_lookup_num_tokens", kwargs) in (None, 0)

    def _option(self, name: str, kwargs: dict[str, Any]) -> Any:
        config = kwargs.get("generation_config") or self._model.generation_config
        return kwargs.get(name, getattr(config, name, None))

    def _room(self, kwargs: dict[str, Any]) -> int:
        """Tokens to make room for; more than that makes the pool grow."""
        room = self._option("max_new_tokens", kwargs)
        return min(int(room), 4096) if room else 256

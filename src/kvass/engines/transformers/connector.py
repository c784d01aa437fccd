"""One line for an existing program: `attach(model)`, and `model.generate` reuses what was read before."""

import copy
import inspect
import logging
import time
from types import MethodType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvass.cache import KVCache, Pace
from kvass.chunks import MAX_TOKEN_ID
from kvass.engines.transformers.adapters import plain_model
from kvass.engines.transformers.identity import Identity, identify, kv_spec
from kvass.engines.transformers.layers import ships
from kvass.engines.transformers.pool_cache import PoolCache, TorchPool
from kvass.errors import UnsupportedModelError

log = logging.getLogger("kvass.engines")

_Config: Any = GenerationConfig  # untyped

_UNDERSTOOD = {
    *vars(_Config()), "input_ids", "attention_mask", "generation_config", "logits_processor",
    "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "streamer", "tokenizer",
}  # fmt: skip
"""Arguments of `generate` that change which tokens are chosen, not what the model makes of them. Any other
may reach the model's forward, and KV that depends on it must not be found by token ids alone."""

_PLAIN: dict[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "use_cache": (True,),
    "cache_implementation": ("hybrid",),  # which transformers takes for none
    "prefill_chunk_size": (), "token_healing": (False,), "is_assistant": (False,), "use_mtp": (False,),
    "prompt_lookup_num_tokens": (), "assistant_early_exit": (), "dola_layers": (), "penalty_alpha": (),
    "guidance_scale": (1,), "constraints": (), "force_words_ids": (),
    "output_attentions": (False,), "output_hidden_states": (False,),
}  # fmt: skip
"""Settings that must be unset, or one of these, for a call to be one sequence computed token by token."""


def attach(
    model: torch.nn.Module, cache: KVCache | None = None, *, tenant_salt: str = "", epoch: str = ""
) -> KVCache:
    """Let `model.generate` load what is stored of a prompt, and store prompt and answer.

    `model`: of transformers, also within peft. Calls that kvass does not handle (batches, beams, padding,
    a cache of the caller's own, a model in training or with hooks, ...) run as before. Returns the cache
    (by default `KVCache.open()`); close it, or use it as a context manager.
    Raises UnsupportedModelError for a model that kvass does not handle, leaving the model as it was.
    """
    plain = plain_model(model)
    if plain.device.type != "cpu":
        raise UnsupportedModelError(f"the model is on {plain.device}; attach handles the CPU so far")
    known = None
    if any(module.training for module in plain.modules()):  # its calls run as before until it no longer is
        kv_spec(plain)
    else:
        known = identify(plain, tenant_salt=tenant_salt, epoch=epoch)
    method: Any = getattr(type(plain), "generate", None)
    own = vars(plain).get("generate", method)
    if not ships(method) or not (isinstance(own, _Generate) or getattr(own, "__func__", own) is method):
        raise UnsupportedModelError(f"{type(plain).__name__} has a generate of its own: not yet")
    if "attention_mask" not in inspect.signature(plain.forward).parameters:
        raise UnsupportedModelError(
            f"{type(plain).__name__} takes no attention_mask; without, generate does not continue a cache"
        )
    store = cache if cache is not None else KVCache.open()
    plain.generate = _Generate(plain, store, tenant_salt, epoch, known)  # type: ignore[assignment]
    return store


def detach(model: torch.nn.Module) -> None:
    """Undo `attach`. The cache stays open."""
    plain = plain_model(model)
    if isinstance(vars(plain).get("generate"), _Generate):
        del plain.generate


class _Generate:
    """Stands in for a model's `generate`. A copy of the model, by whatever means, has the plain one again."""

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, tenant_salt: str, epoch: str, known: Identity | None
    ):
        self._model = model
        self._cache = cache
        self._salt = tenant_salt
        self._epoch = epoch
        self._known = known
        self._pace = Pace()
        self._original: Any = MethodType(type(model).generate, model)  # type: ignore[attr-defined]
        self.__doc__ = self._original.__doc__
        self.__signature__ = inspect.signature(self._original)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = copy.deepcopy(self._model, memo)
        return MethodType(type(other).generate, other)  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return getattr, (self._model, "generate")

    def __call__(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        identity = None if args or not self._handles(ids, kwargs) else self._identified()
        if identity is None:
            return self._original(inputs, *args, **kwargs)
        assert ids is not None
        namespace = identity.namespace
        prompt = ids[0].to(torch.int64).numpy()
        held = PoolCache(TorchPool(namespace.spec, len(prompt) + self._room(kwargs)))
        match = self._cache.lookup(prompt, namespace, limit=len(prompt) - 1)
        seconds = self._pace.seconds(match.length)
        loaded = self._cache.load(match, held.pool, seconds=seconds).tokens if match else 0
        held.set_loaded(loaded, match.chunk_tokens)
        sequence, began = ids, time.perf_counter()
        try:
            out = self._original(inputs, **kwargs, past_key_values=held)
            sequence = out if isinstance(out, torch.Tensor) else out.sequences
        finally:
            # decoding is in it too: what a load may take is then set too high, never too low
            self._pace.learn(held.computed - loaded, time.perf_counter() - began)
            self._store(sequence[0], loaded, identity, held)
        if getattr(out, "past_key_values", None) is held:
            out.past_key_values = held.as_dynamic(self._model.config)
        return out

    def _identified(self) -> Identity | None:
        """None where the model is in a state that has no name, such as with hooks: then nothing is reused."""
        try:
            self._known = identify(self._model, tenant_salt=self._salt, epoch=self._epoch, known=self._known)
        except UnsupportedModelError as error:
            log.debug("kvass: generate goes without the cache: %s", error)
            return None
        return self._known

    def _store(self, sequence: torch.Tensor, loaded: int, identity: Identity, held: PoolCache) -> None:
        """Keep whatever was computed; after an exception that is the prompt at most."""
        computed = min(held.computed, sequence.shape[0])
        if computed <= loaded:
            return
        now = self._identified()
        if now is not None and now.namespace == identity.namespace:  # else the weights changed meanwhile
            self._cache.store(sequence[:computed].numpy(), identity.namespace, held)

    def _handles(self, ids: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this call is one sequence, sampled token by token from a plain prompt."""
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
            return False
        if (
            ids.dtype not in (torch.int64, torch.int32)
            or not ids.device.type == self._model.device.type == "cpu"
        ):
            return False
        if int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID or torch.is_autocast_enabled("cpu"):
            return False
        if any(value is not None and name not in _UNDERSTOOD for name, value in kwargs.items()):
            return False
        for name, plain in _PLAIN.items():
            if any(value not in plain for value in self._settings(name, kwargs)):
                return False
        mask = kwargs.get("attention_mask")
        if mask is None:
            return not self._masks_padding(ids, kwargs)
        return isinstance(mask, torch.Tensor) and mask.shape == ids.shape and bool((mask == 1).all())

    def _settings(self, name: str, kwargs: dict[str, Any]) -> list[Any]:
        """What is said of a setting, the strongest word first: argument, config, the model's own config."""
        sources = (kwargs.get("generation_config"), self._model.generation_config)
        said = [kwargs.get(name), *(getattr(source, name, None) for source in sources)]
        return [value for value in said if value is not None]

    def _masks_padding(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether transformers will take tokens of the prompt for padding, no mask being given."""
        pads, ends = (self._settings(name, kwargs)[:1] for name in ("pad_token_id", "eos_token_id"))
        if not pads or not bool(torch.isin(ids, torch.as_tensor(pads[0])).any()):
            return False
        return not ends or not bool(torch.isin(torch.as_tensor(pads[0]), torch.as_tensor(ends[0])).any())

    def _room(self, kwargs: dict[str, Any]) -> int:
        """Tokens to make room for; more than that makes the pool grow."""
        room = self._settings("max_new_tokens", kwargs)
        return min(int(room[0]), 4096) if room else 256

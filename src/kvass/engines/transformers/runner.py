"""The model runner on transformers: float32 forwards over KV that is handed in and out as numpy arrays."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvass.container import Array
from kvass.engines.transformers.layers import kv_spec
from kvass.engines.transformers.load import LoadedModel, encode_text
from kvass.engines.transformers.movable import refuse_unmovable
from kvass.engines.transformers.pool_cache import PoolCache, TorchPool
from kvass.engines.transformers.workspace import TransformersWorkspace, as_taken
from kvass.errors import InputError, UnsupportedModelError
from kvass.runner import KV, Branch
from kvass.spec import DTypeName, KVSpec, numpy_dtype

_SLICE_TOKENS = 512
"""Of a prefill, for memory; the results of another slicing differ in their last bits."""

_ROOM_TOKENS = 512
"""Kept free behind a sequence, so that what continues it seldom makes the pool grow."""


class TransformersRunner:
    """A `kvass.runner.ModelRunner`. One thread at a time: its memory serves one call after another."""

    def __init__(self, loaded: LoadedModel, kv_dtype: DTypeName = "bfloat16"):
        """`loaded`: in float32, on the CPU. `kv_dtype`: what KV is rounded to, and so kept as.

        Raises UnsupportedModelError for a model that kvass does not handle, or one in another dtype.
        """
        if loaded.model.dtype != torch.float32 or loaded.model.device.type != "cpu":
            raise UnsupportedModelError(
                f"{loaded.name} is {loaded.model.dtype} on {loaded.model.device}; a runner computes in "
                "float32 on the CPU: load the model so"
            )
        self._loaded = loaded
        self._model: Any = loaded.model
        self._computed = kv_spec(loaded.model)
        self._spec = KVSpec(
            groups=tuple(msgspec.structs.replace(one, dtype=kv_dtype) for one in self._computed.groups)
        )
        self._pool = TorchPool(self._computed, _SLICE_TOKENS)
        self._movable = False

    @property
    def name(self) -> str:
        return self._loaded.name

    @property
    def spec(self) -> KVSpec:
        return self._spec

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        if begin:
            return encode_text(self._loaded, text)
        return list(self._loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> KV:
        ids = self._ids(tokens)
        cache = self._empty(len(ids))
        for first in range(0, len(ids), _SLICE_TOKENS):
            part = ids[None, first : first + _SLICE_TOKENS]
            self._model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        kept = []
        for number, group in enumerate(self._spec.groups):
            held = self._pool.arrays(number, 0, len(ids))
            kept.append({name: _rounded(array, group.dtype) for name, array in held.items()})
        return kept

    @torch.inference_mode()
    def continue_over(self, kv: KV, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        ids = self._ids(tokens)
        cache = self._filled(kv, len(ids))
        logits = self._model(input_ids=ids[None], past_key_values=cache, use_cache=True).logits[0]
        return np.asarray(torch.log_softmax(logits.float(), -1).numpy())

    @torch.inference_mode()
    def choose_over(self, kv: KV, branches: Sequence[Branch]) -> list[npt.NDArray[np.int64]]:
        """All branches go through the model at once, as one sequence whose mask keeps them apart."""
        if not branches:
            return []
        if not all(len(branch.prompt) and len(branch.answer) for branch in branches):
            raise InputError("a branch needs a prompt and an answer of one token or more")
        parts = [[*branch.prompt, *branch.answer[:-1]] for branch in branches]
        ids = self._ids([token for part in parts for token in part])
        cache = self._filled(kv, len(ids))
        start = cache.get_seq_length()
        places = torch.cat([torch.arange(len(part)) for part in parts])
        owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
        judged: list[int] = []
        first = 0
        for branch, part in zip(branches, parts, strict=True):
            judged += range(first + len(branch.prompt) - 1, first + len(part))
            first += len(part)
        logits = self._model(
            input_ids=ids[None],
            attention_mask=self._masks(start, places, owner),
            position_ids=(start + places)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(judged),
        ).logits[0]
        chosen = logits.argmax(-1).numpy()
        ends = np.cumsum([len(branch.answer) for branch in branches])[:-1]
        return [np.asarray(one) for one in np.split(chosen, ends)]

    def workspace(self, capacity: int) -> TransformersWorkspace:
        if not self._movable:
            refuse_unmovable(self._model, self._computed)
            self._movable = True
        self._empty(capacity)
        return TransformersWorkspace(self._model, self._pool)

    def _masks(self, start: int, places: torch.Tensor, owner: torch.Tensor) -> Any:
        """What each token of the branches may see, as the model takes it."""
        made = []
        for group in self._spec.groups:
            seen_from = group.first_needed(start)
            stored = torch.arange(seen_from, start)
            keys = torch.cat([stored, start + places])
            keys_owner = torch.cat([torch.full_like(stored, -1), owner])
            queries = (start + places)[:, None]
            mask = (keys <= queries) & ((keys_owner < 0) | (keys_owner == owner[:, None]))
            if group.window is not None:
                mask &= keys > queries - group.window
            made.append(mask[None, None])
        return as_taken(self._spec, made)

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.as_tensor(np.asarray(tokens, np.int64))
        vocabulary = self._model.config.vocab_size
        if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise InputError(f"tokens must be a flat sequence of one or more ids in 0..{vocabulary - 1}")
        return ids

    def _empty(self, capacity: int) -> PoolCache:
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if longest is not None and capacity > longest:
            raise InputError(f"{capacity} tokens are more than the {longest} that {self.name} takes")
        if self._pool.capacity < capacity:
            self._pool = TorchPool(self._computed, capacity + _ROOM_TOKENS)
        return PoolCache(self._pool)

    def _filled(self, kv: KV, room: int) -> PoolCache:
        tokens = self._tokens_of(kv)
        cache = self._empty(tokens + room)
        for number, group in enumerate(self._spec.groups):
            held = self._pool.arrays(number, 0, tokens)
            for name, array in held.items():
                torch.from_numpy(array).copy_(_tensor(kv[number][name], group.dtype))
        cache.set_loaded(tokens, 1)
        return cache

    def _tokens_of(self, kv: KV) -> int:
        if len(kv) != len(self._spec.groups):
            raise InputError(f"the KV has {len(kv)} layer groups, not {len(self._spec.groups)} as the model")
        tokens = kv[0]["k"].shape[1]
        for group, arrays in zip(self._spec.groups, kv, strict=True):
            for name in ("k", "v"):
                array = arrays[name]
                if array.shape != group.shape(name, tokens) or array.dtype != numpy_dtype(group.dtype):
                    raise InputError(
                        f"array {name!r} is {array.dtype} {array.shape}, not {group.dtype} "
                        f"{group.shape(name, tokens)}"
                    )
        return int(tokens)


def _rounded(array: Array, dtype: str) -> Array:
    """A copy of float32 values in a KV dtype."""
    rounded = torch.from_numpy(array).to(getattr(torch, dtype)).contiguous()
    return np.array(rounded.view(torch.uint8).numpy()).view(numpy_dtype(dtype))


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    """The same values as torch sees them, also of dtypes that numpy has from ml_dtypes."""
    raw = np.ascontiguousarray(array).view(np.uint8)
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(getattr(torch, dtype))

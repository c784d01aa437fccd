"""A transformers cache whose layers are views of one pool, so that KV is loaded and stored in place."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvass.container import Array
from kvass.errors import InputError, TierError
from kvass.spec import KVSpec, LayerGroup

_BY_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _numpy(tensor: torch.Tensor, dtype: str) -> Array:
    """The same memory as numpy sees it, also for dtypes that numpy has from ml_dtypes."""
    raw = tensor.view(_BY_BITS[tensor.element_size()]).numpy()
    return raw.view(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else np.dtype(dtype))


class TorchPool:
    """One sequence's KV in host memory: per group `k` and `v`, `[layers, capacity, kv_heads, dim]`.

    `arrays` gives numpy views for the cache, `layer` torch views for the model, of the same bytes.
    """

    def __init__(self, spec: KVSpec, capacity: int):
        self.spec = spec
        self.capacity = capacity
        self._tensors = [self._allocate(group, capacity) for group in spec.groups]

    @staticmethod
    def _allocate(group: LayerGroup, capacity: int) -> dict[str, torch.Tensor]:
        dtype = getattr(torch, group.dtype)
        with torch.inference_mode(False):  # the caller's mode would stay with the tensors for good
            # not zeros: that would touch all of it, also what this request never comes to use
            return {name: torch.empty(group.shape(name, capacity), dtype=dtype) for name in ("k", "v")}

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        """Views of tokens `start` to `stop`. Raises InputError beyond the capacity."""
        if not 0 <= start <= stop <= self.capacity:
            raise InputError(f"tokens {start}..{stop} lie outside of a pool of {self.capacity}")
        dtype = self.spec.groups[group].dtype
        return {name: _numpy(tensor, dtype)[:, start:stop] for name, tensor in self._tensors[group].items()}

    def layer(self, group: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[capacity, kv_heads, dim]` of the group's layer `number`."""
        held = self._tensors[group]
        return held["k"][number], held["v"][number]

    def grow(self, capacity: int) -> None:
        """Make room for more tokens, keeping what is there."""
        for number, group in enumerate(self.spec.groups):
            old, new = self._tensors[number], self._allocate(group, capacity)
            for name, tensor in new.items():
                tensor[:, : self.capacity] = old[name]
            self._tensors[number] = new
        self.capacity = capacity

    def fill(self, byte: int) -> None:
        """Overwrite everything, so that nothing of what was here before can be taken for loaded."""
        for tensors in self._tensors:
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(byte)


def _rows(tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Tokens `first` to `end` of `[capacity, kv_heads, dim]` as `[1, kv_heads, tokens, dim]`."""
    return tensor[first:end].transpose(0, 1)[None]


class Interrupted(Exception):
    """A forward call was given up between two layers; what `PoolCache.computed` counts is there."""


class _PoolLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values `[1, kv_heads, tokens, dim]`: views of a pool. Batch 1 only."""

    is_croppable = True

    def __init__(
        self, pool: TorchPool, group: int, number: int, window: int | None, given_up: Callable[[], bool]
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._given_up = given_up
        self._pool = pool
        self._place = (group, number)
        self._window = window
        self.is_sliding = window is not None
        self.length = 0
        self.is_initialized = True
        keys, _ = pool.layer(group, number)
        self.dtype, self.device = keys.dtype, keys.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there from the start."""

    def _first(self) -> int:
        return 0 if self._window is None else max(0, self.length - self._window + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens `[1, kv_heads, new, dim]` behind the others; all that the queries may see.

        Raises Interrupted where nobody waits for this forward any more.
        """
        if self._given_up():
            raise Interrupted
        if key_states.shape[0] != 1 or key_states.dtype != self.dtype:
            raise InputError(
                f"kvass keeps one sequence in {self.dtype}; got a batch of {key_states.shape[0]} "
                f"in {key_states.dtype}"
            )
        end = self.length + key_states.shape[2]
        if end > self._pool.capacity:
            self._pool.grow(max(end, self._pool.capacity * 3 // 2))
        keys, values = self._pool.layer(*self._place)
        keys[self.length : end] = key_states[0].transpose(0, 1)
        values[self.length : end] = value_states[0].transpose(0, 1)
        first, self.length = self._first(), end
        return _rows(keys, first, end), _rows(values, first, end)

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next query may see, `[1, kv_heads, tokens, dim]`."""
        keys, values = self._pool.layer(*self._place)
        first = self._first()
        return _rows(keys, first, self.length), _rows(values, first, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` will return for that many queries."""
        first = self._first()
        return self.length - first + query_length, first

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum: the pool grows."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. Raises InputError for a positive number."""
        if tokens_to_remove > 0:  # an absolute length, in what transformers deprecates
            raise InputError(f"crop takes minus the number of tokens to remove, not {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0


class _NotLoaded(np.ndarray):
    """Stands for KV that was never loaded: it has a shape, and whoever wants its bytes fails."""

    @property
    def data(self) -> memoryview:
        raise TierError("this KV lies before the window and was not loaded")

    def view(self, *_: Any, **__: Any) -> Any:
        """As `data`."""
        return self.data


class PoolCache(Cache):
    """The cache to hand to a model, `past_key_values=PoolCache(pool)`; and to store from."""

    def __init__(self, pool: TorchPool, given_up: Callable[[], bool] = lambda: False):
        """`given_up`: asked in every layer of a forward call; True ends it with Interrupted."""
        self.pool = pool
        self._pool_layers = [
            _PoolLayer(pool, group, place, pool.spec.groups[group].window, given_up)
            for group, place in pool.spec.places.values()
        ]
        self._held_from = [0] * len(pool.spec.groups)
        super().__init__(layers=list(self._pool_layers))

    @property
    def computed(self) -> int:
        """Tokens whose KV is there in every layer; a forward that fails in between leaves some ahead."""
        return min(layer.length for layer in self._pool_layers)

    def set_loaded(self, length: int, chunk_tokens: int) -> None:
        """Say that `KVCache.load` put the first `length` tokens into the pool.

        Of groups with a window it loads only the chunks that the window still sees.
        """
        for layer in self._pool_layers:
            layer.length = length
        self._held_from = [
            group.first_needed(length) // chunk_tokens * chunk_tokens for group in self.pool.spec.groups
        ]

    def set_computed(self, length: int) -> None:
        """Say that the first `length` tokens are in the pool, those behind what was loaded being put
        there."""
        for layer in self._pool_layers:
            layer.length = length

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        """What the pool holds of tokens `start` to `stop`, for `KVCache.store`."""
        held = self.pool.arrays(group, start, stop)
        if start >= self._held_from[group]:
            return held
        return {name: array.view(_NotLoaded) for name, array in held.items()}

    def as_dynamic(self, config: Any) -> DynamicCache:
        """The same KV in transformers' own cache, as the same forwards would leave it; views of the pool."""
        made = DynamicCache(config=config)
        for layer, ours in zip(made.layers, self._pool_layers, strict=True):
            assert isinstance(layer, DynamicLayer)
            keys, values = ours.held()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = ours.length
        return made

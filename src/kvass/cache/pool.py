"""Host memory for one sequence's KV: what the cache reads into and stores from."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from kvass.container import Array
from kvass.errors import InputError
from kvass.keys import Namespace
from kvass.spec import KVSpec, LayerGroup, numpy_dtype


class KVView(Protocol):
    """A sequence's KV as arrays, to be filled by `load` or read by `store`."""

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        """Views `k` `[layers, stop - start, kv_heads, head_dim]` and `v` `[.., v_head_dim]`, or in an
        engine's own layout `kv` (see `LayerGroup`), in the group's dtype, each layer C-contiguous."""


def check_fit(arrays: Mapping[str, Array], names: Sequence[str], group: LayerGroup, tokens: int) -> None:
    """Raises InputError unless a view's arrays are those of `tokens` tokens of that group."""
    dtype = numpy_dtype(group.dtype)
    for name in names:
        array, shape = arrays.get(name), group.shape(name, tokens)
        if array is None or array.shape != shape or array.dtype != dtype:
            found = "missing" if array is None else f"{array.dtype} {array.shape}"
            raise InputError(f"array {name!r} of a view must be {dtype} {shape}; it is {found}")
        if not all(layer.flags.c_contiguous for layer in array[:1]):
            raise InputError(f"each layer of array {name!r} of a view must be C-contiguous")
    if len(arrays) != len(names):
        raise InputError(f"a view's arrays are {', '.join(names)}, not {', '.join(arrays)}")


class Scratch:
    """A view whose arrays are forgotten at once, for a load of which only the verification matters."""

    def __init__(self, namespace: Namespace):
        self._namespace = namespace

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        """New arrays."""
        spec = self._namespace.spec.groups[group]
        dtype = numpy_dtype(spec.dtype)
        return {name: np.empty(spec.shape(name, stop - start), dtype) for name in self._namespace.arrays}


class Pool:
    """`k` and `v` of every group for up to `capacity` tokens, `[layers, capacity, kv_heads, dim]`; of a
    sequence's tokens from `start` on."""

    def __init__(self, spec: KVSpec, capacity: int, start: int = 0):
        self.spec = spec
        self.start = start
        self.capacity = capacity
        self._arrays = [
            {name: np.zeros(group.shape(name, capacity), numpy_dtype(group.dtype)) for name in ("k", "v")}
            for group in spec.groups
        ]

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        """Views of tokens `start` to `stop`. Raises InputError beyond the capacity."""
        first, end = start - self.start, stop - self.start
        if not 0 <= first <= end <= self.capacity:
            raise InputError(
                f"tokens {start}..{stop} lie outside of a pool of {self.capacity} from {self.start} on"
            )
        return {name: array[:, first:end] for name, array in self._arrays[group].items()}

    def fill(self, byte: int) -> None:
        """Overwrite everything, so that nothing of what was here before can be taken for loaded."""
        for arrays in self._arrays:
            for array in arrays.values():
                array.view(np.uint8)[:] = byte

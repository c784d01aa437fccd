"""Codecs of a fixed rate: so many bits an element, on a grid of float16 zero and scale for each group.

Keys are un-rotated and share a grid over tokens, each channel its own; values share one over channels, each
token its own. The first tokens of a sequence, on which models lean, are kept as they are.
"""

from collections.abc import Mapping

import numpy as np

from kvass.codecs import fixed_kernels as kernels
from kvass.codecs import plain
from kvass.codecs.base import Chunk
from kvass.codecs.rans import UInt8
from kvass.codecs.sinks import check_fits, sinks
from kvass.codecs.tables import Float32, Tables
from kvass.container import Array, CodecStep
from kvass.errors import CorruptObjectError, InputError
from kvass.spec import numpy_dtype

_LARGEST = 65504.0


class FixedRate:
    """A codec of `bits` an element (8, 4 or 2), one grid for `key_group` tokens of a channel and one for
    `value_group` channels of a token; None: for all of the chunk's tokens, or of the head's channels."""

    name: str
    lossless = False
    in_place = False
    end_aware = False
    bits: int
    key_group: int | None
    value_group: int | None

    def __init__(self, tables: Tables):
        self._tables = tables

    def step(self) -> CodecStep:
        """The codec's name, and the digest of the tables whose rotation it used."""
        return CodecStep(self.name, {"tables": self._tables.digest})

    def encode(self, arrays: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """`k`, `v` `[layers, tokens, heads, bytes]` uint8; their grids, zero and scale, float16: `k_grid`
        `[layers, groups, heads, 2, dim]` and `v_grid` `[layers, tokens, heads, groups, 2]`; and, of a
        sequence's first chunk, `k_first`, `v_first`, its first tokens as they came.

        Raises InputError for values that are not finite, or too large for float16.
        """
        if arrays.keys() != {"k", "v"}:
            raise InputError(f"{self.name} takes arrays k and v, not {sorted(arrays)}")
        keys, values = (_finite(name, arrays[name], chunk) for name in ("k", "v"))
        rope = self._tables.rope(chunk.number)
        if rope is not None:
            keys = rope.unrotate(keys, chunk.start)
        if max(float(np.abs(keys).max()), float(np.abs(values).max())) > _LARGEST:
            raise InputError(f"{self.name} keeps no values beyond {_LARGEST:.0f}, and there are such")
        kept = sinks(chunk)
        stored: dict[str, Array] = {}
        stored["k"], stored["k_grid"] = plain.quantised_keys(keys, self.bits, self._key_group(chunk), kept)
        stored["v"], stored["v_grid"] = plain.quantised_values(values, self.bits, self._value_group(chunk))
        for name in ("k", "v") if kept else ():
            stored[f"{name}_first"] = np.ascontiguousarray(arrays[name][:, :kept])
        return stored

    def decode(self, stored: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """`k` and `v`. Raises CorruptObjectError where arrays, grids or tables do not fit the chunk."""
        wanted = self._stored(chunk)
        for name, (shape, dtype) in wanted.items():
            array = stored.get(name)
            if array is None or array.shape != shape or array.dtype != dtype:
                raise CorruptObjectError(
                    f"array {name!r} is missing, or of a shape that its chunk does not have"
                )
        if len(stored) != len(wanted):
            raise CorruptObjectError(f"an object of {self.name} has no arrays {sorted(stored)}")
        fast = chunk.group.dtype == "bfloat16"
        widened = widened_grid if fast else _widened_plainly
        grids = {name: widened(stored[f"{name}_grid"]) for name in ("k", "v")}
        decode = _decode_bfloat16 if fast else _decode_other
        groups = self._key_group(chunk), self._value_group(chunk)
        found = decode(stored, grids, self.bits, groups, self._rows(chunk), chunk)
        for name in ("k", "v") if sinks(chunk) else ():
            found[name][:, : sinks(chunk)] = stored[f"{name}_first"]
        return found

    def _key_group(self, chunk: Chunk) -> int:
        return self.key_group or chunk.tokens

    def _value_group(self, chunk: Chunk) -> int:
        return self.value_group or chunk.group.v_head_dim

    def _rows(self, chunk: Chunk) -> Float32:
        """Cosines and sines of the chunk's positions, `[tokens, rotary_dim]`."""
        rope = self._tables.rope(chunk.number)
        if rope is None:
            return np.empty((chunk.tokens, 0), np.float32)
        if rope.rotary_dim > chunk.group.head_dim:
            raise CorruptObjectError("the tables rotate more than a head has")
        try:
            return np.concatenate(rope.rows(chunk.start, chunk.tokens), axis=1)
        except InputError as error:
            raise CorruptObjectError(str(error)) from error

    def _stored(self, chunk: Chunk) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        group, tokens = chunk.group, chunk.tokens
        layers, heads, kept = len(group.layers), group.kv_heads, sinks(chunk)
        key_groups = -(-tokens // self._key_group(chunk))
        value_groups = -(-group.v_head_dim // self._value_group(chunk))
        byte, half = np.dtype(np.uint8), np.dtype(np.float16)
        found: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "k": ((layers, tokens, heads, plain.packed_width(group.head_dim, self.bits)), byte),
            "v": ((layers, tokens, heads, plain.packed_width(group.v_head_dim, self.bits)), byte),
            "k_grid": ((layers, key_groups, heads, 2, group.head_dim), half),
            "v_grid": ((layers, tokens, heads, value_groups, 2), half),
        }
        for name in ("k", "v") if kept else ():
            found[f"{name}_first"] = (group.shape(name, kept), numpy_dtype(group.dtype))
        return found


def widened_grid(grid: Array) -> Float32:
    """A stored grid, float16, as the kernels take it. Raises CorruptObjectError where it is not finite."""
    halves = np.ascontiguousarray(grid).view(np.uint16)
    wide = np.empty(grid.shape, np.float32)
    if not kernels.widened(halves.reshape(-1), wide.reshape(-1)):
        raise CorruptObjectError("a grid is not finite")
    return wide


def _widened_plainly(grid: Array) -> Float32:
    """As `widened_grid`, where nothing else is compiled."""
    wide = np.ascontiguousarray(grid, np.float32)
    if not np.isfinite(wide).all():
        raise CorruptObjectError("a grid is not finite")
    return wide


def _finite(name: str, array: Array, chunk: Chunk) -> Float32:
    check_fits(name, array, chunk)
    wide = array.astype(np.float32)
    if not np.isfinite(wide).all():
        raise InputError(f"array {name!r} has values that are not finite; only exact codecs keep them")
    return wide


def _bytes(array: Array) -> UInt8:
    return np.ascontiguousarray(array, np.uint8)


def _decode_bfloat16(
    stored: Mapping[str, Array],
    grids: Mapping[str, Float32],
    bits: int,
    groups: tuple[int, int],
    rows: Float32,
    chunk: Chunk,
) -> dict[str, Array]:
    k, v = (np.empty(chunk.group.shape(name, chunk.tokens), np.uint16) for name in ("k", "v"))
    kernels.keys(_bytes(stored["k"]), grids["k"], bits, groups[0], rows, k)
    kernels.values(_bytes(stored["v"]), grids["v"], bits, groups[1], v)
    bfloat16 = numpy_dtype("bfloat16")
    return {"k": k.view(bfloat16), "v": v.view(bfloat16)}


def _decode_other(
    stored: Mapping[str, Array],
    grids: Mapping[str, Float32],
    bits: int,
    groups: tuple[int, int],
    rows: Float32,
    chunk: Chunk,
) -> dict[str, Array]:
    wide = {
        "k": plain.keys(_bytes(stored["k"]), grids["k"], bits, groups[0], rows),
        "v": plain.values(_bytes(stored["v"]), grids["v"], bits, groups[1], chunk.group.v_head_dim),
    }
    return {name: plain.narrowed(array, numpy_dtype(chunk.group.dtype)) for name, array in wide.items()}

"""Bit-exact: sign and exponent of each channel entropy-coded by the fixed distribution that fits it best.

Mantissas are stored as they are: a model's are as good as random. Of each array one stream is stored under
its name, `[1, bytes]` uint8, little-endian; docs/codec-lossless.md has its layout.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvass.codecs import lossless_kernels as kernels
from kvass.codecs import rans
from kvass.codecs.base import Chunk
from kvass.codecs.lossless_tables import family
from kvass.codecs.rans import UInt8, UInt16
from kvass.container import Array, CodecStep
from kvass.errors import CorruptObjectError, InputError
from kvass.spec import numpy_dtype


class _Float(NamedTuple):
    """How a float is split: bits of its exponent, of its mantissa that go with it, and of those behind."""

    exponent: int
    mantissa: int
    behind: int


_FLOATS = {
    "bfloat16": _Float(8, 7, 0),
    "float16": _Float(5, 2, 8),
    "float32": _Float(8, 7, 16),
    "float8_e4m3fn": _Float(4, 3, 0),
    "float8_e5m2": _Float(5, 2, 0),
}
_CODES: dict[int, np.dtype] = {bits: np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32)}


class Lossless:
    """Gives the same bits back, NaN of every kind too; takes an engine's opaque arrays, if less densely."""

    name = "lossless"
    lossless = True
    in_place = False
    end_aware = False

    def step(self) -> CodecStep:
        """`lossless`, without parameters."""
        return CodecStep(self.name)

    def encode(self, arrays: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """One stream `[1, bytes]` uint8 for each of `k` and `v`, or for `kv`."""
        stored: dict[str, Array] = {}
        for name, array in arrays.items():
            if array.shape != chunk.group.shape(name, chunk.tokens) or array.dtype.name != chunk.group.dtype:
                raise InputError(f"array {name!r} is {array.dtype} {array.shape}, which its chunk is not")
            stored[name] = _encode(np.ascontiguousarray(array))
        return stored

    def decode(self, stored: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """The arrays. Raises CorruptObjectError for streams that no array of these shapes has."""
        names = ("kv",) if "kv" in stored else ("k", "v")
        if stored.keys() != set(names):
            raise CorruptObjectError(f"a lossless object has the arrays {sorted(stored)}")
        shapes = {name: chunk.group.shape(name, chunk.tokens) for name in names}
        return {name: _decode(name, stored[name], shapes[name], chunk.group.dtype) for name in names}


class _Source:
    """Takes a stream apart from its beginning on."""

    def __init__(self, name: str, stream: UInt8):
        self._name, self._stream, self._at = name, stream, 0

    def take(self, count: int) -> UInt8:
        """The next bytes. Raises CorruptObjectError where there are not so many."""
        if count > self._stream.size - self._at:
            raise CorruptObjectError(f"array {self._name!r} ends before its time")
        self._at += count
        return self._stream[self._at - count : self._at]

    def end(self) -> None:
        """Raises CorruptObjectError where bytes are left."""
        if self._at != self._stream.size:
            raise CorruptObjectError(f"array {self._name!r} is longer than what it holds")


def _split(array: Array) -> tuple[UInt16, Array | None]:
    """The upper bits, in the places that bfloat16 has them, and the bits behind them where there are any."""
    kind = _FLOATS[array.dtype.name]
    bits = 1 + kind.exponent + kind.mantissa + kind.behind
    codes = array.view(_CODES[bits])
    if kind == _FLOATS["bfloat16"]:
        return codes.view(np.uint16), None
    upper = (codes >> kind.behind).astype(np.uint16)
    sign = (upper >> (kind.exponent + kind.mantissa)) << 15
    rest = (upper & ((1 << (kind.exponent + kind.mantissa)) - 1)) << (7 - kind.mantissa)
    behind = codes.astype(_CODES[kind.behind]) if kind.behind else None
    return (sign | rest).astype(np.uint16), behind


def _join(upper: UInt16, behind: Array | None, dtype: str) -> Array:
    kind = _FLOATS[dtype]
    if kind == _FLOATS["bfloat16"]:
        return upper.view(numpy_dtype(dtype))
    codes = _CODES[1 + kind.exponent + kind.mantissa + kind.behind]
    sign = (upper >> 15) << (kind.exponent + kind.mantissa)
    mask = (1 << (kind.exponent + kind.mantissa)) - 1
    joined = (sign | ((upper >> (7 - kind.mantissa)) & mask)).astype(codes)
    if behind is not None:
        joined = ((joined << kind.behind) | np.asarray(behind, codes)).astype(codes)
    return np.asarray(joined.view(numpy_dtype(dtype)))


def _encode(array: Array) -> UInt8:
    upper, behind = _split(array)
    rows = upper.reshape(len(array), array.shape[1], -1)
    layers, tokens, channels = rows.shape
    width, tables = _FLOATS[array.dtype.name].mantissa, family()
    size = -(-tokens * channels // rans.LANES) * rans.LANES
    chosen, tops = np.empty((2, layers, channels), np.uint8)
    symbols, escapes = np.zeros((layers, size), np.uint8), np.empty(rows.size, np.uint8)
    packed = np.empty((layers, kernels.packed_size(tokens, channels, width)), np.uint8)
    escaped = 0
    for layer in range(layers):
        kernels.choose(rows[layer], tables.costs, chosen[layer], tops[layer])
        escaped += kernels.fold(rows[layer], chosen[layer], tops[layer], symbols[layer], escapes[escaped:])
        kernels.pack(rows[layer], width, packed[layer])
    words, states = np.empty(symbols.size + rans.STATE_WORDS, np.uint16), rans.fresh()
    at = len(words)
    for layer in range(layers - 1, -1, -1):
        contexts = np.resize(chosen[layer] & np.uint8(kernels.FLIP - 1), size)
        at = rans.encode_run(tables.coding, contexts, symbols[layer], words, at, states)
    at = rans.finish(words, at, states)
    counts = np.array([len(words) - at, escaped], np.uint32)
    pieces: list[Array] = [counts, chosen, tops, words[at:], escapes[:escaped], packed]
    if behind is not None:
        pieces.append(behind)
    return np.concatenate([piece.reshape(-1).view(np.uint8) for piece in pieces])[None]


def _decode(name: str, stream: Array, shape: tuple[int, ...], dtype: str) -> Array:
    if stream.dtype != np.uint8 or stream.ndim != 2 or len(stream) != 1:
        raise CorruptObjectError(f"array {name!r} is {stream.dtype} {stream.shape}, not one stream of bytes")
    kind, tables = _FLOATS[dtype], family()
    layers, tokens, channels = shape[0], shape[1], int(np.prod(shape[2:]))
    source = _Source(name, np.ascontiguousarray(stream[0], np.uint8))
    count, escaped = (int(number) for number in source.take(8).view(np.uint32))
    chosen, tops = source.take(2 * layers * channels).reshape(2, layers, channels)
    if count < rans.STATE_WORDS or (chosen & (kernels.FLIP - 1)).max() >= tables.tables:
        raise CorruptObjectError(f"array {name!r} names tables that there are not, or has no stream")
    coded = source.take(2 * count)
    escapes = source.take(escaped)
    packed = source.take(layers * kernels.packed_size(tokens, channels, kind.mantissa))
    behind = source.take(layers * tokens * channels * kind.behind // 8) if kind.behind else None
    source.end()
    words = np.zeros(count + rans.PADDING, np.uint16)
    words[:count].view(np.uint8)[:] = coded
    rows = np.empty((layers, tokens, channels), np.uint16)
    if not kernels.unfold(tables.decoding, chosen, tops, words, escapes, packed, kind.mantissa, rows):
        raise CorruptObjectError(f"array {name!r} has a stream that does not end where it should")
    if behind is not None:
        behind = behind.view(_CODES[kind.behind]).reshape(rows.shape)
    return _join(rows, behind, dtype).reshape(shape)

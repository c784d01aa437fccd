"""The codecs in plain numpy: what the kernels must agree with bit by bit; and the fixed rates' encoders."""

import ml_dtypes
import numpy as np

from kvass.codecs import rans
from kvass.codecs.rans import UInt8, UInt16
from kvass.codecs.tables import Float32
from kvass.container import Array


def rans_encode(frequencies: UInt16, contexts: UInt8, symbols: UInt8) -> UInt16:
    """The stream of symbols, a multiple of 64, each coded with the table that its context names."""
    starts = np.cumsum(frequencies, axis=1, dtype=np.int64) - frequencies
    states, words = [1 << 16] * rans.LANES, []
    for i in range(len(symbols) - 1, -1, -1):
        table, symbol, lane = contexts[i], symbols[i], i % rans.LANES
        frequency, state = int(frequencies[table, symbol]), states[lane]
        if state >= frequency << 20:
            words.append(state & 0xFFFF)
            state >>= 16
        states[lane] = (state // frequency << rans.BITS) + state % frequency + int(starts[table, symbol])
    for state in reversed(states):
        words += [state >> 16, state & 0xFFFF]
    return np.array(words[::-1], np.uint16)


def rans_decode(frequencies: UInt16, contexts: UInt8, words: UInt16) -> UInt8:
    """The symbols of a stream, as many as there are contexts; words behind its end are taken as 0."""
    ends = np.cumsum(frequencies, axis=1, dtype=np.int64)
    states = [int(words[2 * lane]) | int(words[2 * lane + 1]) << 16 for lane in range(rans.LANES)]
    at, symbols = rans.STATE_WORDS, np.empty(len(contexts), np.uint8)
    for i, table in enumerate(contexts):
        lane = i % rans.LANES
        slot = states[lane] % rans.TOTAL
        symbol = int(np.searchsorted(ends[table], slot, side="right"))
        frequency = int(frequencies[table, symbol])
        state = frequency * (states[lane] >> rans.BITS) + slot - (int(ends[table, symbol]) - frequency)
        if state < 1 << 16:
            state = state << 16 | (int(words[at]) if at < len(words) else 0)
            at += 1
        states[lane], symbols[i] = state, symbol
    return symbols


def unpacked_mantissas(packed: UInt8, tokens: int, channels: int, width: int) -> UInt8:
    """Mantissas `[tokens, channels]`, in the upper `width` of 7 bits, of one layer."""
    found, at = [], 0
    for first in range(0, tokens, 8):
        count = min(8, tokens - first)
        rows = packed[at : at + min(count, width) * channels].reshape(-1, channels).astype(np.int64)
        at += rows.size
        if count <= width:
            block = rows << (7 - width)
        elif width == 7:
            last = ((rows >> 7) << np.arange(7)[:, None]).sum(axis=0)
            block = np.concatenate([rows & 127, last[None]])
        else:
            bits = (rows[:, None] >> np.arange(count)[None, :, None]) & 1
            block = (bits << (7 - width + np.arange(width))[:, None, None]).sum(axis=0)
        found.append(block)
    return np.asarray(np.concatenate(found), np.uint8)


def unfolded(symbols: UInt8, chosen: UInt8, tops: UInt8, escapes: UInt8, mantissas: UInt8) -> UInt16:
    """Rows `[tokens, channels]` of one layer of the lossless codec, as bfloat16 codes."""
    level, sign = symbols.astype(np.int64) & 15, (symbols >> 4) ^ (chosen >> 7)
    exponents = (tops.astype(np.int64) - level) & 255
    exponents[level == 15] = escapes
    return ((sign.astype(np.int64) << 15) | (exponents << 7) | mantissas).astype(np.uint16)


def packed_width(dim: int, bits: int) -> int:
    """Bytes that one head's levels take up."""
    return -(-dim * bits // 8)


def packed(levels: UInt8, bits: int) -> UInt8:
    """Levels `[..., dim]` into bytes: byte j holds those of channels j, j + width, ..., lowest first."""
    each = 8 // bits
    width = packed_width(levels.shape[-1], bits)
    padded = np.zeros((*levels.shape[:-1], each * width), np.uint8)
    padded[..., : levels.shape[-1]] = levels
    found = np.zeros((*levels.shape[:-1], width), np.uint8)
    for number in range(each):
        found |= padded[..., number * width : (number + 1) * width] << np.uint8(number * bits)
    return found


def unpacked(packed: UInt8, bits: int, dim: int) -> Float32:
    """The levels `[..., dim]` as float32."""
    parts = [(packed >> np.uint8(shift)) & np.uint8((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.asarray(np.concatenate(parts, axis=-1)[..., :dim], np.float32)


def quantised_keys(keys: Float32, bits: int, group: int, sinks: int) -> tuple[UInt8, Array]:
    """Bytes and grid of keys `[layers, tokens, heads, dim]`; the first `sinks` tokens shape no grid."""
    layers, tokens, heads, dim = keys.shape
    groups = -(-tokens // group)
    padded = np.full((layers, groups * group, heads, dim), np.nan, np.float32)
    padded[:, sinks:tokens] = keys[:, sinks:]
    blocks = padded.reshape(layers, groups, group, heads, dim)
    grid = _grid(np.fmin.reduce(blocks, axis=2), np.fmax.reduce(blocks, axis=2), bits, -2)
    wide = np.repeat(grid.astype(np.float32), group, axis=1)[:, :tokens]
    return packed(_levels(keys, wide[..., 0, :], wide[..., 1, :], bits), bits), grid


def quantised_values(values: Float32, bits: int, group: int) -> tuple[UInt8, Array]:
    """Bytes and grid of values `[layers, tokens, heads, dim]`."""
    dim = values.shape[-1]
    groups = -(-dim // group)
    padded = np.full((*values.shape[:-1], groups * group), np.nan, np.float32)
    padded[..., :dim] = values
    blocks = padded.reshape(*values.shape[:-1], groups, group)
    grid = _grid(np.fmin.reduce(blocks, axis=-1), np.fmax.reduce(blocks, axis=-1), bits, -1)
    wide = np.repeat(grid.astype(np.float32), group, axis=-2)[..., :dim, :]
    return packed(_levels(values, wide[..., 0], wide[..., 1], bits), bits), grid


def _grid(low: Float32, high: Float32, bits: int, axis: int) -> Array:
    """Zero and scale, float16, along a new axis, rounded so that the levels reach from low to high."""
    low, high = np.nan_to_num(low), np.nan_to_num(high)
    zero = low.astype(np.float16)
    zero = np.where(zero > low, np.nextafter(zero, np.float16(-np.inf)), zero)
    wanted = (high - zero.astype(np.float32)) / np.float32((1 << bits) - 1)
    scale = wanted.astype(np.float16)
    scale = np.where(scale < wanted, np.nextafter(scale, np.float16(np.inf)), scale)
    return np.stack([zero, scale], axis=axis)


def _levels(array: Float32, zero: Float32, scale: Float32, bits: int) -> UInt8:
    steps = np.divide(array - zero, scale, out=np.zeros_like(array), where=scale > 0)
    return np.asarray(np.clip(np.rint(steps), 0, (1 << bits) - 1), np.uint8)


def keys(packed: UInt8, grid: Float32, bits: int, group: int, rows: Float32) -> Float32:
    """Keys `[layers, tokens, heads, dim]` from bytes and grid, rotated."""
    tokens, half = packed.shape[1], rows.shape[1] // 2
    wide = np.repeat(grid, group, axis=1)[:, :tokens]
    found = wide[..., 0, :] + unpacked(packed, bits, grid.shape[-1]) * wide[..., 1, :]
    low, high = found[..., :half].copy(), found[..., half : 2 * half].copy()
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    found[..., :half] = low * cos - high * sin
    found[..., half : 2 * half] = high * cos + low * sin
    return found


def values(packed: UInt8, grid: Float32, bits: int, group: int, dim: int) -> Float32:
    """Values `[layers, tokens, heads, dim]` from bytes and grid."""
    wide = np.repeat(grid, group, axis=-2)[..., :dim, :]
    return wide[..., 0] + unpacked(packed, bits, dim) * wide[..., 1]


def narrowed(array: Float32, dtype: np.dtype) -> Array:
    """To nearest in `dtype`; what lies beyond its range becomes its largest value."""
    largest = np.float32(np.asarray(_largest(dtype)))
    return np.clip(array, -largest, largest).astype(dtype)


def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]

"""The fixed-rate codecs' inner loops: unpack, put on the grid, rotate and round to bfloat16 in one pass."""

import numpy as np
import numpy.typing as npt

from kvass.codecs import fixed_lanes
from kvass.codecs.kernel import kernel

UInt8 = npt.NDArray[np.uint8]
UInt16 = npt.NDArray[np.uint16]
Float32 = npt.NDArray[np.float32]

_WIDTH = fixed_lanes.WIDTH
_HALF = np.uint32(0x7FFF)
_WORD = np.uint32(16)
_ONE = np.uint32(1)
_MAGNITUDE, _SIGN, _INFINITE = np.uint16(0x7FFF), np.uint16(0x8000), np.uint16(0x7C00)
_SHORTER = np.uint32(13)
_BIASED = np.float32(2.0**112)
"""By which the exponents of float32 and float16 are apart."""


@kernel
def rounded(value: np.float32) -> np.uint16:
    """bfloat16 of a finite float32, to nearest, ties to even."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32((bits >> _WORD) & _ONE)
    return np.uint16(np.uint32(np.uint32(bits + _HALF) + odd) >> _WORD)


@kernel
def widened(halves: UInt16, wide: Float32) -> bool:
    """float16 codes `[n]` as float32, the same numbers; whether all are finite, which they must be."""
    bits = wide.view(np.uint32)
    for i in range(len(halves)):
        bits[i] = np.uint32(np.uint32(halves[i]) & _MAGNITUDE) << _SHORTER
    for i in range(len(wide)):
        wide[i] *= _BIASED  # exact: what is subnormal in float16 becomes normal
    most = np.uint16(0)
    for i in range(len(halves)):
        most = max(most, np.uint16(halves[i] & _MAGNITUDE))
        bits[i] |= np.uint32(np.uint32(halves[i]) & _SIGN) << _WORD
    return bool(most < _INFINITE)


@kernel
def unpack(packed: UInt8, bits: int, levels: Float32) -> None:
    """Levels of one head: byte j holds those of channels j, j + len(packed), ..., lowest bits first."""
    width = np.uint64(len(packed))  # unsigned, so that no index can be one from the end
    if bits == 8:
        for j in range(width):
            levels[j] = np.float32(packed[j])
    elif bits == 4:
        for j in range(width):
            levels[j] = np.float32(packed[j] & np.uint8(15))
            levels[width + j] = np.float32(packed[j] >> np.uint8(4))
    else:
        for j in range(width):
            levels[j] = np.float32(packed[j] & np.uint8(3))
            levels[width + j] = np.float32((packed[j] >> np.uint8(2)) & np.uint8(3))
            levels[width + width + j] = np.float32((packed[j] >> np.uint8(4)) & np.uint8(3))
            levels[width + width + width + j] = np.float32(packed[j] >> np.uint8(6))


@kernel
def keys(packed: UInt8, grid: Float32, bits: int, group: int, rows: Float32, out: UInt16) -> None:
    """Fill `out` `[layers, tokens, heads, dim]` with bfloat16 keys, rotated.

    `packed` `[layers, tokens, heads, bytes]`, `grid` `[layers, groups, heads, 2, dim]`, `rows` `[tokens,
    rotary_dim]`: cosines, then sines; all contiguous.
    """
    layers, tokens, heads, dim = out.shape
    groups, half = grid.shape[1], rows.shape[1] // 2
    flat, steps = packed.reshape(packed.size), grid.reshape(grid.size)
    turns, found = rows.reshape(rows.size), out.reshape(out.size)
    levels = np.empty(packed.shape[3] * (8 // bits), np.float32)
    direct = bits == 8 and half % _WIDTH == 0 and 2 * half == dim
    vectors = half // _WIDTH * _WIDTH
    for layer in range(layers):
        for t in range(tokens):
            row = 2 * half * t
            for head in range(heads):
                to = ((layer * tokens + t) * heads + head) * dim
                zero = ((layer * groups + t // group) * heads + head) * 2 * dim
                scale = zero + dim
                if direct:
                    for i in range(0, half, _WIDTH):
                        fixed_lanes.turn(
                            flat, steps, turns, found, to + i, zero + i, scale + i, row + i, to + i, half
                        )
                    continue
                unpack(packed[layer, t, head], bits, levels)
                for i in range(0, vectors, _WIDTH):
                    fixed_lanes.turn(
                        levels, steps, turns, found, i, zero + i, scale + i, row + i, to + i, half
                    )
                for i in range(vectors, half):
                    low = steps[zero + i] + levels[i] * steps[scale + i]
                    high = steps[zero + half + i] + levels[half + i] * steps[scale + half + i]
                    cos, sin = turns[row + i], turns[row + half + i]
                    found[to + i] = rounded(low * cos - high * sin)
                    found[to + half + i] = rounded(high * cos + low * sin)
                for i in range(2 * half, dim):
                    found[to + i] = rounded(steps[zero + i] + levels[i] * steps[scale + i])


@kernel
def values(packed: UInt8, grid: Float32, bits: int, group: int, out: UInt16) -> None:
    """Fill `out` `[layers, tokens, heads, dim]` with bfloat16 values.

    `packed` `[layers, tokens, heads, bytes]`, `grid` `[layers, tokens, heads, groups, 2]`.
    """
    layers, tokens, heads, dim = out.shape
    levels = np.empty(packed.shape[3] * (8 // bits), np.float32)
    for layer in range(layers):
        for t in range(tokens):
            for head in range(heads):
                some, row = packed[layer, t, head], out[layer, t, head]
                if bits != 8:
                    unpack(some, bits, levels)
                for number in range(grid.shape[3]):
                    zero, scale = grid[layer, t, head, number, 0], grid[layer, t, head, number, 1]
                    first = np.uint64(number * group)
                    last = np.uint64(min(number * group + group, dim))
                    if bits == 8:
                        for i in range(first, last):
                            row[i] = rounded(zero + np.float32(some[i]) * scale)
                    else:
                        for i in range(first, last):
                            row[i] = rounded(zero + levels[i] * scale)

"""The transform codec's arithmetic for one layer of one chunk: projections, weights, rotation, rounding.

Every array is C-contiguous; a part of a row is told by where it begins. Sums have a fixed order.
"""

import numpy as np

from kvass.codecs import transform_lanes as lanes
from kvass.codecs.kernel import kernel
from kvass.codecs.rans import UInt16, UInt32
from kvass.codecs.tables import Float32

_ZERO, _UNIT = np.float32(0), np.float32(1)
_LOWEST, _HIGHEST = np.float32(-64), np.float32(62)
_BIAS, _MANTISSA = np.float32(127), np.uint32(23)
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_WORD = np.uint32(16)


@kernel
def _some(factors: Float32, at: int, count: int) -> np.uint64:
    """Which of `count` factors, `lanes.FACTORS` at most, are not zero, the first in the lowest bit."""
    mask = np.uint64(0)
    if count == lanes.FACTORS:
        full: np.uint64 = lanes.nonzero(factors, at)
        return full
    for i in range(count):
        mask |= np.uint64(factors[at + i] != _ZERO) << np.uint64(i)
    return mask


@kernel
def _add_product(
    factors: Float32, factor: int, pitch: int, matrix: Float32, place: int, height: int, width: int,
    sums: Float32, to: int, step: int, tokens: int,
) -> None:  # fmt: skip
    """Add `factors @ matrix` to `sums`, row of the matrix by row; rows whose factor is zero cost nothing.

    All are flat: each token's `height` factors, the first's from `factor` on and `pitch` apart; the matrix
    `[height, width]` from `place` on; each token's `width` sums from `to` on, `step` apart. A part of the
    matrix that stays in the L1 cache is used for all tokens before the next.
    """
    wide = width - width % lanes.WIDE
    narrow = width - width % lanes.NARROW
    for first in range(0, height, lanes.FACTORS):
        count = min(lanes.FACTORS, height - first)
        row = place + first * width
        for j in range(0, wide, lanes.WIDE):
            for token in range(tokens):
                at = factor + token * pitch + first
                mask = _some(factors, at, count)
                lanes.add_wide(factors, matrix, sums, mask, at, row + j, width, to + token * step + j)
        for j in range(wide, narrow, lanes.NARROW):
            for token in range(tokens):
                at = factor + token * pitch + first
                mask = _some(factors, at, count)
                lanes.add_narrow(factors, matrix, sums, mask, at, row + j, width, to + token * step + j)
        for token in range(tokens if narrow < width else 0):
            for i in range(count):
                value = factors[factor + token * pitch + first + i]
                if value != _ZERO:
                    for j in range(narrow, width):
                        sums[to + token * step + j] += value * matrix[row + i * width + j]


@kernel
def _add_dense_product(
    factors: Float32, factor: int, pitch: int, matrix: Float32, place: int, height: int, width: int,
    sums: Float32, to: int, step: int, tokens: int,
) -> None:  # fmt: skip
    """What `_add_product` does, where few factors are zero: these cost as much as others, but two tokens
    share what is read of the matrix."""
    wide = width - width % lanes.WIDE
    narrow = width - width % lanes.NARROW
    for first in range(0, height, lanes.FACTORS):
        count = min(lanes.FACTORS, height - first)
        row = place + first * width
        for j in range(0, wide, lanes.WIDE):
            for token in range(0, tokens, 2):
                at, end = factor + token * pitch + first, to + token * step + j
                other = 1 if token + 1 < tokens else 0  # one that is left over is its own pair
                lanes.add_pair_wide(
                    factors, matrix, sums, count, at, other * pitch, row + j, width, end, other * step
                )
        for j in range(wide, narrow, lanes.NARROW):
            for token in range(0, tokens, 2):
                at, end = factor + token * pitch + first, to + token * step + j
                other = 1 if token + 1 < tokens else 0
                lanes.add_pair_narrow(
                    factors, matrix, sums, count, at, other * pitch, row + j, width, end, other * step
                )
        for token in range(tokens if narrow < width else 0):
            for i in range(count):
                value = factors[factor + token * pitch + first + i]
                for j in range(narrow, width):
                    sums[to + token * step + j] += value * matrix[row + i * width + j]


@kernel
def transformed(x: Float32, mean: Float32, matrix: Float32, first: int, y: Float32) -> None:
    """`y = (x - mean) @ matrix` block by block, into columns of `y` from `first` on; `x` loses its mean.

    x `[tokens, n]`, mean `[n]`, matrix `[blocks, n / blocks, n / blocks]`, y `[tokens, first + n or more]`.
    """
    tokens, n = x.shape
    width = matrix.shape[1]
    for token in range(tokens):
        for i in range(n):
            x[token, i] -= mean[i]
        y[token, first : first + n] = 0
    values, flat, to = x.reshape(-1), matrix.reshape(-1), y.reshape(-1)
    for block in range(0, n, width):
        place, column = block * width, first + block
        _add_dense_product(values, block, n, flat, place, width, width, to, column, y.shape[1], tokens)


@kernel
def restored(y: Float32, first: int, mean: Float32, matrix: Float32, x: Float32) -> None:
    """`x = mean + y @ matrix` block by block; what is zero in `y`, which is most of it, costs nothing.

    x `[tokens, n]`; y's columns from `first` on; matrix as for `transformed`.
    """
    tokens, n = x.shape
    width = matrix.shape[1]
    for token in range(tokens):
        x[token] = mean
    values, flat, to = y.reshape(-1), matrix.reshape(-1), x.reshape(-1)
    for block in range(0, n, width):
        place, column = block * width, first + block
        _add_product(values, column, y.shape[1], flat, place, width, width, to, block, n, tokens)


@kernel
def _raise_two(row: Float32, bits: UInt32) -> None:
    """Replace exponents, taken as -64 to 62, by powers of two, within 1e-4 of them; `bits`: room for as
    many."""
    for p in range(len(row)):
        bounded = row[p] if row[p] > _LOWEST else _LOWEST  # so is what is not a number
        bounded = bounded if bounded < _HIGHEST else _HIGHEST
        whole = np.floor(bounded)
        rest = bounded - whole
        near = np.float32(0.0136)
        near = near * rest + np.float32(0.0520)
        near = near * rest + np.float32(0.2414)
        near = near * rest + np.float32(0.6930)
        row[p] = near * rest + _UNIT
        bits[p] = np.uint32(np.int32(whole + _BIAS)) << _MANTISSA
    whole_powers = bits.view(np.float32)
    for p in range(len(row)):
        row[p] *= whole_powers[p]


@kernel
def _folded(row: Float32) -> np.float32:
    """The sum of a row, which is lost: its second half is added to the first, and so on; of an odd number the
    middle one stays."""
    count = len(row)
    while count > 1:
        half = (count + 1) // 2
        for p in range(count - half):
            row[p] += row[half + p]
        count = half
    total: np.float32 = row[0]
    return total


@kernel
def importance(keys: Float32, probes: Float32, offsets: Float32, weights: Float32) -> None:
    """How much attention probes give to each key: the mean of 2 ** (key . probe - offset) over the probes.

    keys `[tokens, heads, dim]` turned to their places in the chunk; probes `[heads, dim, probes]` and offsets
    `[heads, probes]` in units of which a power of two is taken; weights `[tokens, heads]`.
    """
    tokens, heads, dim = keys.shape
    count = probes.shape[2]
    flat, lines = keys.reshape(-1), probes.reshape(-1)
    score, bits = np.empty((tokens, count), np.float32), np.empty(count, np.uint32)
    share = np.float32(1) / np.float32(count)
    for head in range(heads):
        for token in range(tokens):
            for p in range(count):
                score[token, p] = -offsets[head, p]
        place = head * dim * count
        _add_dense_product(
            flat, head * dim, heads * dim, lines, place, dim, count, score.reshape(-1), 0, count, tokens
        )
        for token in range(tokens):
            _raise_two(score[token], bits)
            weights[token, head] = _folded(score[token]) * share


@kernel
def turned(x: Float32, cos: Float32, sin: Float32, out: Float32) -> None:
    """Turn `x` `[tokens, heads, dim]` to its positions, into `out`, which may be `x`.

    `cos`, `sin` `[tokens, half]`; half may be 0.
    """
    half, dim = cos.shape[1], x.shape[2]
    whole = half - half % lanes.NARROW
    flat, to, cosines, sines = x.reshape(-1), out.reshape(-1), cos.reshape(-1), sin.reshape(-1)
    for token in range(len(x)):
        for head in range(x.shape[1]):
            at, place = (token * x.shape[1] + head) * dim, token * half
            for i in range(0, whole, lanes.NARROW):
                lanes.turn(flat, cosines, sines, to, at + i, half, place + i)
            for i in range(at + whole, at + half):
                c, s = cosines[place + i - at], sines[place + i - at]
                low = flat[i] * c - flat[half + i] * s
                to[half + i] = flat[half + i] * c + flat[i] * s
                to[i] = low
            for i in range(at + 2 * half, at + dim):
                to[i] = flat[i]


@kernel
def rounded(x: Float32, cos: Float32, sin: Float32, out: UInt16) -> None:
    """Turn `x` as `turned` does, and round it to bfloat16 codes, to nearest even."""
    turned(x, cos, sin, x)
    for token in range(len(x)):
        for head in range(x.shape[1]):
            bits, to = x[token, head].view(np.uint32), out[token, head]
            for i in range(len(bits)):
                to[i] = np.uint16((bits[i] + _HALF + ((bits[i] >> _WORD) & _ONE)) >> _WORD)

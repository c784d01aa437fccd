"""The transform codec in plain numpy: what its kernels must agree with bit by bit."""

import ml_dtypes
import numpy as np

from kvass.codecs import plain, rans
from kvass.codecs.rans import UInt8, UInt16
from kvass.codecs.tables import Float32
from kvass.codecs.transform_kernels import ESCAPE, LARGEST, MOST, Int16, Int32

_NEAR = np.array([0.0136, 0.0520, 0.2414, 0.6930, 1], np.float32)


def _add_product(sums: Float32, factors: Float32, matrix: Float32, *, sparse: bool) -> None:
    """`sparse`: a factor of zero is not added, which would make 0 of -0."""
    for i in range(len(matrix)):
        factor = factors[:, i, None]
        np.copyto(sums, sums + factor * matrix[i], where=factor != 0 if sparse else True)


def _by_block(start: Float32, factors: Float32, matrix: Float32, *, sparse: bool) -> Float32:
    found, width = start.copy(), matrix.shape[1]
    for number, block in enumerate(matrix):
        columns = slice(number * width, (number + 1) * width)
        _add_product(found[:, columns], factors[:, columns], block, sparse=sparse)
    return found


def transformed(x: Float32, mean: Float32, matrix: Float32) -> Float32:
    """`(x - mean) @ matrix` block by block: x `[tokens, n]`, matrix `[blocks, n / blocks, n / blocks]`."""
    return _by_block(np.zeros_like(x), x - mean, matrix, sparse=False)


def restored(y: Float32, mean: Float32, matrix: Float32) -> Float32:
    """`mean + y @ matrix` block by block."""
    return _by_block(np.tile(mean, (len(y), 1)), y, matrix, sparse=True)


def _power_of_two(exponents: Float32) -> Float32:
    bounded = np.where(exponents > -64, exponents, np.float32(-64))
    bounded = np.where(bounded < 62, bounded, np.float32(62))
    whole = np.floor(bounded)
    rest, near = bounded - whole, np.full_like(bounded, _NEAR[0])
    for factor in _NEAR[1:]:
        near = near * rest + factor
    return np.asarray(np.ldexp(near, whole.astype(np.int32)), np.float32)


def importance(keys: Float32, probes: Float32, offsets: Float32) -> Float32:
    """Weights `[tokens, heads]` of keys `[tokens, heads, dim]`."""
    tokens, heads, _ = keys.shape
    weights = np.empty((tokens, heads), np.float32)
    for head in range(heads):
        score = np.tile(-offsets[head], (tokens, 1))
        _add_product(score, keys[:, head], probes[head], sparse=False)
        row = _power_of_two(score)
        while row.shape[1] > 1:
            half = (row.shape[1] + 1) // 2
            rest = row.shape[1] - half
            row = np.concatenate([row[:, :rest] + row[:, half:], row[:, rest:half]], axis=1)
        weights[:, head] = row[:, 0] * (np.float32(1) / np.float32(offsets.shape[1]))
    return weights


def classified(weights: Float32, thresholds: Float32) -> UInt8:
    """Classes `[tokens, heads]`; thresholds `[heads, classes - 1]`."""
    return np.asarray((weights[..., None] < thresholds).sum(axis=-1), np.uint8)


def columns(classes: UInt8, split: int, n: int) -> UInt8:
    """The class of each token's columns `[tokens, n]`."""
    heads = classes.shape[1]
    parts = np.repeat(classes, split // heads, axis=1), np.repeat(classes, (n - split) // heads, axis=1)
    return np.concatenate(parts, axis=1)


def contexts(wide: UInt8, base: Int16, shifts: Int16, last: int) -> UInt8:
    """Contexts `[tokens, n]` where `columns` are of these classes."""
    return np.asarray(np.clip(base.astype(np.int64) - shifts[wide], 0, last), np.uint8)


def quantised(y: Float32, inverse_steps: Float32, rounding: Float32) -> tuple[UInt8, Int32]:
    """Symbols of `y` `[tokens, n]` and escapes; steps and rounding of each element, as `y`."""
    value = y * inverse_steps
    size = np.floor(np.abs(value) + rounding)
    size[~(size > 0)] = 0
    level = np.minimum(size, LARGEST).astype(np.int32)
    symbols = np.where(level > 0, 2 * level - (value > 0), 0)
    symbols[level > MOST] = ESCAPE
    signed = np.where(value < 0, -level, level)
    return symbols.astype(np.uint8), np.asarray(signed[level > MOST], np.int32)


def dequantised(symbols: UInt8, contexts: UInt8, steps: Float32, centres: Float32, escapes: Int32) -> Float32:
    """`y` `[tokens, n]`; steps of each element; centres `[contexts, 256]`."""
    levels = centres[contexts, symbols]
    levels[symbols == ESCAPE] = escapes.astype(np.float32)
    return levels * steps


def turned(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """`x` `[tokens, heads, dim]` at its positions; `cos`, `sin` `[tokens, half]`."""
    half, found = cos.shape[1], x.copy()
    low, high = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    found[..., :half] = low * cos - high * sin
    found[..., half : 2 * half] = high * cos + low * sin
    return found


def rounded(x: Float32) -> UInt16:
    """bfloat16 codes, to nearest even."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def padded(rows: UInt8, filling: int) -> UInt8:
    """Rows, each filled up to whole lanes, flat."""
    room = -rows.shape[1] % rans.LANES
    return np.pad(rows, ((0, 0), (0, room)), constant_values=filling).reshape(-1)


def stream(frequencies: UInt16, runs: list[tuple[UInt8, UInt8]], escapes: Int32) -> UInt8:
    """The stream of runs of contexts and symbols, in the order in which they are decoded."""
    kinds, symbols = (np.concatenate(part) for part in zip(*runs, strict=True))
    words = plain.rans_encode(frequencies, kinds, symbols)
    lengths = np.array([len(words), len(escapes)], "<u4")
    return np.concatenate(
        [one.view(np.uint8) for one in (lengths, words.astype("<u2"), escapes.astype("<i4"))]
    )

"""The fixed distributions that the lossless codec chooses from: sign and exponent of normal variables.

Part of the format: an object names its tables by number. Made by integer arithmetic alone, so that they are
the same everywhere; `tests/codecs` pins their digest.
"""

from functools import cache
from itertools import pairwise
from math import factorial, isqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.codecs import rans

LEVELS = 16
"""Exponents below a channel's top one that have symbols of their own; the last stands for all others."""
SYMBOLS = 2 * LEVELS
"""Symbol = sign * LEVELS + level."""
ESCAPE = LEVELS - 1
ESCAPE_BITS = 8
COST_UNIT = 256
"""Costs are in 1/256 bit."""

_STEPS = 64
"""Means, spreads and the grid of the normal distribution are in 1/64 of a standard deviation."""
_REACH = 10
_FINE = 24
"""Edges are in 2**-24 of a standard deviation."""
_ONE = 1 << 60


class Family(NamedTuple):
    """What a process needs of the tables: `[tables, 32]` for coding, `[tables * 4096]` for decoding, and the
    cost of each symbol `[32, tables]`, escaped exponents included, in units of 1/256 bit."""

    tables: int
    coding: rans.UInt32
    decoding: rans.UInt32
    costs: npt.NDArray[np.int32]


@cache
def family() -> Family:
    """The tables, made at the first call (some milliseconds)."""
    found = table_frequencies()
    bits = {int(f): _cost(int(f)) for f in np.unique(found)}
    costs = np.array([[bits[int(f)] for f in row] for row in found], np.int32)
    costs[:, ESCAPE::LEVELS] += ESCAPE_BITS * COST_UNIT
    return Family(
        len(found),
        rans.coding_tables(found),
        rans.decoding_tables(found),
        np.ascontiguousarray(costs.T),
    )


def table_frequencies() -> rans.UInt16:
    """Frequencies `[tables, 32]` of sign and level, each row summing up to 4,096."""
    weights = []
    for ratio in (0, 32, 64, 96):  # a mean of that many 1/64 of the spread, narrow or with wide tails
        for parts in ([(1, ratio, 64)], [(3, ratio, 56), (1, ratio, 120)]):
            weights += [_levels(parts, eighth) for eighth in (0, 2, 4, 6)]
    for ratio in (144, 224, 384, 768):
        weights += [_levels([(1, ratio, 64)], eighth) for eighth in range(8)]
    for ratio in (160, 320, 640):  # a mean that turns with the position, as keys' do after RoPE
        turning = [(1, sign * ratio * cosine // 64, 64) for cosine in (63, 53, 36, 12) for sign in (1, -1)]
        weights += [_levels(turning, eighth) for eighth in (0, 2, 4, 6)]
    weights.append([1] * SYMBOLS)
    weights.append([int(level == ESCAPE) for _ in range(2) for level in range(LEVELS)])
    return rans.frequencies(np.array(weights, np.int64))


def _levels(parts: list[tuple[int, int, int]], eighth: int) -> list[int]:
    """Weights of the symbols of a mixture of normal variables: (weight, mean, spread).

    `eighth`: where the binary orders lie, in eighths of an octave.
    """
    reach = max(abs(mean) + 5 * spread for _, mean, spread in parts)
    edge = isqrt(isqrt(isqrt(1 << eighth + 8 * _FINE)))
    while edge * _STEPS >> _FINE < reach:
        edge *= 2
    total = sum(weight for weight, _, _ in parts)
    positive: list[int] = []
    negative: list[int] = []
    for level in range(LEVELS):
        low = edge >> 1 if level < ESCAPE else 0  # all that is smaller
        for found, sign in ((positive, 1), (negative, -1)):
            mass = sum(
                weight * abs(_below(sign * edge, mean, spread) - _below(sign * low, mean, spread))
                for weight, mean, spread in parts
            )
            found.append((mass // total) >> 16)
        edge = low
    return positive + negative


def _below(edge: int, mean: int, spread: int) -> int:
    """Probability, in 2**-60, that a normal variable lies below `edge`."""
    place = (edge * _STEPS - (mean << _FINE)) * _STEPS // spread
    index, rest = place >> _FINE, place & ((1 << _FINE) - 1)
    grid = _normal()
    at = index + _REACH * _STEPS
    if at < 0:
        return 0
    if at >= len(grid) - 1:
        return _ONE
    return grid[at] + ((grid[at + 1] - grid[at]) * rest >> _FINE)


@cache
def _normal() -> list[int]:
    """The standard normal distribution at -10, -10 + 1/64, ... 10, in 2**-60; by the trapezoid rule."""
    one = 1 << 128
    scale = 2 * _STEPS * _STEPS
    root = sum((-1) ** n * one // (scale**n * factorial(n)) for n in range(12))  # exp(-1 / scale)
    density, factor, square = [one], root, root * root >> 128
    for _ in range(_REACH * _STEPS):
        density.append(density[-1] * factor >> 128)
        factor = factor * square >> 128
    both = density[:0:-1] + density
    sums = [0]
    for one_side, other_side in pairwise(both):
        sums.append(sums[-1] + one_side + other_side)
    return [value * _ONE // sums[-1] for value in sums]


def _cost(frequency: int) -> int:
    """Bits that a symbol of this frequency costs, in 1/256: 256 * (12 - log2(frequency)), rounded up."""
    power: int = frequency**COST_UNIT
    return COST_UNIT * rans.BITS - power.bit_length() + 1

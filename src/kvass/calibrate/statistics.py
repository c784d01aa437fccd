"""Bounds and intervals: of a share by Clopper and Pearson, of shares and means by the bootstrap."""

import math
from collections.abc import Sequence

import numpy as np

_DRAWS = 4000
_HALVINGS = 60


def clopper_pearson_upper(lost: int, tried: int, level: float = 0.95) -> float:
    """The one-sided upper bound of a share of which `lost` of `tried` were seen; 1.0 where none was tried.

    Exact: the share at which so few or fewer are seen with probability `1 - level`.
    """
    if lost >= tried:
        return 1.0
    low, high = lost / tried, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _at_most(lost, tried, middle) > 1 - level:
            low = middle
        else:
            high = middle
    return high


def _at_most(lost: int, tried: int, share: float) -> float:
    """The probability of `lost` or fewer of `tried`, each with probability `share`."""
    if share >= 1.0:
        return 0.0
    if share <= 0.0:
        return 1.0
    one, other = math.log(share), math.log1p(-share)
    whole = math.lgamma(tried + 1)
    return math.fsum(
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(tried - k + 1) + k * one + (tried - k) * other)
        for k in range(lost + 1)
    )


def cluster_upper(lost: Sequence[int], tried: Sequence[int], level: float = 0.95) -> float:
    """The one-sided upper bound of the share lost, clusters (contexts) being drawn with replacement.

    1.0 where none was tried. The same for the same counts.
    """
    tried_by, lost_by = np.asarray(tried, np.int64), np.asarray(lost, np.int64)
    if not tried_by.sum():
        return 1.0
    drawn = np.random.default_rng(0).integers(0, len(tried_by), (_DRAWS, len(tried_by)))
    counts = tried_by[drawn].sum(1)
    shares = np.where(counts > 0, lost_by[drawn].sum(1) / np.maximum(counts, 1), 1.0)
    return float(np.quantile(shares, level, method="higher"))


def share_upper(lost: Sequence[int], tried: Sequence[int], level: float = 0.95) -> float:
    """The larger of both bounds of the share lost; `lost` and `tried` by context."""
    exact = clopper_pearson_upper(sum(lost), sum(tried), level)
    return max(exact, cluster_upper(lost, tried, level))


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean of a value per text, and its two-sided bootstrap interval over texts: mean, low, high."""
    array = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).integers(0, len(array), (_DRAWS, len(array)))
    low, high = np.quantile(array[drawn].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(array.mean()), float(low), float(high)

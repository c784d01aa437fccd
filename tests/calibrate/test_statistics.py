"""Bounds of shares and intervals of means."""

import math

import numpy as np
import pytest

from kvass.calibrate.statistics import clopper_pearson_upper, cluster_upper, mean_interval, share_upper


@pytest.mark.parametrize(("lost", "tried"), [(1, 20), (4, 400), (30, 512), (0, 3)])
def test_clopper_pearson_is_where_so_few_are_seen_with_five_percent(lost: int, tried: int) -> None:
    bound = clopper_pearson_upper(lost, tried)
    seen = sum(math.comb(tried, k) * bound**k * (1 - bound) ** (tried - k) for k in range(lost + 1))
    assert seen == pytest.approx(0.05, rel=1e-6)


def test_none_lost_is_the_rule_of_three() -> None:
    assert clopper_pearson_upper(0, 400) == pytest.approx(1 - 0.05 ** (1 / 400))
    assert share_upper([0] * 40, [10] * 40) == clopper_pearson_upper(0, 400)


def test_nothing_tried_bounds_nothing() -> None:
    assert clopper_pearson_upper(0, 0) == cluster_upper([], []) == share_upper([0, 0], [0, 0]) == 1.0
    assert clopper_pearson_upper(5, 5) == 1.0


def test_losses_that_stand_together_weigh_more() -> None:
    """Four lost in one context are one accident: as contexts are drawn anew, it comes twice or thrice."""
    spread, together = [1] * 4 + [0] * 36, [4] + [0] * 39
    assert share_upper(spread, [10] * 40) == pytest.approx(clopper_pearson_upper(4, 400), abs=2e-3)
    assert share_upper(together, [10] * 40) > 1.2 * clopper_pearson_upper(4, 400)
    assert share_upper(together, [10] * 40) == share_upper(together, [10] * 40)


def test_the_interval_of_a_mean_holds_it_and_narrows() -> None:
    values = np.random.default_rng(1).exponential(1, 64)
    mean, low, high = mean_interval(values.tolist())
    assert low < mean < high
    assert mean == pytest.approx(values.mean())
    few = mean_interval(values[:8].tolist())
    assert high - low < few[2] - few[1]
    assert mean_interval([0.5]) == (0.5, 0.5, 0.5)

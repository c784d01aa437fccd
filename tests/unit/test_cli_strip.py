"""The strip that `kvass explain --anywhere` draws: what each token is, in so many columns."""

import numpy as np
import pytest

from kvass.cli.strip import EXACT, NEW, RECOMPUTED, REUSED, kinds, strip


def test_each_token_is_one_thing() -> None:
    found = kinds(10, 3, [(4, 6), (6, 9)], np.array([4, 8]))
    assert found.tolist() == [EXACT] * 3 + [NEW, RECOMPUTED, REUSED, REUSED, REUSED, RECOMPUTED, NEW]


def test_a_segment_that_begins_in_the_exact_beginning_is_a_segment() -> None:
    """The last tokens that are stored may be found in a longer passage of another text."""
    assert kinds(6, 4, [(2, 5)], np.array([], np.int64)).tolist() == [EXACT] * 2 + [REUSED] * 3 + [NEW]


def test_a_column_for_each_token_where_there_is_room() -> None:
    upper, lower, legend = strip(kinds(10, 3, [(4, 9)], np.array([4, 8])), 80)
    assert upper.plain == "===.-----."
    assert lower.plain == "    #   # "
    assert legend.plain.split("   ")[:4] == ["= exact prefix 3", "- reused 3", "# recomputed 2", ". new 2"]


@pytest.mark.parametrize("width", [1, 7, 40, 200])
def test_it_fits_and_ends_with_the_prompt(width: int) -> None:
    found = kinds(1000, 100, [(200, 700)], np.arange(200, 250))
    upper, lower, _ = strip(found, width)
    assert len(upper.plain) == len(lower.plain) == min(width, 1000)
    if width > 1:
        assert (upper.plain[0], upper.plain[-1]) == ("=", ".")


def test_the_lower_row_says_how_much_of_a_column_is_computed_anew() -> None:
    one_in_ten = np.concatenate([np.arange(0, 500, 10), np.arange(500, 1000)])
    _, lower, legend = strip(kinds(1000, 0, [(0, 1000)], one_in_ten), 10)
    assert lower.plain == ".....#####"
    assert "# recomputed 550" in legend.plain

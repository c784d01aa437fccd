"""The fraction that hides behind loading."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.errors import InputError
from kvass.reuse.fraction import hidden_fraction

SECONDS = st.floats(0, 1e6)
SHARE = st.floats(0, 1)


def test_repair_takes_as_long_as_loading() -> None:
    assert hidden_fraction(3.0, 1e-3, 1000, 30, floor=0.05, ceiling=0.5) == pytest.approx(0.1)


def test_it_keeps_within_floor_and_ceiling() -> None:
    assert hidden_fraction(0.0, 1e-3, 1000, 30, floor=0.05, ceiling=0.5) == 0.05
    assert hidden_fraction(math.inf, 1e-3, 1000, 30, floor=0.05, ceiling=0.5) == 0.5


def test_what_is_not_known_is_no_reason_to_compute_less() -> None:
    assert hidden_fraction(1.0, 0.0, 1000, 30, floor=0.05, ceiling=0.5) == 0.5


def test_nothing_reused() -> None:
    assert hidden_fraction(0.0, 1e-3, 0, 30, floor=0.05, ceiling=0.5) == 0.5


@given(
    load=SECONDS, each=st.floats(1e-12, 1e3), reused=st.integers(1, 1 << 20), bounds=st.tuples(SHARE, SHARE)
)
def test_more_loading_never_hides_less(load, each, reused, bounds) -> None:
    floor, ceiling = sorted(bounds)
    found = hidden_fraction(load, each, reused, 30, floor=floor, ceiling=ceiling)
    assert floor <= found <= ceiling
    assert found <= hidden_fraction(2 * load, each, reused, 30, floor=floor, ceiling=ceiling)
    assert found >= hidden_fraction(load, 2 * each, reused, 30, floor=floor, ceiling=ceiling)
    if floor < found < ceiling:
        assert found * each * reused * 30 == pytest.approx(load)


@pytest.mark.parametrize(
    "bad",
    [
        {"load_seconds": -1}, {"load_seconds": math.nan}, {"token_layer_seconds": -1},
        {"token_layer_seconds": math.inf}, {"token_layer_seconds": math.nan}, {"reused": -1}, {"layers": 0},
        {"floor": -0.1}, {"floor": 0.6}, {"ceiling": 1.5}, {"ceiling": math.nan},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(bad) -> None:
    given = {
        "load_seconds": 1,
        "token_layer_seconds": 1,
        "reused": 9,
        "layers": 3,
        "floor": 0.1,
        "ceiling": 0.5,
    }
    with pytest.raises(InputError):
        hidden_fraction(**(given | bad))

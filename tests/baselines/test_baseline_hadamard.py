"""The Hadamard rotation and the Lloyd-Max codebook of the rotated coordinates."""

import numpy as np
import pytest

from kvass.bench.baselines.hadamard import Hadamard, hadamard, lloyd_max
from kvass.errors import InputError
from kvass.spec import LayerGroup

GROUP = LayerGroup(kind="attention", layers=(0,), kv_heads=2, head_dim=64, v_head_dim=64, dtype="float32")


@pytest.mark.parametrize("dim", [1, 2, 64, 256])
def test_hadamard_is_orthonormal_with_entries_of_one_size(dim: int) -> None:
    matrix = hadamard(dim)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-12)
    np.testing.assert_allclose(np.abs(matrix), dim**-0.5, rtol=1e-12)


@pytest.mark.parametrize("dim", [0, 3, 96])
def test_other_dimensions_are_refused_by_number(dim: int) -> None:
    with pytest.raises(InputError, match=str(dim)):
        hadamard(dim)


@pytest.mark.parametrize(
    ("levels", "positive"),
    [  # Max, "Quantizing for minimum distortion", 1960, table I
        (2, [0.7980]),
        (4, [0.4528, 1.510]),
        (8, [0.2451, 0.7560, 1.344, 2.152]),
        (16, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
    ],
)
def test_lloyd_max_gives_the_published_levels(levels: int, positive: list[float]) -> None:
    found = lloyd_max(levels)
    np.testing.assert_allclose(found[levels // 2 :], positive, atol=6e-4)
    np.testing.assert_allclose(found, -found[::-1])


def test_error_on_normal_vectors_is_that_of_the_codebook() -> None:
    state = np.random.default_rng(1).standard_normal((1, 2000, 2, 64), np.float32)
    for bits, distortion in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        error = Hadamard(bits)(state, state, GROUP).keys - state
        assert np.square(error).mean() == pytest.approx(distortion, rel=0.04)


def test_one_large_coordinate_is_spread_over_all() -> None:
    state = np.zeros((1, 1, 2, 64), np.float32)
    state[..., 5] = 80.0
    kept = Hadamard(4)(state, state, GROUP).keys
    # every rotated coordinate is +-1, so each is read back as the same level times its sign
    level = min(lloyd_max(16), key=lambda number: abs(number - 1))
    np.testing.assert_allclose(kept, state * level, atol=1e-3)


def test_a_token_of_zeros_stays_zero() -> None:
    state = np.zeros((1, 3, 2, 64), np.float32)
    assert (Hadamard(2)(state, state, GROUP).keys == 0).all()


def test_bits_are_the_codes_and_one_norm_a_token_and_head() -> None:
    state = np.ones((1, 3, 2, 64), np.float32)
    assert Hadamard(4)(state, state, GROUP).bits == 4.25 * 2 * state.size

"""KIVI and fp8: levels, scales, zeros and their bits, worked out by hand."""

import ml_dtypes
import numpy as np
import pytest

from kvass.bench.baselines.fp8 import Fp8
from kvass.bench.baselines.kivi import Kivi, quantised
from kvass.spec import LayerGroup

GROUP = LayerGroup(kind="attention", layers=(0, 1), kv_heads=1, head_dim=64, v_head_dim=64, dtype="float32")


def test_two_bits_are_four_even_levels_between_least_and_greatest() -> None:
    numbers = np.array([[-1.0, 0.4, 0.6, 1.6, 2.4, 5.0]], np.float32)  # zero -1, scale 2: levels -1 1 3 5
    kept, pairs = quantised(numbers, axis=1, bits=2)
    assert kept.tolist() == [[-1.0, 1.0, 1.0, 1.0, 3.0, 5.0]]
    assert pairs == 1


def test_a_constant_group_stays_what_it_is() -> None:
    kept, _ = quantised(np.full((1, 32), 0.75, np.float32), axis=1, bits=4)
    assert (kept == 0.75).all()


def test_scale_and_zero_are_rounded_as_they_are_stored() -> None:
    low, high = np.float32(0.1), np.float32(0.9)
    kept, _ = quantised(np.array([[low, high]]), axis=1, bits=1)
    zero, scale = np.float32(np.float16(low)), np.float32(np.float16(high - low))
    assert kept.tolist() == [[zero, zero + scale]]


def test_keys_share_a_scale_over_32_tokens_and_values_over_32_channels() -> None:
    alike = np.zeros((2, 64, 1, 64), np.float32)
    alike[:, :32] = np.arange(64, dtype=np.float32)  # channels differ, in the first group of tokens
    coded = Kivi(2, rotated=True)(alike, alike, GROUP)
    assert (coded.keys == alike).all()
    assert not (coded.values == alike).all()
    turned = np.zeros((2, 64, 1, 64), np.float32)
    turned[..., :32] = np.arange(64, dtype=np.float32)[None, :, None, None]
    coded = Kivi(2, rotated=True)(turned, turned, GROUP)
    assert (coded.values == turned).all()
    assert not (coded.keys == turned).all()


def test_a_number_takes_its_bits_and_one_more_for_scale_and_zero() -> None:
    state = np.random.default_rng(0).standard_normal((2, 64, 1, 64), np.float32)
    assert Kivi(4, rotated=False)(state, state, GROUP).bits == 2 * state.size * 5


def test_what_is_left_of_tokens_has_a_scale_of_its_own() -> None:
    state = np.random.default_rng(0).standard_normal((2, 33, 1, 64), np.float32)
    coded = Kivi(4, rotated=True)(state, np.zeros((2, 33, 1, 64), np.float32), GROUP)
    keys, values = 4 * state.size + 2 * 64 * 2 * 32, 5 * state.size
    assert coded.bits == keys + values
    assert (coded.keys[:, 32] == state[:, 32].astype(np.float16)).all()


@pytest.mark.parametrize(("bits", "rotated"), [(8, True), (3, False)])
def test_no_number_moves_by_more_than_half_a_step(bits: int, rotated: bool) -> None:
    state = np.random.default_rng(bits).standard_normal((2, 70, 1, 64), np.float32)
    coded = Kivi(bits, rotated)(state, state, GROUP)
    step = (state.max() - state.min()) / (2**bits - 1)
    assert np.abs(coded.keys - state).max() <= step * 0.51
    assert np.abs(coded.values - state).max() <= step * 0.51


def test_fp8_rounds_to_three_mantissa_bits_and_stays_in_its_range() -> None:
    state = np.zeros((2, 1, 1, 64), np.float32)
    state[0, 0, 0, :5] = [1.0, 1.07, -1.2, 1000.0, -1e-9]
    coded = Fp8()(state, state, GROUP)
    assert coded.keys[0, 0, 0, :5].tolist() == [1.0, 1.125, -1.25, 448.0, 0.0]
    assert coded.bits == 8 * 2 * state.size


def test_a_scale_brings_the_greatest_to_the_end_of_the_range() -> None:
    state = np.full((2, 3, 1, 64), 1e-4, np.float32)
    state[:, 1] *= 1024  # a token of another size
    for scale, pairs in (("token", 2 * 3), ("channel", 2 * 64)):
        coded = Fp8(scale)(state, state, GROUP)
        assert coded.bits == 2 * (8 * state.size + 16 * pairs)
        # 448 is kept as it is: what moves is the scale, by its own rounding
        moved = np.abs(coded.keys - state) / state
        assert moved[:, 1].max() < 2**-10, scale
        assert moved.max() < (2**-3 if scale == "token" else 2), scale
    plain = Fp8()(state, state, GROUP).keys
    assert (plain[:, 0] == 0).all(), "below the least e4m3 number, without a scale"
    assert ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).smallest_subnormal > 2e-4

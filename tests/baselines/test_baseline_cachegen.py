"""CacheGen, as published and as LMCache ships it: anchors, deltas, bins, and what their symbols cost."""

import math

import numpy as np
import pytest

from kvass.bench.baselines.base import KV, Setting
from kvass.bench.baselines.cachegen import CacheGen, anchors, bin_width, eight_bits, split
from kvass.bench.baselines.entropy import ALPHABET, ESCAPE_BITS, LIMIT, costs, counts, cross_entropy
from kvass.bench.baselines.lmcache import CDF_BITS, LMCache, binned, cdf_costs, chunk_counts
from kvass.errors import InputError
from kvass.spec import LayerGroup

GROUP = LayerGroup(kind="attention", layers=(0, 1, 2), kv_heads=1, head_dim=4, v_head_dim=4, dtype="float32")


def _state(seed: int, tokens: int, layers: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((layers, tokens, 1, 4), np.float32)


def _setting(*calibration: np.ndarray) -> Setting:
    return Setting(GROUP, 3, [KV(array, array) for array in calibration])


def test_every_tenth_token_is_an_anchor_and_chunks_begin_with_one() -> None:
    assert anchors(25, None).places.tolist() == [0, 10, 20]
    assert anchors(25, 16).places.tolist() == [0, 10, 16]
    found = anchors(14, 12)
    assert found.places.tolist() == [0, 10, 12]
    assert found.others.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13]
    assert found.anchor_of.tolist() == [0] * 9 + [1, 2]


def test_an_anchor_is_whole_numbers_of_a_127th_of_its_greatest() -> None:
    symbols, read = eight_bits(np.array([[127.0, -63.4, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32))
    assert symbols.tolist() == [[127, -63, 1, 0], [0, 0, 0, 0]]
    assert read.tolist() == [[127, -63, 1, 0], [0, 0, 0, 0]]


def test_deltas_count_from_the_anchor_as_it_is_read_back() -> None:
    layer = np.array([[127.0, 0.4], [127.6, 0.7], [125.0, -2.2]], np.float32)  # read back as 127, 0
    part = split(layer, step=np.array([0.5, 1.0], np.float32), chunk=None)
    assert part.anchors.tolist() == [[127, 0]]
    assert part.deltas.tolist() == [[1, 1], [-4, -2]]
    assert part.kept.tolist() == [[127.0, 0.0], [127.5, 1.0], [125.0, -2.0]]


def test_bins_widen_by_thirds_of_the_whole_models_layers() -> None:
    assert [bin_width(layer, 30) for layer in (0, 9, 10, 19, 20, 29)] == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]


def test_error_of_a_delta_is_half_a_bin_of_its_layer() -> None:
    scheme = CacheGen(_setting(_state(0, 2000)), multiplier=0.4)
    state = _state(1, 300)
    error = np.abs(scheme(state, state, GROUP).keys - state)[:, anchors(300, None).others]
    for layer, width in enumerate((0.5, 1.0, 1.5)):
        # the difference of two normal variables has deviation 1.41
        assert error[layer].max() == pytest.approx(0.4 * width * math.sqrt(2) / 2, rel=0.05)


def test_cost_is_near_the_entropy_of_the_rounded_deltas() -> None:
    scheme = CacheGen(_setting(_state(0, 20_000)))
    state = _state(1, 5000)
    anchor_symbols = sum(
        cross_entropy(counts(part.anchors), costs(counts(part.anchors)))
        for part in (split(layer[:, 0], np.ones(4, np.float32), None) for layer in state)
    )
    # the entropy of a normal variable in bins of 0.5, 1 and 1.5 deviations
    deltas = sum((3.062, 2.104, 1.564)) * 4 * 4500
    expected = 2 * (deltas + anchor_symbols + 16 * 3 * 500)
    assert scheme(state, state, GROUP).bits == pytest.approx(expected, rel=0.03)


def test_chunks_decode_alone() -> None:
    calibration = _setting(_state(0, 500))
    whole, first = _state(1, 300), _state(1, 300)[:, :256]
    scheme = CacheGen(calibration, chunk=256)
    assert (scheme(whole, whole, GROUP).keys[:, :256] == scheme(first, first, GROUP).keys).all()
    alone = scheme(np.ascontiguousarray(whole[:, 256:]), np.ascontiguousarray(whole[:, 256:]), GROUP)
    assert (scheme(whole, whole, GROUP).keys[:, 256:] == alone.keys).all()


def test_tables_of_other_shapes_and_no_calibration_are_refused() -> None:
    with pytest.raises(InputError, match="calibration"):
        CacheGen(_setting())
    with pytest.raises(InputError, match="2 layers"):
        CacheGen(_setting(_state(0, 50)))(_state(1, 50, layers=2), _state(1, 50, layers=2), GROUP)


def test_symbols_are_counted_by_channel_and_far_ones_escape() -> None:
    found = counts(np.array([[0, LIMIT], [0, -LIMIT], [1, LIMIT + 1]], np.float32))
    assert found.sum(1).tolist() == [3, 3]
    assert found[0, LIMIT] == 2
    assert found[0, LIMIT + 1] == 1
    assert found[1, [0, 2 * LIMIT, ALPHABET - 1]].tolist() == [1, 1, 1]


def test_a_table_costs_what_shannon_says_and_escapes_their_bits_more() -> None:
    profiled = np.zeros((1, ALPHABET), np.int64)
    profiled[0, :4] = 2_000_000, 1_000_000, 500_000, 500_000
    table = costs(profiled)
    np.testing.assert_allclose(table[0, :4], [1, 2, 3, 3], atol=1e-3)
    assert cross_entropy(profiled, table) == pytest.approx(1.75 * 4_000_000, rel=1e-4)
    assert np.isfinite(table).all(), "a symbol that calibration did not show can still be coded"
    assert table[0, -1] == pytest.approx(table[0, -2] + ESCAPE_BITS)


def test_lmcache_rounds_to_fifteenths_or_sevenths_of_a_tokens_greatest() -> None:
    row = np.array([[15.0, -15.0, 7.4, -0.6]], np.float32)
    symbols, read = binned(row, 32)
    assert symbols.tolist() == [[30, 0, 22, 14]]
    assert read.tolist() == [[15, -15, 7, -1]]
    symbols, read = binned(row, 16)
    assert symbols.tolist() == [[14, 0, 10, 7]]
    np.testing.assert_allclose(read, [[15, -15, 15 * 3 / 7, 0]], rtol=1e-6)
    assert binned(np.zeros((1, 2), np.float32), 32)[1].tolist() == [[0, 0]]


def test_lmcache_counts_per_chunk_and_its_tables_leave_every_symbol_room() -> None:
    symbols = np.full((300, 2), 3)
    symbols[:, 1] = np.arange(300) % 2
    found = chunk_counts(symbols)
    assert found.shape == (2, 2, 32)
    assert found[:, 0, 3].tolist() == [256, 44]
    cost = cdf_costs(found)
    assert cost[0, 0, 3] == pytest.approx(-math.log2((65536 - 31) / 65536))
    assert cost[0, 1, :2] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert cost[0, 0, 0] == 16.0
    assert np.exp2(-cost).sum(-1) == pytest.approx(1.0)


def test_lmcache_charges_a_scale_a_token_and_a_table_a_channel_and_chunk() -> None:
    state = np.ones((3, 300, 1, 4), np.float32)
    without = LMCache(3, tables=False)(state, state, GROUP).bits
    scales = 2 * 3 * 300 * 16
    assert without == pytest.approx(scales, rel=0.001), "a constant costs next to nothing"
    with_tables = LMCache(3, tables=True)(state, state, GROUP).bits
    assert with_tables == pytest.approx(without + 2 * 3 * 2 * 4 * CDF_BITS)


def test_lmcache_has_fine_bins_in_a_share_of_the_layers() -> None:
    group = LayerGroup(
        kind="attention", layers=tuple(range(30)), kv_heads=1, head_dim=4, v_head_dim=4, dtype="float32"
    )
    state = np.zeros((30, 1, 1, 4), np.float32)
    state[...] = [15.0, 1.0, 0.0, 0.0]  # 1 is a bin of 32 bins and rounds to nothing with 16
    coded = LMCache(30, tables=False)(state, state, group)
    assert np.count_nonzero(coded.keys[:, 0, 0, 1]) == 9
    assert np.count_nonzero(coded.values[:, 0, 0, 1]) == 2

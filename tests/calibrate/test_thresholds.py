"""How much smaller a token's step becomes with its weight: as much as calibration texts bear out."""

import numpy as np

from kvass.calibrate.fit import CLASSES, PROBES, Reading, _rising, _thresholds, fit, importance, weigh
from kvass.codecs.tables import Tables, rope_arrays, write_tables
from kvass.codecs.transform import ORIGIN
from kvass.spec import LayerGroup

COUNT = 20_000


def classes(weights: np.ndarray, information: np.ndarray) -> np.ndarray:
    found = _thresholds(weights[None, :, None], information[None, :, None])[0, 0]
    assert (np.diff(found) <= 0).all()
    return (weights[:, None] < found).sum(axis=1)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    weights = np.exp2(random.uniform(-8, 0, COUNT)).astype(np.float32)
    return weights, random.gamma(0.5, 2.0, COUNT).astype(np.float32)


def test_a_weight_that_tells_all_gives_a_class_for_each_half_octave_of_steps() -> None:
    weights, noise = drawn(1)
    found = classes(weights, weights * noise)
    # information four times as large asks for half the step: two classes
    for octaves in (2, 4, 6):
        near = (weights > 2.0**-7.5) & (weights < 2.0 ** (-0.5 - octaves))
        heavier = classes_of(weights, found, np.log2(weights[near]) + octaves)
        apart = found[near] - heavier
        assert abs(float(apart.mean()) - octaves) < 0.35


def classes_of(weights: np.ndarray, found: np.ndarray, logs: np.ndarray) -> np.ndarray:
    order = np.argsort(weights)
    return found[order][np.searchsorted(np.log2(weights[order]), logs).clip(0, COUNT - 1)]


def test_a_weight_that_tells_nothing_gives_all_one_class() -> None:
    weights, noise = drawn(2)
    found = classes(weights, noise)
    share = np.bincount(found, minlength=CLASSES) / COUNT
    assert share.max() > 0.95
    assert abs(int(share.argmax()) - CLASSES // 2) <= 1


def test_where_little_weight_tells_no_more_steps_grow_no_more() -> None:
    weights, noise = drawn(3)
    floor = 2.0**-4
    found = classes(weights, np.maximum(weights, floor) * noise)
    light, at_floor = weights < 2.0**-6, (weights > 2.0**-4.3) & (weights < 2.0**-3.7)
    assert abs(float(found[light].mean()) - float(found[at_floor].mean())) < 0.6
    assert float(found[weights > 0.5].mean()) < float(found[light].mean()) - 2


def test_means_are_made_to_rise() -> None:
    edges = np.array([0, 2, 4, 5, 9])
    means, starts = _rising(np.array([1.0, 5.0, 2.0, 6.0]), edges)
    np.testing.assert_allclose(means, [1, 4, 6])
    assert starts.tolist() == [0, 2, 5]
    means, starts = _rising(np.array([4.0, 3.0, 2.0, 1.0]), edges)
    np.testing.assert_allclose(means, [(8 + 6 + 2 + 4) / 9])
    assert starts.tolist() == [0]


def test_behind_a_window_each_part_is_an_end_of_its_own() -> None:
    random = np.random.default_rng(4)
    full = LayerGroup(kind="attention", layers=(0,), kv_heads=1, head_dim=8, v_head_dim=8, dtype="float32")
    keys = np.tile(random.normal(size=(1, 256, 1, 8)).astype(np.float32), (1, 3, 1, 1))
    probes = random.normal(size=(1, 1, 8, 4)).astype(np.float32)
    rope = Tables.parse(write_tables(rope_arrays(0, [1.0, 0.1, 0.01, 0.001], 2 * ORIGIN))).rope(0)
    sliding = LayerGroup(
        kind="sliding", layers=(0,), kv_heads=1, head_dim=8, v_head_dim=8, dtype="float32", window=64
    )
    found, seen = (weigh(one, keys, rope, probes, np.zeros((1, 1, 4), np.float32)) for one in (sliding, full))
    np.testing.assert_array_equal(found[:, :256], found[:, 512:])
    np.testing.assert_array_equal(found[:, 512:], seen[:, 512:])
    assert np.abs(np.log(seen[:, :256] / seen[:, 512:])).max() > 0.1


def test_one_measure_of_importance_for_all_groups() -> None:
    """A group whose gradients are ten times as large gets directions that are ten times as fine."""
    random = np.random.default_rng(5)
    group = LayerGroup(kind="attention", layers=(0,), kv_heads=1, head_dim=4, v_head_dim=4, dtype="float32")

    def reading(scale: float) -> Reading:
        k, v, gk, gv = (random.normal(size=(1, 400, 1, 4)).astype(np.float32) for _ in range(4))
        queries = random.normal(size=(1, PROBES, 1, 1, 4)).astype(np.float32)
        return Reading(k, v, [gk * np.float32(scale)], [gv * np.float32(scale)], queries)

    low, high = reading(1), reading(10)
    both = importance([low, high])
    deviations = [fit(group, None, [one], [both]).k.deviations.mean() for one in (low, high)]
    assert 8 < deviations[1] / deviations[0] < 12

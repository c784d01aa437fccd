"""All baselines by name: each gives back what it was given, roughly, and tells its bits."""

import numpy as np
import pytest

from kvass.bench.baselines.base import KV, Setting
from kvass.bench.baselines.registry import BASELINES
from kvass.spec import LayerGroup

LAYERS = (0, 2)
GROUP = LayerGroup(
    kind="sliding", layers=LAYERS, kv_heads=2, head_dim=32, v_head_dim=64, dtype="float32", window=512
)


def _kv(seed: int) -> KV:
    numbers = np.random.default_rng(seed)
    return KV(
        numbers.standard_normal((2, 300, 2, 32), np.float32),
        numbers.standard_normal((2, 300, 2, 64), np.float32),
    )


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_keeps_shapes_changes_no_input_and_is_of_its_size(name: str) -> None:
    baseline = BASELINES[name](Setting(GROUP, 3, [_kv(0), _kv(1)]))
    given, before = _kv(2), _kv(2)
    coded = baseline(given.keys, given.values, GROUP)
    assert (given.keys == before.keys).all()
    assert (given.values == before.values).all()
    for kept, array in zip(coded[:2], given, strict=True):
        assert kept.shape == array.shape
        assert kept.dtype == np.float32
        assert np.square(kept - array).mean() < 0.25 * np.square(array).mean()
    per_number = coded.bits / (given.keys.size + given.values.size)
    assert 1.5 < per_number < 9.5
    assert baseline.rotated == (not name.endswith("-pre"))

"""Tables of the transform codec as a calibration might make them, of models of several shapes."""

from typing import NamedTuple

import numpy as np
from kv_like import POSITIONS

from kvass.codecs import rans
from kvass.codecs.tables import Tables, rope_arrays, write_tables
from kvass.codecs.transform import ORIGIN
from kvass.codecs.transform_kernels import ESCAPE
from kvass.spec import LayerGroup

CLASSES = 5
CONTEXTS = 12
PER_OCTAVE = 2
STEPS = {"q1": 0.25, "q4": 4.0}


class Shape(NamedTuple):
    """Of one group: heads, channels of keys and of values, how many channels are rotated (0: none), how many
    blocks keys and values are transformed in."""

    heads: int
    dim: int
    v_dim: int
    rotary_dim: int
    k_blocks: int
    v_blocks: int
    layers: int = 2


SHAPES = {
    "small": Shape(2, 8, 6, 8, 2, 2),  # no whole lanes
    "partial": Shape(3, 10, 7, 4, 3, 1),  # a part of each key is rotated; values are transformed together
    "bare": Shape(1, 5, 9, 0, 1, 3),  # no rotation
    "lanes": Shape(3, 64, 64, 64, 3, 3),  # as in SmolLM2
    "wide": Shape(1, 256, 256, 256, 1, 1, layers=1),  # as in Gemma 3
}


def group_of(shape: Shape, dtype: str = "bfloat16") -> LayerGroup:
    return LayerGroup(
        kind="attention",
        layers=tuple(range(shape.layers)),
        kv_heads=shape.heads,
        head_dim=shape.dim,
        v_head_dim=shape.v_dim,
        dtype=dtype,
    )


def arrays_of(shape: Shape, seed: int = 0, probes: int = 21) -> dict[str, np.ndarray]:
    """All arrays of group 0 and the levels of `STEPS`, by name."""
    random = np.random.default_rng(seed)
    layers, heads = shape.layers, shape.heads
    found = _shared()
    for name, dim, blocks in (("k", shape.dim, shape.k_blocks), ("v", shape.v_dim, shape.v_blocks)):
        n = heads * dim
        turn, _ = np.linalg.qr(random.normal(size=(layers, blocks, n // blocks, n // blocks)))
        spread = 2.0 ** random.uniform(-2, 2, (layers, blocks, n // blocks))
        side = f"transform.0.{name}"
        found[f"{side}.mean"] = random.normal(size=(layers, n)).astype(np.float32)
        found[f"{side}.forward"] = (turn * spread[..., None, :]).astype(np.float32)
        found[f"{side}.inverse"] = (turn.swapaxes(-1, -2) / spread[..., None]).astype(np.float32)
        found[f"{side}.scale"] = np.round(PER_OCTAVE * np.log2(spread)).reshape(layers, n).astype(np.int16)
    pick = random.normal(size=(layers, heads, shape.dim, probes)) / np.sqrt(shape.dim)
    found["transform.0.probes"] = pick.astype(np.float32)
    found["transform.0.offsets"] = random.uniform(-1, 5, (layers, heads, probes)).astype(np.float32)
    limits = 2.0 ** -np.arange(CLASSES - 1) * np.ones((layers, heads, 1))
    found["transform.0.thresholds"] = limits.astype(np.float32)
    if shape.rotary_dim:
        half = shape.rotary_dim // 2
        found |= rope_arrays(0, 100.0 ** (-np.arange(half) / half), max(POSITIONS, ORIGIN))
    return found


def _shared() -> dict[str, np.ndarray]:
    """What does not depend on the shape: symbols, what they stand for, classes, steps."""
    half = np.arange(CLASSES) - CLASSES // 2
    codes = np.arange(256)
    levels = np.where(codes % 2, (codes + 1) // 2, -(codes // 2)).astype(np.float64)
    levels[ESCAPE] = 0
    scale = 2.0 ** ((np.arange(CONTEXTS) - 4) / PER_OCTAVE)
    weights = np.exp(-np.abs(levels) / scale[:, None])
    weights[:, ESCAPE] = 1e-4
    classes, idle = (codes < CLASSES).astype(float), (codes == 0).astype(float)
    weights = np.concatenate([weights, classes[None], idle[None]])
    counts = np.round(weights / weights.sum(axis=1, keepdims=True) * (1 << 32)).astype(np.int64)
    found = {
        "transform.symbols": rans.frequencies(counts),
        "transform.centres": (levels - 0.1 * np.sign(levels) / scale[:, None].clip(1)).astype(np.float32),
        "transform.rounding": np.linspace(0.35, 0.5, CONTEXTS).astype(np.float32),
        "transform.powers": np.exp2(np.arange(-64, 64)).astype(np.float32),
        "transform.shifts": half.astype(np.int16),
    }
    for level, step in STEPS.items():
        steps = (step * np.exp2(half / PER_OCTAVE)).astype(np.float32)
        found[f"transform.{level}.offset"] = np.array([round(PER_OCTAVE * np.log2(step)) - 4], np.int16)
        found[f"transform.{level}.steps"] = steps
        found[f"transform.{level}.inverse_steps"] = (1 / steps.astype(np.float64)).astype(np.float32)
    return found


def tables_of(shape: Shape, seed: int = 0, **changed: np.ndarray) -> Tables:
    """Through a file's bytes, so read-only, as they are loaded."""
    return Tables.parse(write_tables(arrays_of(shape, seed) | changed))

"""Keys and values as models have them, and the tables that un-rotate them."""

import numpy as np

from kvass.codecs.base import Chunk
from kvass.codecs.tables import Tables, rope_arrays
from kvass.spec import LayerGroup, numpy_dtype

POSITIONS = 1024


def group_of(dtype: str = "bfloat16", heads: int = 2, dim: int = 16, v_dim: int = 8, layers: int = 2):
    return LayerGroup(
        kind="attention",
        layers=tuple(range(layers)),
        kv_heads=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
    )


def tables_of(rotary_dim: int) -> Tables:
    """Tables that rotate group 0; 0: not at all."""
    if not rotary_dim:
        return Tables({}, "0" * 64)
    rates = 100.0 ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    return Tables(rope_arrays(0, rates, POSITIONS), f"{rotary_dim:064}")


def kv_like(chunk: Chunk, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal variables with a mean and a spread of each channel's own; a few outliers and zeros."""
    random, found = np.random.default_rng(seed), {}
    for name in ("k", "v"):
        shape = chunk.group.shape(name, chunk.tokens)
        row = (shape[0], 1, *shape[2:])
        array = random.normal(size=shape) * 2.0 ** random.uniform(-4, 1, row) + random.normal(size=row)
        array[random.random(shape) < 0.002] *= 30
        array[random.random(shape) < 0.002] = 0
        found[name] = array.astype(numpy_dtype(chunk.group.dtype))
    return found


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)

"""What a baseline is: KV of one layer group to what would be read back, and the bits stored for it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvass.spec import LayerGroup

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

SCALE_BITS = 16
"""Bits of one stored scale, zero or norm: all schemes keep them as 16-bit floats."""


class KV(NamedTuple):
    """Keys and values of a whole sequence, float32 `[layers, tokens, heads, dim]`."""

    keys: Float32
    values: Float32


class Coded(NamedTuple):
    """Keys and values as they are read back, float32 in the shapes they were given in; and all bits stored
    for them: symbols, scales, and the tables that travel with the data. Bits of an entropy code are its
    symbols' cross-entropy, so they need not be whole."""

    keys: Float32
    values: Float32
    bits: float


class Setting(NamedTuple):
    """What a scheme is made for: a layer group, the number of layers of the whole model, and KV of that group
    (keys after RoPE) from texts that are not measured, for schemes that profile tables beforehand."""

    group: LayerGroup
    depth: int
    calibration: Sequence[KV]


class Baseline(Protocol):
    """One scheme, ready to code the layer group it was made for."""

    @property
    def rotated(self) -> bool:
        """Whether keys are given and given back after RoPE; else before it, and the caller turns them."""

    def __call__(self, keys: Float32, values: Float32, group: LayerGroup) -> Coded:
        """Code keys `[layers, tokens, heads, dim]` and values `[layers, tokens, heads, v_dim]` of a sequence
        from its first token on. Raises InputError for shapes that the scheme cannot code."""


def channels(array: Float32) -> Float32:
    """`[layers, tokens, heads, dim]` seen as `[layers, tokens, heads * dim]`."""
    layers, tokens, heads, dim = array.shape
    return np.ascontiguousarray(array).reshape(layers, tokens, heads * dim)


def halves(array: Float32) -> Float32:
    """Rounded to float16 and back, as a scale is stored."""
    return array.astype(np.float16).astype(np.float32)

"""8-bit floats (e4m3): a plain cast, or scaled to the format's range per token and head, or per channel."""

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from kvass.bench.baselines.base import SCALE_BITS, Coded, Float32, halves
from kvass.spec import LayerGroup

_GREATEST = np.float32(448)


@dataclass(frozen=True)
class Fp8:
    """Numbers cast to e4m3, those behind its range (448) to the nearest in it; with `scale`, divided first by
    a stored 16-bit scale that brings the greatest of a token and head, or of a channel over the whole
    sequence, to the end of the range."""

    scale: Literal["token", "channel"] | None = None
    rotated = True

    def __call__(self, keys: Float32, values: Float32, group: LayerGroup) -> Coded:
        """Keys and values alike."""
        kept_keys, key_bits = self._code(keys)
        kept_values, value_bits = self._code(values)
        return Coded(kept_keys, kept_values, key_bits + value_bits)

    def _code(self, array: Float32) -> tuple[Float32, int]:
        if self.scale is None:
            return cast(array), 8 * array.size
        greatest = np.abs(array).max(axis=-1 if self.scale == "token" else 1, keepdims=True)
        scale = halves(greatest / _GREATEST)
        scale = np.where(scale > 0, scale, np.float32(1))
        return cast(array / scale) * scale, 8 * array.size + SCALE_BITS * scale.size


def cast(array: Float32) -> Float32:
    """The nearest e4m3 numbers, as float32."""
    inside = np.clip(array, -_GREATEST, _GREATEST)
    return inside.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

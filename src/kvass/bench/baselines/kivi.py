"""KIVI (ICML 2024): keys rounded in groups of tokens per channel, values in groups of channels."""

from dataclasses import dataclass

import numpy as np

from kvass.bench.baselines.base import SCALE_BITS, Coded, Float32, channels, halves
from kvass.spec import LayerGroup

GROUP = 32


@dataclass(frozen=True)
class Kivi:
    """KIVI at `bits` a number with a 16-bit scale and zero a group of 32, the last group being what is left.
    Its window of uncompressed recent tokens is left out: stored state has no recent tokens."""

    bits: int
    rotated: bool

    def __call__(self, keys: Float32, values: Float32, group: LayerGroup) -> Coded:
        """Keys are grouped over 32 tokens of a channel, values over 32 channels of a token."""
        kept_keys, key_bits = self._code(channels(keys), over_tokens=True)
        kept_values, value_bits = self._code(channels(values), over_tokens=False)
        return Coded(kept_keys.reshape(keys.shape), kept_values.reshape(values.shape), key_bits + value_bits)

    def _code(self, array: Float32, over_tokens: bool) -> tuple[Float32, int]:
        """`[layers, tokens, channels]` as it is read back, and the bits it takes."""
        kept = np.empty_like(array)
        groups = 0
        for source, target in zip(array, kept, strict=True):
            tokens, width = source.shape
            whole = (tokens if over_tokens else width) // GROUP * GROUP
            if over_tokens:
                parts = [
                    (source[:whole].reshape(-1, GROUP, width), target[:whole], 1),
                    (source[None, whole:], target[whole:], 1),
                ]
            else:
                parts = [
                    (source[:, :whole].reshape(tokens, -1, GROUP), target[:, :whole], 2),
                    (source[:, None, whole:], target[:, whole:], 2),
                ]
            for part, place, axis in parts:
                if part.size:
                    numbers, count = quantised(part, axis, self.bits)
                    place[...] = numbers.reshape(place.shape)
                    groups += count
        return kept, self.bits * array.size + 2 * SCALE_BITS * groups


def quantised(array: Float32, axis: int, bits: int) -> tuple[Float32, int]:
    """`array` rounded to `2 ** bits` even levels between the least and the greatest number along `axis`, and
    how many (scale, zero) pairs that took."""
    levels = float(2**bits - 1)
    low = array.min(axis, keepdims=True)
    scale = halves((array.max(axis, keepdims=True) - low) / np.float32(levels))
    zero = halves(low)
    divisor = np.where(scale > 0, scale, np.float32(1))
    symbols = array - zero
    symbols /= divisor
    np.rint(symbols, out=symbols)
    np.clip(symbols, 0, levels, out=symbols)
    symbols *= scale
    symbols += zero
    return symbols, int(low.size)

"""CacheGen as LMCache ships it: no deltas, a scale a token over a layer's channels, tables in every chunk."""

import ml_dtypes
import numpy as np

from kvass.bench.baselines.base import SCALE_BITS, Coded, Float32, Float64, channels
from kvass.bench.baselines.entropy import Int64
from kvass.spec import LayerGroup

CHUNK = 256
SYMBOLS = 32
_TOTAL = 1 << 16
CDF_BITS = 16 * (SYMBOLS + 1)
"""Bits of one table: 33 16-bit entries for every layer, channel and chunk."""


class LMCache:
    """LMCache's default level: 32 bins for the keys of the first 10/32 of the layers and the values of the
    first 2/32, 16 for all others. `tables`: count the tables, which every chunk carries, among its bits."""

    rotated = True

    def __init__(self, depth: int, tables: bool):
        self._depth = depth
        self._tables = tables

    def __call__(self, keys: Float32, values: Float32, group: LayerGroup) -> Coded:
        """Keys and values of every layer apart, in chunks of 256 tokens."""
        kept_keys, key_bits = self._code(keys, group, self._share(10))
        kept_values, value_bits = self._code(values, group, self._share(2))
        return Coded(kept_keys, kept_values, key_bits + value_bits)

    def _share(self, of_32: int) -> int:
        """The number of layers that are to this model what `of_32` are to one of 32 layers."""
        return round(self._depth * of_32 / 32)

    def _code(self, array: Float32, group: LayerGroup, fine: int) -> tuple[Float32, float]:
        """`[layers, tokens, heads, dim]` as it is read back, and the bits it takes; layers of the model below
        `fine` have 32 bins."""
        flat = channels(array)
        kept = np.empty_like(flat)
        bits = 0.0
        for number, source, target in zip(group.layers, flat, kept, strict=True):
            symbols, target[...] = binned(source, 32 if number < fine else 16)
            found = chunk_counts(symbols)
            bits += float((found * cdf_costs(found)).sum()) + SCALE_BITS * len(source)
            if self._tables:
                bits += CDF_BITS * found.shape[0] * found.shape[1]
        return kept.reshape(array.shape), bits


def binned(array: Float32, bins: int) -> tuple[Int64, Float32]:
    """Rows `[tokens, channels]` in whole numbers from 0 to `2 * (bins // 2 - 1)`, the middle being zero and a
    row's greatest magnitude an end; and as they are read back."""
    middle = np.float32(bins // 2 - 1)
    greatest = np.abs(array).max(axis=1, keepdims=True)
    stored: Float32 = greatest.astype(ml_dtypes.bfloat16).astype(np.float32)
    stored[stored == 0] = 1
    scale = stored / middle
    numbers = np.clip(np.rint(array / scale), -middle, middle)
    return (numbers + middle).astype(np.int64), numbers * scale


def chunk_counts(symbols: Int64) -> Int64:
    """How often each symbol of `[tokens, channels]` occurs: `[chunks, channels, 32]`."""
    tokens, width = symbols.shape
    chunks = -(-tokens // CHUNK)
    table = np.arange(tokens)[:, None] // CHUNK * width + np.arange(width)
    places = (table * SYMBOLS + symbols).ravel()
    return np.bincount(places, minlength=chunks * width * SYMBOLS).reshape(chunks, width, SYMBOLS)


def cdf_costs(found: Int64) -> Float64:
    """Bits that each symbol costs under its chunk's own table: cumulated shares in 1/65536, every symbol,
    even one that does not occur, getting at least one of them."""
    cumulated = np.zeros((*found.shape[:-1], SYMBOLS + 1))
    np.cumsum(found, axis=-1, out=cumulated[..., 1:])
    cumulated /= cumulated[..., -1:]
    table = np.rint(cumulated * (_TOTAL - SYMBOLS)) + np.arange(SYMBOLS + 1)
    return np.asarray(-np.log2(np.diff(table) / _TOTAL), np.float64)

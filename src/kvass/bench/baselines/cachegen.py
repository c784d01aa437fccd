"""CacheGen as published (SIGCOMM 2024): deltas to an anchor every ten tokens, coded with offline tables."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvass.bench.baselines.base import SCALE_BITS, Coded, Float32, Float64, Setting, channels, halves
from kvass.bench.baselines.entropy import Int64, costs, counts, cross_entropy
from kvass.errors import InputError
from kvass.spec import LayerGroup

SPACING = 10
BINS = (0.5, 1.0, 1.5)
"""Width of a bin in standard deviations of a channel's deltas: first, second, last third of the layers."""
_ANCHOR_LEVELS = np.float32(127)


class CacheGen:
    """CacheGen with one bin width a layer and channel and one table each for anchors and deltas, keys and
    values, profiled on the setting's calibration KV.

    Every tenth token is an anchor: 8-bit integers and a 16-bit scale for all its channels of the layer. The
    nine behind it are stored as differences from the anchor as it will be read back, rounded to whole bins.
    """

    rotated = True

    def __init__(self, setting: Setting, multiplier: float = 1.0, chunk: int | None = None):
        """`multiplier`: of all bin widths. `chunk`: tokens after which an anchor is set anew, so that each
        chunk decodes alone. Raises InputError where there is no calibration KV."""
        if not setting.calibration:
            raise InputError("CacheGen needs KV of calibration texts to profile its tables on")
        bins = np.array([bin_width(layer, setting.depth) for layer in setting.group.layers], np.float32)
        bins *= np.float32(multiplier)
        self._keys = _Profile([kv.keys for kv in setting.calibration], bins, chunk)
        self._values = _Profile([kv.values for kv in setting.calibration], bins, chunk)

    def __call__(self, keys: Float32, values: Float32, group: LayerGroup) -> Coded:
        """Raises InputError where the shapes are not those of the calibration KV."""
        kept_keys, key_bits = self._keys.code(keys)
        kept_values, value_bits = self._values.code(values)
        return Coded(kept_keys, kept_values, key_bits + value_bits)


def bin_width(layer: int, depth: int) -> float:
    """The width of a layer's bins, in standard deviations, in a model of `depth` layers."""
    return BINS[3 * layer // depth]


class Anchors(NamedTuple):
    """Which tokens are anchors: their places, the places of all others, and the anchor of each of those."""

    places: Int64
    others: Int64
    anchor_of: Int64


def anchors(tokens: int, chunk: int | None) -> Anchors:
    """Every tenth token, counted from each chunk's first."""
    at = np.arange(tokens)
    leads = (at if chunk is None else at % chunk) % SPACING == 0
    return Anchors(np.flatnonzero(leads), np.flatnonzero(~leads), (np.cumsum(leads) - 1)[~leads])


class _Profile:
    """Bin widths and tables of the keys, or of the values, of one layer group."""

    def __init__(self, calibration: Sequence[Float32], bins: Float32, chunk: int | None):
        self._chunk = chunk
        flat = [channels(array) for array in calibration]
        self._steps: list[Float32] = []
        self._tables: list[tuple[Float64, Float64]] = []
        for layer, width in enumerate(bins):
            texts = [array[layer] for array in flat]
            step = width * _deviation(texts, chunk)
            parts = [split(text, step, chunk) for text in texts]
            self._steps.append(step)
            self._tables.append(
                (
                    costs(counts(np.concatenate([part.anchors for part in parts]))),
                    costs(counts(np.concatenate([part.deltas for part in parts]))),
                )
            )

    def code(self, array: Float32) -> tuple[Float32, float]:
        """`[layers, tokens, heads, dim]` as it is read back, and the bits it takes."""
        flat = channels(array)
        if len(flat) != len(self._steps) or flat.shape[2] != len(self._steps[0]):
            raise InputError(
                f"KV of {len(flat)} layers and {flat.shape[2]} channels does not fit tables of"
                f" {len(self._steps)} layers and {len(self._steps[0])} channels"
            )
        kept = np.empty_like(flat)
        bits = 0.0
        for layer, step in enumerate(self._steps):
            part = split(flat[layer], step, self._chunk)
            kept[layer] = part.kept
            for symbols, table in zip((part.anchors, part.deltas), self._tables[layer], strict=True):
                bits += cross_entropy(counts(symbols), table)
            bits += SCALE_BITS * len(part.anchors)
        return kept.reshape(array.shape), bits


class Split(NamedTuple):
    """One layer as whole numbers, `[anchors, channels]` and `[others, channels]`, and as it is read back."""

    anchors: Float32
    deltas: Float32
    kept: Float32


def split(array: Float32, step: Float32, chunk: int | None) -> Split:
    """Round one layer `[tokens, channels]`: anchors to 8 bits, others to whole `step`s from their anchor."""
    places, others, anchor_of = anchors(len(array), chunk)
    symbols, read = eight_bits(array[places])
    base = read[anchor_of]
    deltas = np.rint((array[others] - base) / step)
    kept = np.empty_like(array)
    kept[places] = read
    kept[others] = base + deltas * step
    return Split(symbols, deltas, kept)


def eight_bits(array: Float32) -> tuple[Float32, Float32]:
    """Rows `[tokens, channels]` as whole numbers from -127 to 127 times a 16-bit scale of each row: the
    numbers, and the rows as they are read back."""
    scale = halves(np.abs(array).max(axis=1, keepdims=True) / _ANCHOR_LEVELS)
    scale = np.where(scale > 0, scale, np.float32(1))
    symbols = np.clip(np.rint(array / scale), -_ANCHOR_LEVELS, _ANCHOR_LEVELS)
    return symbols, symbols * scale


def _deviation(texts: Sequence[Float32], chunk: int | None) -> Float32:
    """Standard deviation of each channel's deltas over all texts, `[channels]`; of constant channels 1."""
    deltas = []
    for array in texts:
        places, others, anchor_of = anchors(len(array), chunk)
        deltas.append(array[others] - eight_bits(array[places])[1][anchor_of])
    deviation: Float64 = np.concatenate(deltas).std(axis=0, dtype=np.float64)
    return np.where(deviation > 0, deviation, 1.0).astype(np.float32)

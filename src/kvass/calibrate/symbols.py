"""Static tables of the transform codec's symbols: how often each comes at which scale, and what it means."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.calibrate.fit import CLASSES, Basis, Fitted, turned_back, weigh
from kvass.codecs import rans
from kvass.codecs.sinks import SINKS
from kvass.codecs.tables import Float32, Rope
from kvass.codecs.transform_kernels import ESCAPE, MOST
from kvass.container import Array
from kvass.spec import LayerGroup

PER_OCTAVE = 2
CONTEXTS = 24
ORIGIN_CONTEXT = 5 * PER_OCTAVE
"""The context of data whose deviation is one step."""

_ROUNDING = np.float32(0.5)


class Counts(NamedTuple):
    """How often each symbol by context, the sum of what was rounded to it in steps; how often each class."""

    symbols: npt.NDArray[np.float64]
    sums: npt.NDArray[np.float64]
    classes: npt.NDArray[np.float64]


def no_counts() -> Counts:
    """Nothing counted yet."""
    return Counts(np.zeros((CONTEXTS, 256)), np.zeros((CONTEXTS, 256)), np.zeros(256))


def scales(basis: Basis) -> npt.NDArray[np.int16]:
    """Deviations `[layers, n]` in units of contexts."""
    return np.round(PER_OCTAVE * np.log2(basis.deviations)).astype(np.int16)


def offset(step: float) -> int:
    """What is taken off `scales` at a level's step to give contexts."""
    return round(PER_OCTAVE * math.log2(step)) - ORIGIN_CONTEXT


def count(
    into: Counts, group: LayerGroup, fitted: Fitted, rope: Rope | None, k: Float32, v: Float32,
    steps: Sequence[float],
) -> None:  # fmt: skip
    """Code a text's keys (after RoPE) and values with each of the steps, and count."""
    bare = turned_back(k, rope)
    weights = weigh(group, bare, rope, fitted.probes, fitted.offsets)[:, SINKS:]
    classes = (weights[..., None] < fitted.thresholds[:, None]).sum(axis=-1)
    into.classes[...] += len(steps) * np.bincount(classes.ravel(), minlength=into.classes.size)
    half = (classes - CLASSES // 2)[..., None]
    for side, x in ((fitted.k, bare), (fitted.v, v)):
        layers, tokens, heads, dim = x.shape
        centred = (x.reshape(layers, tokens, -1) - side.mean[:, None]).reshape(x.shape)[:, SINKS:]
        y = (centred.swapaxes(1, 2) @ side.forward).swapaxes(1, 2) / np.exp2(half / 2)
        base = scales(side).reshape(layers, 1, heads, dim) - half
        for step in steps:
            _count(into, y / step, np.clip(base - offset(step), 0, CONTEXTS - 1))


def _count(into: Counts, y: npt.NDArray[np.float64], contexts: npt.NDArray[np.int64]) -> None:
    """Round `y`, in steps, and count by context and symbol."""
    size = np.floor(np.abs(y) + _ROUNDING).astype(np.int64)
    symbol = np.where(size > MOST, ESCAPE, np.where(size > 0, 2 * size - (y > 0), 0))
    place = (contexts * 256 + symbol).ravel()
    into.symbols[...] += np.bincount(place, minlength=into.symbols.size).reshape(into.symbols.shape)
    into.sums[...] += np.bincount(place, y.ravel(), into.sums.size).reshape(into.sums.shape)


def symbol_arrays(counts: Counts) -> dict[str, Array]:
    """The tables' arrays that all groups and levels share."""
    seen = _smoothed(counts.symbols)
    classes = np.zeros(256)
    classes[:CLASSES] = counts.classes[:CLASSES] + 1
    idle = np.zeros(256)
    idle[0] = 1
    weights = np.concatenate([seen, classes[None] / classes.sum(), idle[None]])
    integers = np.round(weights / weights.sum(axis=1, keepdims=True) * (1 << 32)).astype(np.int64)
    half = np.arange(CLASSES) - CLASSES // 2
    return {
        "transform.symbols": rans.frequencies(integers),
        "transform.centres": _centres(counts),
        "transform.rounding": np.full(CONTEXTS, _ROUNDING, np.float32),
        "transform.shifts": half.astype(np.int16),
    }


def level_arrays(name: str, step: float) -> dict[str, Array]:
    """The tables' arrays of one level."""
    half = np.arange(CLASSES) - CLASSES // 2
    steps = (step * np.exp2(half / 2)).astype(np.float32)
    return {
        f"transform.{name}.offset": np.array([offset(step)], np.int16),
        f"transform.{name}.steps": steps,
        f"transform.{name}.inverse_steps": (1 / steps.astype(np.float64)).astype(np.float32),
    }


def group_arrays(number: int, fitted: Fitted) -> dict[str, Array]:
    """The tables' arrays of one layer group."""
    name = f"transform.{number}"
    found: dict[str, Array] = {
        f"{name}.probes": fitted.probes,
        f"{name}.offsets": fitted.offsets,
        f"{name}.thresholds": fitted.thresholds,
    }
    for part, side in (("k", fitted.k), ("v", fitted.v)):
        found[f"{name}.{part}.mean"] = side.mean
        found[f"{name}.{part}.forward"] = side.forward
        found[f"{name}.{part}.inverse"] = side.inverse
        found[f"{name}.{part}.scale"] = scales(side)
    return found


def _levels() -> npt.NDArray[np.int64]:
    """What each symbol below ESCAPE stands for: 0, 1, -1, 2, -2, ..."""
    symbols = np.arange(ESCAPE)
    return np.where(symbols % 2 == 1, (symbols + 1) // 2, -(symbols // 2))


def _smoothed(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Shares `[contexts, 256]`: what was counted, both signs alike, with a Laplace distribution of the
    context's scale for what was seen seldom."""
    levels = _levels()
    found = np.zeros((CONTEXTS, 256))
    for context in range(CONTEXTS):
        scale = 2 ** ((context - ORIGIN_CONTEXT) / PER_OCTAVE)
        expected = np.exp(-np.abs(levels) * math.sqrt(2) / max(scale, 0.1))
        row = counts[context, :ESCAPE].copy()
        row[1:] = (row[1:] + row[_mirrored(levels)[1:]]) / 2
        total = row.sum()
        found[context, :ESCAPE] = (row + 64 * expected / expected.sum()) / (total + 64)
        found[context, ESCAPE] = (counts[context, ESCAPE] + 0.01) / (counts[context].sum() + 64)
    return found


def _mirrored(levels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The symbol of the level of the other sign."""
    return np.where(levels > 0, -2 * -levels, np.where(levels < 0, -2 * levels - 1, 0))


def _centres(counts: Counts) -> Float32:
    """What a symbol stands for `[contexts, 256]`, in steps: the mean of what was rounded to it."""
    levels = np.append(_levels(), 0).astype(np.float64)
    seen = counts.symbols + 50
    centres = (counts.sums + 50 * levels) / seen
    mirrored = np.append(_mirrored(_levels()), ESCAPE)
    centres = (centres - centres[:, mirrored]) / 2
    centres[:, 0] = centres[:, ESCAPE] = 0
    return np.ascontiguousarray(centres, np.float32)

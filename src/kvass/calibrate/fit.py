"""What the transform codec needs to know of a layer group, learnt from calibration texts.

For each layer and KV head: a basis in which an error of one step costs the model's predictions the same in
every direction while the data is uncorrelated; and probes, queries of other texts, whose attention tells how
much a token counts. docs/codec-transform.md has the reasons.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.codecs.sinks import SINKS
from kvass.codecs.tables import Float32, Rope
from kvass.codecs.transform import ORIGIN
from kvass.container import Array
from kvass.spec import LayerGroup

Float64 = npt.NDArray[np.float64]

PART = 256
"""Tokens of a chunk, usually."""

PROBES = 96
"""Queries of what came after the texts, of each KV head's query heads in turn, that stand as far behind a
sequence's end as they did there (where there is a window, half of that at most)."""

CLASSES = 13
"""Half octaves of steps."""

_BLOCKS = 96
"""Tokens in the order of their weights are averaged over in so many blocks; the heaviest in finer ones."""

_REGULAR = 0.4
"""Of the mean Fisher information, what is added in every direction: few texts say too little of most."""

_BEYOND = 1e30
"""More than any weight."""

_TO_POWER_OF_TWO = 2 / math.log(2)


class Reading(NamedTuple):
    """One calibration text, for one layer group: keys after RoPE, values and their mean squared gradients'
    factors `[passes]` of `[layers, tokens, heads, dim]`; queries of its continuation
    `[layers, n, heads, queries, dim]`."""

    k: Float32
    v: Float32
    k_gradients: Sequence[Float32]
    v_gradients: Sequence[Float32]
    queries: Float32


class Basis(NamedTuple):
    """Keys or values: mean and deviations `[layers, n]`, forward and inverse `[layers, heads, dim, dim]`."""

    mean: Float32
    forward: Float32
    inverse: Float32
    deviations: Float64


class Fitted(NamedTuple):
    """All of one layer group; see `kvass.codecs.transform_tables.Calibrated`."""

    k: Basis
    v: Basis
    probes: Float32
    offsets: Float32
    thresholds: Float32


def fit(group: LayerGroup, rope: Rope | None, readings: Sequence[Reading], sizes: Sequence[float]) -> Fitted:
    """Learn from texts, each with its `importance`."""
    bare = [turned_back(one.k, rope) for one in readings]
    # Behind a window nothing is seen: there, an average over the whole text would tell of nothing stored.
    first = SINKS if group.window is None else -min(PART, group.window)

    def counted(gradients: Sequence[Float32], size: float) -> list[Float32]:
        return [g[:, first:] / size for g in gradients]

    each = list(zip(readings, sizes, strict=True))
    k_gradients = [counted([turned_back(g, rope) for g in one.k_gradients], size) for one, size in each]
    v_gradients = [counted(one.v_gradients, size) for one, size in each]
    k, v = _basis(bare, k_gradients), _basis([one.v for one in readings], v_gradients)
    probes, offsets = _probes(group, rope, readings)
    weights = [weigh(group, one[:, min(first, 0) :], rope, probes, offsets)[:, first:] for one in bare]
    told = [
        _information(k, ks) + _information(v, vs) for ks, vs in zip(k_gradients, v_gradients, strict=True)
    ]
    thresholds = _thresholds(np.concatenate(weights, axis=1), np.concatenate(told, axis=1))
    return Fitted(k, v, probes, offsets, thresholds)


def turned_back(keys: Float32, rope: Rope | None) -> Float32:
    """Keys before RoPE, or their gradients: turning is orthogonal."""
    return rope.unrotate(np.ascontiguousarray(keys, np.float32), 0) if rope else keys


def weigh(group: LayerGroup, bare: Float32, rope: Rope | None, probes: Float32, offsets: Float32) -> Float32:
    """Weights `[layers, tokens, heads]` of a text's tokens as the codec finds them, some at once."""
    found, tokens = [], bare.shape[1]
    for start in range(0, tokens, PART):
        keys = np.ascontiguousarray(bare[:, start : start + PART])
        end = tokens if group.window is None else start + keys.shape[1]
        turned = rope.rotate(keys, max(0, ORIGIN - end + start)) if rope else keys
        scores = turned.swapaxes(1, 2) @ probes - offsets[:, :, None]
        found.append(np.exp2(np.clip(scores, -64, 62)).mean(axis=-1).swapaxes(1, 2))
    return np.asarray(np.concatenate(found, axis=1), np.float32)


def _information(side: Basis, gradients: Sequence[Float32]) -> Float32:
    """Fisher information of each token `[layers, tokens, heads]`, the mean over directions of a basis."""
    rows = (g.swapaxes(1, 2) @ side.inverse.swapaxes(-1, -2) for g in gradients)
    return np.asarray(
        sum(np.square(y).mean(axis=-1).swapaxes(1, 2) for y in rows) / len(gradients), np.float32
    )


def _thresholds(weights: Float32, information: Float32) -> Float32:
    """Weights `[layers, heads, CLASSES - 1]` below which a token's Fisher information, by what tokens of
    such weights have in the calibration texts, is so small that its step may be half an octave larger.

    Where probes cannot tell, as in heads that look for one place by what it says, all get about one step.
    Steps grow as the inverse root of the information: what uniform errors ask for at a given rate.
    """
    layers, count, heads = weights.shape
    heaviest = count - np.geomspace(32, max(33, count // 8), _BLOCKS // 4).astype(np.int64)
    edges = np.unique(np.clip([*np.linspace(0, count, _BLOCKS + 1).astype(np.int64), *heaviest], 0, count))
    place = np.arange(CLASSES - 1) - (CLASSES // 2) + 0.5
    found = np.zeros((layers, heads, CLASSES - 1), np.float32)
    for layer in range(layers):
        for head in range(heads):
            order = np.argsort(weights[layer, :, head], kind="stable")
            told = information[layer, order, head]
            means, starts = _rising(np.add.reduceat(told, edges[:-1]) / np.diff(edges), edges)
            lightest = np.concatenate([[0], weights[layer, order[starts[1:]], head], [_BEYOND]])
            found[layer, head] = lightest[np.searchsorted(means, told.mean() * np.exp2(-place))]
    return found


def _rising(means: Float64, edges: npt.NDArray[np.int64]) -> tuple[Float64, npt.NDArray[np.int64]]:
    """The nearest means that rise from block to block, and where their blocks start (isotonic regression by
    pooling adjacent violators)."""
    blocks: list[tuple[float, int, int]] = []  # mean, size, start
    for mean, start, end in zip(means, edges, edges[1:], strict=False):
        blocks.append((float(mean), int(end - start), int(start)))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (one, size, begin), (other, more, _) = blocks[-2:]
            blocks[-2:] = [((one * size + other * more) / (size + more), size + more, begin)]
    return np.array([one for one, _, _ in blocks]), np.array([start for _, _, start in blocks])


def importance(text: Sequence[Reading]) -> float:
    """The root of a text's Fisher information, a token, over all layer groups: what is divided by it counts
    as much as any other text's."""
    energy = sum(
        float(np.square(g[:, SINKS:], dtype=np.float64).sum())
        for one in text
        for side in (one.k_gradients, one.v_gradients)
        for g in side
    )
    return math.sqrt(energy / (len(text[0].k_gradients) * text[0].k.shape[1])) or 1.0


def _basis(data: Sequence[Float32], gradients: Sequence[Sequence[Float32]]) -> Basis:
    layers, _, heads, dim = data[0].shape
    flat = np.concatenate([one[:, SINKS:] for one in data], axis=1).swapaxes(1, 2)
    mean = flat.mean(axis=2, dtype=np.float64)
    flat = flat - mean[:, :, None].astype(np.float32)
    covariance = (flat.swapaxes(2, 3) @ flat).astype(np.float64) / flat.shape[2]
    fisher = np.zeros((layers, heads, dim, dim))
    for passes in gradients:
        for one in passes:
            g = one.swapaxes(1, 2)
            fisher += (g.swapaxes(2, 3) @ g) / (g.shape[2] * len(passes) * len(gradients))
    trace = np.trace(fisher, axis1=2, axis2=3)[..., None, None] / dim
    floor = max(float(trace.mean()), 1e-30) * 1e-6
    regular = fisher + (_REGULAR * trace + floor) * np.eye(dim)
    values, vectors = np.linalg.eigh(regular)
    root = (vectors * np.sqrt(values)[..., None, :]) @ vectors.swapaxes(-1, -2)
    back = (vectors / np.sqrt(values)[..., None, :]) @ vectors.swapaxes(-1, -2)
    spread, basis = np.linalg.eigh(root @ covariance @ root)
    spread, basis = spread[..., ::-1], basis[..., ::-1]
    deviations = np.sqrt(np.maximum(spread, 1e-30)).reshape(layers, heads * dim)
    return Basis(
        mean.reshape(layers, -1).astype(np.float32),
        np.ascontiguousarray(root @ basis, np.float32),
        np.ascontiguousarray(basis.swapaxes(-1, -2) @ back, np.float32),
        deviations,
    )


def _probes(group: LayerGroup, rope: Rope | None, readings: Sequence[Reading]) -> tuple[Float32, Float32]:
    """Probes `[layers, heads, dim, probes]` at their places behind the end, and the logarithms of what the
    attention over a text sums up to `[layers, heads, probes]`; both as exponents of two."""
    queries, places = [], []
    for number, one in enumerate(readings):  # in turn, so that each text has some near the end and some far
        mine = np.arange(number, PROBES, len(readings)) * one.queries.shape[1] // PROBES
        which = (number + np.arange(len(mine))) % one.queries.shape[3]
        queries.append(one.queries[:, mine, :, which].swapaxes(0, 1))
        places.append(mine)
    chosen = np.concatenate(queries, axis=1)  # [layers, probes, heads, dim]
    distances = np.concatenate(places)
    if group.window is not None:  # further behind, a query sees too little of a text to be compared
        distances = distances % max(1, group.window // 2)
    probes = _placed(chosen, rope, ORIGIN + distances).transpose(0, 2, 3, 1)
    offsets = np.zeros((probes.shape[0], probes.shape[1], probes.shape[3]))
    for one in readings:
        tokens = one.k.shape[1]
        rows = _placed(chosen, rope, tokens + distances).swapaxes(1, 2)
        scores = rows @ one.k.transpose(0, 2, 3, 1)  # [layers, heads, probes, tokens]
        if group.window is not None:
            gone = tokens + distances[:, None] - np.arange(tokens) >= group.window
            scores = np.where(gone, -np.inf, scores)
        peak = scores.max(axis=-1, keepdims=True)
        offsets += (np.log(np.exp(scores - peak).sum(axis=-1)) + peak[..., 0]) / len(readings)
    scale = np.float32(_TO_POWER_OF_TWO)
    return np.ascontiguousarray(probes * scale, np.float32), np.ascontiguousarray(offsets * scale, np.float32)


def _placed(queries: Float32, rope: Rope | None, positions: npt.NDArray[np.int64]) -> Float32:
    """Queries `[layers, n, heads, dim]`, each turned to its position."""
    if rope is None:
        return queries
    turned: list[Array] = [
        rope.rotate(np.ascontiguousarray(queries[:, i : i + 1]), int(position))
        for i, position in enumerate(positions)
    ]
    return np.concatenate(turned, axis=1).astype(np.float32)

"""The transform codec: levels `q1` to `q4`, certified for a model before they are used.

Keys before RoPE, and values, are projected onto directions in which the model's output is equally sensitive
and the data uncorrelated, divided by a step that is larger for tokens to which nobody attends, rounded, and
coded with static tables. All that is not in the stream was calibrated for the model.
"""

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from kvass.codecs import plain, rans
from kvass.codecs import transform_basis as basis
from kvass.codecs import transform_kernels as kernels
from kvass.codecs.base import Chunk
from kvass.codecs.rans import UInt16, UInt32
from kvass.codecs.sinks import check_fits, sinks
from kvass.codecs.tables import Float32, Rope, Tables
from kvass.codecs.transform_tables import Calibrated, Side, frequencies
from kvass.container import Array, CodecStep
from kvass.errors import CorruptObjectError, InputError
from kvass.spec import numpy_dtype

ORIGIN = 4096
"""Where a sequence ends, as far as the probes are concerned: they were turned to stand behind it. What is
further from the end is treated as if it were that far."""

_LENGTHS = 2
"""A stream begins with two 32-bit numbers: of its words, and of its escapes."""

_BF16 = np.dtype(ml_dtypes.bfloat16)


class Transform:
    """One level, for the model that `tables` were calibrated for."""

    lossless = False
    in_place = False
    end_aware = True

    def __init__(self, tables: Tables, level: str):
        """Raises CorruptObjectError where the tables hold nothing for that level."""
        self.name = level
        self._tables = tables
        self._groups: dict[int, Calibrated] = {}
        expected = frequencies(tables)
        self._decoding, self._coding = rans.decoding_tables(expected), rans.coding_tables(expected)
        self._group(0)

    def step(self) -> CodecStep:
        """The level, and the digest of its tables."""
        return CodecStep(self.name, {"tables": self._tables.digest})

    # -- encoding -------------------------------------------------------------------------------------

    def encode(self, arrays: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """One `stream` over all layers; and, of a sequence's first chunk, its first tokens as they are.

        Raises InputError for values that are not finite, and positions that the tables do not have.
        """
        if arrays.keys() != {"k", "v"}:
            raise InputError(f"{self.name} takes arrays k and v, not {sorted(arrays)}")
        try:
            group, kept = self._fitting(chunk), sinks(chunk)
        except CorruptObjectError as error:
            raise InputError(f"{self.name} cannot code this chunk: {error}") from error
        for name in ("k", "v"):
            check_fits(name, arrays[name], chunk)
        work = _Work(group, chunk, self._tables.rope(chunk.number))
        states, escapes = rans.fresh(), []
        words = np.empty(group.layers * work.room + rans.STATE_WORDS, np.uint16)
        at = len(words)
        for layer in range(group.layers - 1, -1, -1):  # what is decoded last is coded first
            escapes.append(work.quantise(layer, arrays, kept))
            for contexts, symbols in work.runs:
                at = rans.encode_run(self._coding, contexts, symbols, words, at, states)
        words = words[rans.finish(words, at, states) :].astype("<u2")
        levels = np.concatenate(escapes[::-1]).astype("<i4")
        lengths = np.array([len(words), len(levels)], "<u4")
        stream = np.concatenate([part.view(np.uint8) for part in (lengths, words, levels)])
        stored: dict[str, Array] = {"stream": stream[None]}
        for name in ("k", "v") if kept else ():
            stored[f"{name}_first"] = np.ascontiguousarray(arrays[name][:, :kept])
        return stored

    # -- decoding -------------------------------------------------------------------------------------

    def decode(self, stored: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """See `Codec.decode`."""
        group, kept = self._fitting(chunk), sinks(chunk)
        first = {name: _kept(stored, name, chunk, kept) for name in ("k", "v")} if kept else {}
        if len(stored) != 1 + len(first):
            raise CorruptObjectError("object holds arrays that its codec does not write")
        found = {
            name: np.empty(chunk.group.shape(name, chunk.tokens), numpy_dtype(chunk.group.dtype))
            for name in ("k", "v")
        }
        turns = {"k": self._turns(chunk), "v": (np.empty((chunk.tokens, 0), np.float32),) * 2}
        sides = [
            (side, column, np.empty((chunk.tokens, side.width), np.float32), turns[name], found[name])
            for name, side, column in (("k", group.k, 0), ("v", group.v, group.split))
        ]
        for layer, y in enumerate(self.projections(stored, chunk)):
            for side, column, x, turn, target in sides:
                _restore(side, layer, y, column, x, turn, target[layer])
        for name, array in first.items():
            found[name][:, :kept] = array
        return found

    def projections(self, stored: Mapping[str, Array], chunk: Chunk) -> Iterator[Float32]:
        """What a chunk's stream says, layer by layer, in one array `[tokens, n]`: each overwrites the last.

        Raises CorruptObjectError where the stream is not sound, which may show only behind its last layer.
        """
        group = self._fitting(chunk)
        stream = Stream(stored, self._decoding, _most(group, chunk.tokens))
        y = np.empty((chunk.tokens, group.width), np.float32)
        for layer in range(group.layers):
            stream.dequantised(group, layer, y)
            yield y
        stream.close()

    def _turns(self, chunk: Chunk) -> tuple[Float32, Float32]:
        """Cosines and sines of the chunk's positions, `[tokens, rotary_dim / 2]`."""
        rope = self._tables.rope(chunk.number)
        if rope is None:
            return (np.empty((chunk.tokens, 0), np.float32),) * 2
        try:
            return rope.rows(chunk.start, chunk.tokens)
        except InputError as error:
            raise CorruptObjectError(str(error)) from error

    def _fitting(self, chunk: Chunk) -> Calibrated:
        group, spec, rope = self._group(chunk.number), chunk.group, self._tables.rope(chunk.number)
        found = group.layers, group.heads, group.k.width, group.v.width
        heads = spec.kv_heads
        if found != (len(spec.layers), heads, heads * spec.head_dim, heads * spec.v_head_dim):
            raise CorruptObjectError("the tables are of a model of another shape")
        if rope is not None and rope.rotary_dim > spec.head_dim:
            raise CorruptObjectError("the tables rotate more than a head has")
        return group

    def _group(self, number: int) -> Calibrated:
        if number not in self._groups:
            self._groups[number] = Calibrated(self._tables, self.name, number)
        return self._groups[number]


class _Work:
    """What encoding one chunk's layers, one after the other, takes."""

    def __init__(self, group: Calibrated, chunk: Chunk, rope: Rope | None):
        self._group = group
        self._turns = None
        if rope is not None:
            cos, sin = rope.rows(chunk.start, chunk.tokens)
            place = max(0, ORIGIN - chunk.behind - chunk.tokens)
            self._turns = (cos, -sin), rope.rows(place, chunk.tokens)
        self._y = np.empty((chunk.tokens, group.width), np.float32)
        self._weights = np.empty((chunk.tokens, group.heads), np.float32)
        full = group.width + -group.width % rans.LANES
        self._contexts = np.full((chunk.tokens, full), group.idle, np.uint8)
        self._symbols = np.zeros((chunk.tokens, full), np.uint8)
        self._escapes = np.empty(self._y.size, np.int32)
        count = self._weights.size
        classes = np.zeros(count + -count % rans.LANES, np.uint8)
        class_contexts = np.full(classes.size, group.idle, np.uint8)
        class_contexts[:count] = group.class_context
        self._classes = classes[:count].reshape(self._weights.shape)
        self.runs = (self._contexts.reshape(-1), self._symbols.reshape(-1)), (class_contexts, classes)
        self.room = self._symbols.size + classes.size

    def quantise(self, layer: int, arrays: Mapping[str, Array], kept: int) -> kernels.Int32:
        """Fill `runs`, contexts and symbols of a layer's levels and of its classes; returns the escapes."""
        group, y = self._group, self._y
        k, v = (arrays[name][layer].astype(np.float32, order="C") for name in ("k", "v"))
        turned = k
        if self._turns is not None:
            turned = np.empty_like(k)
            basis.turned(k, *self._turns[0], k)
            basis.turned(k, *self._turns[1], turned)
        basis.importance(turned, group.probes[layer], group.offsets[layer], self._weights)
        kernels.classified(self._weights, group.thresholds[layer], self._classes)
        for x, side, first in ((k, group.k, 0), (v, group.v, group.split)):
            basis.transformed(x.reshape(len(y), -1), side.mean[layer], side.forward[layer], first, y)
        if not np.isfinite(y).all():  # as it is wherever one that is not finite went in
            raise InputError(
                "keys or values are not finite, or larger than its levels reach; only exact codecs keep such"
            )
        y[:kept] = 0
        count = kernels.quantised(
            y, group.split, self._classes, group.base[layer], group.shifts, group.inverse_steps,
            group.rounding, self._contexts, self._symbols, self._escapes,
        )  # fmt: skip
        escapes = self._escapes[:count].copy()
        if (np.abs(escapes) >= kernels.LARGEST).any():
            raise InputError("keys or values are larger than its levels reach; only exact codecs keep such")
        return escapes


class Stream:
    """One chunk's stream, decoded layer by layer. Raises CorruptObjectError where it is not sound."""

    def __init__(self, stored: Mapping[str, Array], tables: UInt32, most: int | None = None):
        """`tables`: `rans.decoding_tables`; `most`: bytes that the chunk can need."""
        array = stored.get("stream")
        if array is None or array.dtype != np.uint8 or array.ndim != 2 or len(array) != 1:
            raise CorruptObjectError("object holds no stream of its codec")
        if most is not None and array.nbytes > most:
            raise CorruptObjectError("a stream is longer than its chunk can need")
        flat = np.ascontiguousarray(array[0]).view(np.uint8)
        begin = 4 * _LENGTHS
        words, escapes = (
            (int(one) for one in flat[:begin].copy().view("<u4")) if flat.size >= begin else (0, 0)
        )
        if words < rans.STATE_WORDS or begin + 2 * words + 4 * escapes != flat.size:
            raise CorruptObjectError("a stream's lengths are not what it says")
        end = begin + 2 * words
        self._words: UInt16 = np.zeros(words + rans.PADDING, np.uint16)
        self._words[:words] = flat[begin:end].view("<u2")
        self._escapes = flat[end:].copy().view("<i4").astype(np.int32)
        if (np.abs(self._escapes.astype(np.int64)) > kernels.LARGEST).any():
            raise CorruptObjectError("a stream holds a level that is never written")
        self._tables = tables
        self._states = rans.fresh()
        self._at = rans.begin(self._words, 0, self._states)
        self._taken = 0

    def dequantised(self, group: Calibrated, layer: int, y: Float32) -> None:
        """The next layer's projections, `[tokens, n]`."""
        count = len(y) * group.heads
        classes = np.empty(count + -count % rans.LANES, np.uint8)
        contexts = np.full(classes.size, group.idle, np.uint8)
        contexts[:count] = group.class_context
        self._at = rans.decode(
            self._tables, contexts, self._words, self._at, self._states, classes, classes.size
        )
        if classes[:count].max() >= len(group.steps):
            raise CorruptObjectError("a stream names a class that there is not")
        self._at, self._taken = kernels.dequantised(
            self._tables, self._words, self._at, self._states, classes[:count].reshape(len(y), group.heads),
            group.base[layer], group.shifts, group.steps, group.centres, self._escapes, self._taken,
            group.split, int(group.idle), y,
        )  # fmt: skip

    def close(self) -> None:
        """All of it must have been used up."""
        ended = self._at == len(self._words) - rans.PADDING and rans.ended(self._states)
        if not ended or self._taken != len(self._escapes):
            raise CorruptObjectError("a stream does not end where it says")


def _restore(
    side: Side, layer: int, y: Float32, column: int, x: Float32, turns: tuple[Float32, Float32], target: Array
) -> None:
    """One layer's keys or values, from columns of `y`, by way of `x`, to `target` `[tokens, heads, dim]`."""
    basis.restored(y, column, side.mean[layer], side.inverse[layer], x)
    shaped = x.reshape(target.shape)
    if target.dtype == _BF16:
        basis.rounded(shaped, *turns, target.view(np.uint16))
    else:
        basis.turned(shaped, *turns, shaped)
        target[:] = plain.narrowed(shaped, target.dtype)


def _most(group: Calibrated, tokens: int) -> int:
    """Bytes of a chunk's longest stream: a word for each symbol, and each level an escape."""
    levels = group.layers * tokens * group.width
    filled = group.layers * (tokens * (group.heads + group.width + rans.LANES) + rans.LANES)
    most: int = 4 * _LENGTHS + 2 * (rans.STATE_WORDS + filled) + 4 * levels
    return most


def _kept(stored: Mapping[str, Array], name: str, chunk: Chunk, kept: int) -> Array:
    array = stored.get(f"{name}_first")
    dtype = numpy_dtype(chunk.group.dtype)
    if array is None or array.shape != chunk.group.shape(name, kept) or array.dtype != dtype:
        raise CorruptObjectError("object's first tokens are not what the spec says")
    return array

"""The transform codec's classes, levels and symbols, for one layer of one chunk; arrays are C-contiguous."""

import numpy as np
import numpy.typing as npt

from kvass.codecs import rans
from kvass.codecs.kernel import kernel
from kvass.codecs.rans import UInt8, UInt16, UInt32
from kvass.codecs.tables import Float32

Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]

ESCAPE = 255
"""The symbol of a level beyond `MOST`; its value follows on its own."""
MOST = 127
LARGEST = 1 << 20
"""Levels beyond it are stored as it."""

_MOST, _ESCAPE = np.float32(MOST), np.float32(ESCAPE)
_LARGEST = np.float32(LARGEST)
_ZERO, _UNIT = np.float32(0), np.float32(1)


@kernel
def classified(weights: Float32, thresholds: Float32, classes: UInt8) -> None:
    """The class of each token and head `[tokens, heads]`: how many thresholds `[heads, classes - 1]` its
    weight is below."""
    tokens, heads = weights.shape
    for token in range(tokens):
        for head in range(heads):
            found = 0
            for threshold in thresholds[head]:
                found += weights[token, head] < threshold
            classes[token, head] = found


@kernel
def contexts_of(base: Int16, shifts: Int16, last: int, contexts: UInt8) -> None:
    """The context of each column in each class `[classes, n]`: base `[n]` less the class's shift, within 0 to
    `last`."""
    for one in range(len(shifts)):
        for j in range(len(base)):
            place = np.int64(base[j]) - np.int64(shifts[one])
            contexts[one, j] = 0 if place < 0 else last if place > last else place


@kernel
def _symbols(row: Float32, scale: np.float32, rounding: Float32, symbols: UInt8) -> None:
    """The symbols of a head's projections."""
    for j in range(len(row)):
        value = row[j] * scale
        size = np.floor(abs(value) + rounding[j])
        code = size + size - (_UNIT if value > _ZERO else _ZERO)
        code = code if size > _ZERO else _ZERO  # so is what is not a number
        code = _ESCAPE if size > _MOST else code
        symbols[j] = np.uint8(np.int32(code))


@kernel
def _copied(source: UInt8, target: UInt8) -> None:
    """As an assignment, which takes several times as long for so few."""
    for j in range(len(source)):
        target[j] = source[j]


@kernel
def _largest(row: UInt8) -> int:
    largest = np.uint8(0)
    for j in range(len(row)):
        largest = max(largest, row[j])
    return int(largest)


@kernel
def quantised(
    y: Float32, split: int, classes: UInt8, base: Int16, shifts: Int16, inverse_steps: Float32,
    rounding: Float32, contexts: UInt8, symbols: UInt8, escapes: Int32,
) -> int:  # fmt: skip
    """Levels of `y` `[tokens, n]` as symbols `[tokens, n or more]` with contexts; how many escapes there are.

    Columns before `split` are of keys, those behind it of values: both have the class of token and head.
    """
    tokens, n = y.shape
    heads = classes.shape[1]
    which = np.empty((len(shifts), n), np.uint8)
    contexts_of(base, shifts, len(rounding) - 1, which)
    near = np.empty(which.shape, np.float32)
    for one in range(len(shifts)):
        for j in range(n):
            near[one, j] = rounding[which[one, j]]
    taken = 0
    for token in range(tokens):
        first = 0
        for part in range(2 * heads):
            one = classes[token, part % heads]
            end = first + (split if part < heads else n - split) // heads
            _copied(which[one, first:end], contexts[token, first:end])
            _symbols(y[token, first:end], inverse_steps[one], near[one, first:end], symbols[token, first:end])
            first = end
        if _largest(symbols[token, :n]) < ESCAPE:
            continue
        first = 0
        for part in range(2 * heads):
            one = classes[token, part % heads]
            end = first + (split if part < heads else n - split) // heads
            for j in range(first, end):
                if symbols[token, j] == ESCAPE:
                    value = y[token, j] * inverse_steps[one]
                    size = np.floor(abs(value) + near[one, j])
                    level = np.int32(size if size < _LARGEST else _LARGEST)
                    escapes[taken] = -level if value < _ZERO else level
                    taken += 1
            first = end
    return taken


@kernel
def dequantised(
    tables: UInt32, words: UInt16, at: int, states: UInt32, classes: UInt8, base: Int16, shifts: Int16,
    steps: Float32, centres: Float32, escapes: Int32, taken: int, split: int, idle: int, y: Float32,
) -> tuple[int, int]:  # fmt: skip
    """Decode `y` `[tokens, n]`: where the stream goes on, and how many escapes were taken.

    `classes` `[tokens, heads]`, each less than there are steps; `centres` `[contexts * 256]`: what a symbol
    stands for, in steps; `idle`: the context of the symbols that fill a token up to whole lanes. Where the
    escapes are used up, levels are 0, and the count goes on.
    """
    tokens, n = y.shape
    heads = classes.shape[1]
    full = n + -n % rans.LANES
    contexts, symbols = np.full(full, np.uint8(idle), np.uint8), np.empty(full, np.uint8)
    which = np.empty((len(shifts), n), np.uint8)
    contexts_of(base, shifts, len(centres) // 256 - 1, which)
    scales = np.empty(n, np.float32)
    for token in range(tokens):
        first = 0
        for part in range(2 * heads):
            one = classes[token, part % heads]
            end = first + (split if part < heads else n - split) // heads
            contexts[first:end] = which[one, first:end]
            scales[first:end] = steps[one]
            first = end
        at = rans.decode(tables, contexts, words, at, states, symbols, full)
        row = y[token]
        for j in range(n):
            row[j] = centres[np.uint32(contexts[j]) << np.uint32(8) | np.uint32(symbols[j])] * scales[j]
        beyond = 0
        for j in range(n):
            beyond += symbols[j] == ESCAPE
        if beyond:
            for j in range(n):
                if symbols[j] == ESCAPE:
                    value = escapes[taken] if taken < len(escapes) else 0
                    row[j] = np.float32(value) * scales[j]
                    taken += 1
    return at, taken

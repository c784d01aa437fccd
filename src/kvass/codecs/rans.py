"""Static interleaved rANS: 32-bit states, 16-bit renormalisation, 12-bit probabilities, 64 lanes.

Symbol i belongs to lane i % 64 and is coded with the table that its context names. A stream is a run of
16-bit words: first the states, low half first, then what the lanes take up in the order of the symbols. The
states cost 256 bytes: one stream should go over all layers of a chunk.
Every symbol costs one look-up in a table of 4,096 slots (16 kB): the tables that a run of symbols changes
between should stay within the L2 cache (64 of them are 1 MB), and one that is used for long within L1.
"""

import numpy as np
import numpy.typing as npt

from kvass.codecs import rans_lanes
from kvass.codecs.kernel import kernel

UInt8 = npt.NDArray[np.uint8]
UInt16 = npt.NDArray[np.uint16]
UInt32 = npt.NDArray[np.uint32]

LANES = rans_lanes.LANES
BITS = 12
TOTAL = 1 << BITS
"""What the frequencies of a table sum up to."""

STATE_WORDS = 2 * LANES
PADDING = LANES
"""Words behind a stream that `decode` may read, whatever they are."""

_LOWEST = np.uint32(1 << 16)
_HALF = np.uint32(16)
_LOW_HALF = np.uint32(0xFFFF)
_MORE = np.uint32(1 << 16)
"""Marks a state that gives a word."""


def frequencies(weights: npt.NDArray[np.int64]) -> UInt16:
    """Frequencies of tables `[tables, symbols]` (256 symbols at most): each at least 1, `TOTAL` together.

    `weights`: how often each symbol is expected, in any unit, below 2**48. Integer arithmetic alone.
    """
    symbols = weights.shape[1]
    total = np.maximum(weights.sum(axis=1, keepdims=True), 1)
    found = 1 + weights * (TOTAL - symbols) // total
    rows = np.arange(len(found))
    found[rows, found.argmax(axis=1)] += TOTAL - found.sum(axis=1)
    return np.asarray(found, np.uint16)


def decoding_tables(frequencies: UInt16) -> UInt32:
    """`[tables * TOTAL]`: of each slot its symbol (bits 24 to 31), frequency - 1 (12 to 23), and how far
    behind the symbol's first slot it lies (0 to 11).

    Raises ValueError for frequencies that do not sum up to `TOTAL`.
    """
    _check(frequencies)
    tables, symbols = frequencies.shape
    flat = frequencies.reshape(-1).astype(np.uint32)
    symbol = np.repeat(np.tile(np.arange(symbols, dtype=np.uint32), tables), flat)
    first = np.repeat(_starts(frequencies).reshape(-1), flat)
    behind = np.tile(np.arange(TOTAL, dtype=np.uint32), tables) - first
    less = np.repeat(flat, flat) - 1
    return np.asarray(symbol << 24 | less << 12 | behind, np.uint32)


def coding_tables(frequencies: UInt16) -> UInt32:
    """`[tables, symbols]`: of each symbol its first slot (bits 16 to 31) and frequency (0 to 15).

    Raises ValueError for frequencies that do not sum up to `TOTAL`.
    """
    _check(frequencies)
    return (_starts(frequencies) << np.uint32(16)) | frequencies.astype(np.uint32)


def _starts(frequencies: UInt16) -> UInt32:
    wide = frequencies.astype(np.uint32)
    return (np.cumsum(wide, axis=1, dtype=np.uint32) - wide).astype(np.uint32)


def _check(frequencies: UInt16) -> None:
    if frequencies.ndim != 2 or frequencies.shape[1] > 256 or not frequencies.all():
        raise ValueError("frequencies must be [tables, symbols], 256 symbols at most, each at least 1")
    if (frequencies.sum(axis=1, dtype=np.int64) != TOTAL).any():
        raise ValueError(f"the frequencies of each table must sum up to {TOTAL}")


def fresh() -> UInt32:
    """The states from which an encoder starts, and at which a decoder ends."""
    return np.full(LANES, _LOWEST, np.uint32)


@kernel
def encode_run(
    tables: UInt32, contexts: UInt8, symbols: UInt8, words: UInt16, at: int, states: UInt32
) -> int:
    """Write a run of a stream, `symbols`, before `words[at:]`; returns where it begins.

    The last symbols are coded first: a stream's runs from the last to the first, with `states` `fresh` at the
    beginning and `finish` at the end. There is a multiple of 64 symbols; symbol i is coded with row
    `contexts[i]` of `coding_tables`. At most as many words are written; `words` needs one more before them.
    """
    flat, row = tables.reshape(-1), np.uint32(tables.shape[1])
    codes, out = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
    for first in range(len(symbols) - LANES, -1, -LANES):
        some, kinds = symbols[first : first + LANES], contexts[first : first + LANES]
        for lane in range(LANES):  # loops that read and write few arrays become vector instructions
            codes[lane] = flat[np.uint32(kinds[lane]) * row + np.uint32(some[lane])]
        for lane in range(LANES):
            frequency, state = np.uint32(codes[lane] & _LOW_HALF), states[lane]
            full = np.uint32(state >> np.uint32(20)) >= frequency
            out[lane] = np.uint32(state & _LOW_HALF) | (_MORE if full else np.uint32(0))
            state = np.uint32(state >> _HALF) if full else state
            # exact: it is below 2 ** 20, and no multiple of a frequency is nearer to it than float64 tells
            quotient = np.uint32(np.float64(state) / np.float64(frequency))
            rest = np.uint32(state - np.uint32(quotient * frequency))
            states[lane] = np.uint32(np.uint32(quotient << np.uint32(BITS)) + rest + (codes[lane] >> _HALF))
        for lane in range(LANES - 1, -1, -1):
            words[at - 1] = np.uint16(out[lane])
            at -= out[lane] >> _HALF
    return at


@kernel
def finish(words: UInt16, at: int, states: UInt32) -> int:
    """Write the states, `STATE_WORDS` words, before `words[at:]`; returns where the stream begins."""
    at -= STATE_WORDS
    for lane in range(LANES):
        words[at + 2 * lane] = np.uint16(states[lane] & _LOW_HALF)
        words[at + 2 * lane + 1] = np.uint16(states[lane] >> _HALF)
    return at


@kernel
def begin(words: UInt16, at: int, states: UInt32) -> int:
    """Read the states of the stream at `at` (`STATE_WORDS` words there); returns where it goes on."""
    for lane in range(LANES):
        states[lane] = np.uint32(words[at + 2 * lane]) | (np.uint32(words[at + 2 * lane + 1]) << _HALF)
    return at + STATE_WORDS


@kernel
def ended(states: UInt32) -> bool:
    """Whether the lanes are where the encoder began: a sound stream was decoded to its end."""
    return bool(np.all(states == _LOWEST))


@kernel
def decode(
    tables: UInt32, contexts: UInt8, words: UInt16, at: int, states: UInt32, symbols: UInt8, count: int
) -> int:
    """Decode the next `count` symbols, a multiple of 64, into `symbols`; returns where the stream goes on.

    Symbol i belongs to table `contexts[i]` of `decoding_tables`: every context must be less than their
    number. `words` ends with `PADDING`; a stream that would read behind it reads that, and goes on counting:
    afterwards `ended` is false, or the position is not the stream's end.
    """
    last = len(words) - PADDING
    for i in range(0, count, LANES):
        at += rans_lanes.turn(tables, contexts, words, states, symbols, i, min(at, last))
    return at

"""Winnowed fingerprints of token ids: by them a passage that was read before is found wherever it stands.

Schleimer, Wilkerson, Aiken: Winnowing (SIGMOD 2003), over tokens in place of characters. Of any `SHORTEST`
consecutive tokens at least one fingerprint is kept, and which one depends on these tokens alone: two texts
that have as many in common have it in common too. About one token in 17 gets one.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.chunks import Tokens

GRAM: Final = 32
"""Tokens that a fingerprint is of."""

SHORTEST: Final = 64
"""Every run of so many tokens that two texts share is seen."""

_WINDOW = SHORTEST - GRAM + 1
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

UInt64 = npt.NDArray[np.uint64]


class Fingerprints(NamedTuple):
    """`places` of the first token of each gram, rising, and its `values`, 64 bits each."""

    places: npt.NDArray[np.int64]
    values: UInt64


def fingerprints(tokens: Tokens) -> Fingerprints:
    """Those of a text; none of one that is shorter than a gram. Takes time and memory in proportion to it.

    Values are no cryptographic hashes: whoever finds equal ones compares the tokens.
    """
    values = _grams(tokens)
    return _kept(values, _chosen(values), -1)


def fingerprints_of_parts(tokens: Tokens, starts: Sequence[int]) -> list[Fingerprints]:
    """Those of a text's parts, which begin at `starts` (rising) and end where the next one does, or the text.

    A part has those that `SHORTEST` tokens which end in it are the first to need: no more than as many tokens
    before it have a say, and nothing behind it. Places are relative to the part, less than 0 where a gram
    begins before it. Together parts have what the text has.
    """
    values = _grams(tokens)
    chosen = _chosen(values) if tokens.size >= SHORTEST else np.empty(0, np.int64)
    found = []
    for start, stop in pairwise([*starts, tokens.size]):
        first, end = (max(0, at - SHORTEST + 1) for at in (start, stop))
        kept = _kept(values, chosen[first:end], int(chosen[first - 1]) if 0 < first < end else -1)
        found.append(kept._replace(places=kept.places - start))
    return found


def _chosen(values: UInt64) -> npt.NDArray[np.int64]:
    """For each window the place of its least gram, the first of equal ones; never falling."""
    if not values.size:
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(values, min(_WINDOW, values.size))
    chosen: npt.NDArray[np.int64] = np.arange(len(windows)) + windows.argmin(axis=1)
    return chosen


def _kept(values: UInt64, chosen: npt.NDArray[np.int64], before: int) -> Fingerprints:
    """Each place behind `before` once; where tokens repeat, all grams are alike, and one of a window's
    length is enough."""
    places = chosen[np.diff(chosen, prepend=before) > 0]
    again = (values[places[1:]] == values[places[:-1]]) & (np.diff(places) < _WINDOW)
    if again.any():
        chain = np.concatenate([[0], np.cumsum(~again)])
        first = places[np.concatenate([[True], ~again])]
        places = places[(places - first[chain]) % _WINDOW == 0]
    return Fingerprints(places, values[places])


def _grams(tokens: Tokens) -> UInt64:
    """A value for each gram `[n - GRAM + 1]`: a polynomial modulo 2**64 of the mixed ids, mixed again."""
    count = tokens.size - GRAM + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    down = _powers(_INVERSE, tokens.size)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(tokens.astype(np.uint64)) * down)])
    return _mixed((sums[GRAM:] - sums[:-GRAM]) * _powers(_BASE, count))


def _powers(base: int, count: int) -> UInt64:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


def _mixed(values: UInt64) -> UInt64:
    """Every bit of a value has a say in every bit of the result (the finish of splitmix64)."""
    values = (values + np.uint64(_BASE)) * _FIRST
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))

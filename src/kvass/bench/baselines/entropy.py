"""What symbols cost under an arithmetic code whose tables were profiled beforehand."""

import numpy as np
import numpy.typing as npt

from kvass.bench.baselines.base import Float32, Float64

Int64 = npt.NDArray[np.int64]

LIMIT = 127
"""Symbols from `-LIMIT` to `LIMIT` are in the tables; others are an escape and `ESCAPE_BITS` bits."""
ALPHABET = 2 * LIMIT + 2
ESCAPE_BITS = 16
_PRIOR = 256.0


def counts(symbols: Float32) -> Int64:
    """How often each symbol occurs in each channel: of whole numbers `[tokens, channels]`, `[channels,
    ALPHABET]`, symbol `-LIMIT` first and the escape last."""
    width = symbols.shape[1]
    places = np.where(np.abs(symbols) <= LIMIT, symbols + LIMIT, ALPHABET - 1).astype(np.int64)
    places += np.arange(width) * ALPHABET
    return np.bincount(places.ravel(), minlength=width * ALPHABET).reshape(width, ALPHABET)


def costs(profiled: Int64) -> Float64:
    """Bits that each symbol costs, `[channels, ALPHABET]`, under tables made of these counts.

    What a channel has not shown is estimated from all channels together, which weigh as much as 256 of its
    own symbols; nothing has probability zero.
    """
    together = profiled.sum(0) + 1 / ALPHABET
    blended = profiled + _PRIOR * together / together.sum()
    bits = -np.log2(blended / blended.sum(1, keepdims=True))
    bits[:, -1] += ESCAPE_BITS
    return np.asarray(bits, np.float64)


def cross_entropy(found: Int64, table: Float64) -> float:
    """Bits that symbols with these counts cost under tables of these costs."""
    return float((found * table).sum())

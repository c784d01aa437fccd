"""Token ids and how they are cut into chunks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvass.errors import InputError

Tokens = npt.NDArray[np.int32]

MAX_TOKEN_ID = (1 << 24) - 2
"""Ids are packed into three bytes in the index, with one value kept for 'no token'."""


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as a little-endian int32 array `[n]` of its own: the caller may reuse what it gave.

    Raises InputError where an id is not an integer in 0..MAX_TOKEN_ID or the sequence is not flat.
    """
    try:
        wide = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise InputError(f"token ids must be a flat sequence of integers: {error}") from error
    if wide.ndim != 1:
        raise InputError(f"token ids must be a flat sequence, not of shape {wide.shape}")
    if wide.size and wide.dtype.kind not in "iu":
        raise InputError(f"token ids must be integers, not {wide.dtype}")
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) > MAX_TOKEN_ID):
        raise InputError(f"token ids must lie in 0..{MAX_TOKEN_ID}; got {wide.min()}..{wide.max()}")
    return np.array(wide, dtype="<i4", order="C")


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences have in common from their start."""
    shorter = min(one.size, other.size)
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if differs.size else shorter

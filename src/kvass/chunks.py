"""Token ids and how they are cut into chunks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvass.errors import InputError

Tokens = npt.NDArray[np.int32]

MAX_TOKEN_ID = (1 << 24) - 2
"""Ids are packed into three bytes in the index, with one value kept for 'no token'."""


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as a contiguous little-endian int32 array `[n]`.

    Raises InputError where an id is not an integer in 0..MAX_TOKEN_ID or the array is not flat.
    """
    if type(tokens) is np.ndarray and tokens.dtype == np.int32:
        array = np.ascontiguousarray(tokens)
    else:
        try:
            wide = np.asarray(tokens)
        except (ValueError, OverflowError) as error:
            raise InputError(f"token ids must be a flat sequence of integers: {error}") from error
        if wide.size and wide.dtype.kind not in "iu":
            raise InputError(f"token ids must be integers, not {wide.dtype}")
        if wide.size and (wide.min() < 0 or wide.max() > MAX_TOKEN_ID):
            raise InputError(f"token ids must lie in 0..{MAX_TOKEN_ID}; got {wide.min()}..{wide.max()}")
        array = np.ascontiguousarray(wide, dtype="<i4")
    if array.ndim != 1:
        raise InputError(f"token ids must be a flat sequence, not of shape {array.shape}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > MAX_TOKEN_ID):
        raise InputError(f"token ids must lie in 0..{MAX_TOKEN_ID}; got {array.min()}..{array.max()}")
    return array


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences have in common from their start."""
    shorter = min(one.size, other.size)
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if differs.size else shorter

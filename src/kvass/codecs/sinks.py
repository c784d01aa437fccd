"""What lossy codecs have in common: the first tokens, kept as they are, and what they are given."""

from kvass.codecs.base import Chunk
from kvass.container import Array
from kvass.errors import InputError
from kvass.spec import numpy_dtype

SINKS = 4
"""Tokens at a sequence's start that are stored as they are: attention ends up there, and nothing else counts
as much."""


def sinks(chunk: Chunk) -> int:
    """How many tokens of a chunk are of those."""
    return max(0, min(SINKS - chunk.start, chunk.tokens))


def check_fits(name: str, array: Array, chunk: Chunk) -> None:
    """Raises InputError where an array to be encoded is not that of its chunk."""
    if array.shape != chunk.group.shape(name, chunk.tokens) or array.dtype != numpy_dtype(chunk.group.dtype):
        raise InputError(f"array {name!r} is {array.dtype} {array.shape}, which its chunk is not")

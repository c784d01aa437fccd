"""A prompt of which parts were read elsewhere, as selectors see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvass.errors import InputError

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prompt:
    """`tokens` of the whole prompt; `exact`: how many of its first need no repair; `segments`: places
    `(start, stop)` of what was read elsewhere, in order, apart from each other, behind the exact prefix.

    What lies in none of them is new: it is computed in any case. Raises InputError where places do not fit,
    or no token at the end is new (there is nothing to choose by).
    """

    tokens: Sequence[int]
    exact: int
    segments: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        end = self.exact
        for start, stop in self.segments:
            if not end <= start < stop:
                raise InputError(f"a segment at {start}..{stop} does not lie behind {end}, where one ended")
            end = stop
        if end >= len(self.tokens):
            raise InputError("a prompt must end with a token that is new")

    @cached_property
    def reused(self) -> Positions:
        """Positions of all tokens in segments, rising."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(*one) for one in self.segments)])

    @cached_property
    def depth(self) -> Positions:
        """Of each of the `reused`, how many tokens of its segment come before it."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(b - a) for a, b in self.segments)])

    @cached_property
    def new(self) -> Positions:
        """Positions of all tokens that are computed in any case."""
        return np.setdiff1d(np.arange(self.exact, len(self.tokens)), self.reused)

    @cached_property
    def question(self) -> Positions:
        """Positions of the new tokens at the end, behind the last segment."""
        last = self.segments[-1][1] if self.segments else self.exact
        return np.arange(last, len(self.tokens))

    def rows(self, positions: Positions) -> list[int]:
        """The tokens at these positions."""
        return [int(self.tokens[at]) for at in positions]

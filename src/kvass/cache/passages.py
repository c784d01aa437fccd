"""Passages of a prompt in stored chunks: found by fingerprints, confirmed by tokens, joined over chunks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvass.chunks import Tokens
from kvass.fingerprints import SHORTEST, fingerprints
from kvass.tiers.base import Mark

_LOOKS: Final = 8
"""Chunks compared for each fingerprint of a prompt, at most: texts that repeat themselves fit everywhere."""


class Passage(NamedTuple):
    """Tokens `start` to `stop` of a prompt are those of a stored sequence from its token `place` on.

    `address`: the chunk of that sequence in which they end, or one behind it; what stands before it there
    follows from it.
    """

    start: int
    stop: int
    place: int
    address: bytes

    @property
    def tokens(self) -> int:
        """How many they are."""
        return self.stop - self.start

    @property
    def end(self) -> int:
        """How many tokens of the stored sequence they need."""
        return self.place + self.tokens


class Held(NamedTuple):
    """A stored chunk as its header has it: tokens, the place of the first of them, the chunk before it."""

    tokens: Tokens
    position: int
    parent: bytes | None


_Run = tuple[int, int]
_Stands = tuple[bytes, int]
"""A chunk, and where in the prompt its first token would stand; before its start, too."""


def passages(
    prompt: Tokens,
    start: int,
    seen: Callable[[Sequence[int]], Iterable[Mark]],
    held: Callable[[bytes], Held | None],
    child: Callable[[bytes, Tokens], bytes | None],
) -> list[Passage]:
    """Passages of at least `SHORTEST` tokens of `prompt[start:]`, apart from each other, in order; of two
    that overlap the longer one first, the other cut.

    `seen`: where fingerprints of these values were stored; `held`: a chunk, None where there is none;
    `child`: the one behind a chunk that agrees longest with some tokens. Each candidate is compared token by
    token, and so are the chunks before and behind it as far as they agree.
    """
    found = fingerprints(prompt[start:])
    places: dict[int, list[int]] = {}
    for place, value in zip(found.places.tolist(), found.values.tolist(), strict=True):
        places.setdefault(value, []).append(start + place)
    search = _Search(prompt, start, held, child, _LOOKS * found.places.size)
    for mark in seen(list(places)):
        for at in reversed(places.get(mark.value, [])):  # the last first: it has the most before it
            search.back((mark.address, at - mark.place))
    search.forth()
    return _apart(search.joined())


class _Search:
    """Chunks compared with a prompt: `agree` where each of them would stand."""

    def __init__(
        self,
        prompt: Tokens,
        start: int,
        held: Callable[[bytes], Held | None],
        child: Callable[[bytes, Tokens], bytes | None],
        looks: int,
    ):
        self._prompt, self._start, self._held, self._child, self._looks = prompt, start, held, child, looks
        self._agree: dict[_Stands, list[_Run]] = {}

    def _look(self, one: _Stands) -> tuple[Held, list[_Run]] | None:
        """A chunk that agrees somewhere, and where: long enough, or up to one of its ends."""
        chunk = self._held(one[0])
        if chunk is None:
            return None
        if one not in self._agree:
            self._agree[one] = self._compared(one[1], chunk.tokens)
        return (chunk, self._agree[one]) if self._agree[one] else None

    def _compared(self, stands: int, tokens: Tokens) -> list[_Run]:
        behind = stands + tokens.size
        first, stop = max(self._start, stands), min(self._prompt.size, behind)
        if first >= stop:
            return []
        same = self._prompt[first:stop] == tokens[first - stands : stop - stands]
        edges = (np.flatnonzero(np.diff(same, prepend=False, append=False)) + first).tolist()
        runs = zip(edges[::2], edges[1::2], strict=True)
        return [run for run in runs if run[1] - run[0] >= SHORTEST or run[0] == stands or run[1] == behind]

    def back(self, one: _Stands) -> None:
        """Compare a chunk, and those before it for as long as they agree to where the next begins."""
        while one not in self._agree and len(self._agree) < self._looks:
            found = self._look(one)
            if found is None or found[0].parent is None or found[1][0][0] != one[1]:
                return
            above = self._held(found[0].parent)
            if above is None:
                return
            one = found[0].parent, one[1] - above.tokens.size

    def forth(self) -> None:
        """Compare what comes behind chunks that agree to their end, where no fingerprint led to it."""
        went_on = set()
        for one in self._agree:
            found = self._look(one)
            if found and found[0].parent is not None and found[1][0][0] == one[1]:
                went_on.add((found[0].parent, one[1]))
        for first in list(self._agree):
            one = first
            while len(self._agree) < self._looks and (found := self._look(one)):
                size = found[0].tokens.size
                end = one[1] + size
                if found[1][-1][1] != end or end >= self._prompt.size or (one[0], end) in went_on:
                    break
                went_on.add((one[0], end))
                behind = self._child(one[0], self._prompt[end : end + size])
                if behind is None:
                    break
                one = behind, end

    def joined(self) -> list[Passage]:
        """Runs joined over the chunks of each sequence, from its first chunk on."""
        found: dict[Passage, None] = {}
        ending: dict[_Stands, Passage] = {}  # by the chunk that they reach the end of, and where that is
        for one in sorted(self._agree, key=lambda one: one[1]):
            looked = self._look(one)
            if looked is None:
                continue
            (address, stands), (chunk, runs) = one, looked
            for first, stop in runs:
                above = ending.get((chunk.parent, first)) if chunk.parent and first == stands else None
                begin = above.start if above else first
                run = Passage(begin, stop, chunk.position - stands + begin, address)
                if above:
                    found.pop(above, None)
                found[run] = None
                if stop == stands + chunk.tokens.size:
                    ending[address, stop] = run
        return [run for run in found if run.tokens >= SHORTEST]


def _apart(runs: list[Passage]) -> list[Passage]:
    if not runs:
        return []
    taken = np.zeros(max(run.stop for run in runs), bool)
    kept: list[Passage] = []
    for run in sorted(runs, key=lambda run: (-run.tokens, run.start)):
        free = np.flatnonzero(np.diff(taken[run.start : run.stop], prepend=True, append=True))
        # free[::2]: where a free stretch begins, free[1::2]: where it ends
        for first, stop in zip(free[::2].tolist(), free[1::2].tolist(), strict=True):
            if stop - first >= SHORTEST:
                kept.append(Passage(run.start + first, run.start + stop, run.place + first, run.address))
                taken[run.start + first : run.start + stop] = True
    return sorted(kept, key=lambda run: run.start)

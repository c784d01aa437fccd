"""Passages of a prompt that stand in texts read before: found by fingerprints, confirmed by tokens."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvass.chunks import Tokens, common_prefix
from kvass.reuse.fingerprints import SHORTEST, fingerprints

Text = TypeVar("Text", bound=Hashable)


class Seen(NamedTuple, Generic[Text]):
    """A fingerprint's value stands at `place` of a text that was read."""

    value: int
    text: Text
    place: int


class Passage(NamedTuple, Generic[Text]):
    """Tokens `start` to `stop` of a prompt are those of a text from `place` on."""

    start: int
    stop: int
    text: Text
    place: int

    @property
    def tokens(self) -> int:
        """How many they are."""
        return self.stop - self.start


def passages(
    prompt: Tokens, seen: Callable[[Sequence[int]], Iterable[Seen[Text]]],
    tokens_of: Callable[[Text], Tokens], shortest: int = SHORTEST,
) -> list[Passage[Text]]:  # fmt: skip
    """Passages of at least `shortest` tokens, apart from each other, in order; of two that overlap the longer
    one first, the other cut.

    `seen`: where fingerprints of these values were read; bounded by whoever keeps them. `tokens_of` a text:
    empty where it is gone. Each candidate is compared token by token, to both sides as far as they agree.
    """
    found = fingerprints(prompt)
    places: dict[int, list[int]] = {}
    for place, value in zip(found.places.tolist(), found.values.tolist(), strict=True):
        places.setdefault(value, []).append(place)
    texts: dict[Text, Tokens] = {}
    runs: dict[tuple[Text, int], list[Passage[Text]]] = {}
    for one in seen(list(places)):
        for at in places.get(one.value, ()):
            known = runs.setdefault((one.text, one.place - at), [])
            if any(run.start <= at < run.stop for run in known):
                continue
            if one.text not in texts:
                texts[one.text] = tokens_of(one.text)
            run = _around(prompt, at, one, texts[one.text])
            if run.tokens >= shortest:
                known.append(run)
    return _apart([run for known in runs.values() for run in known], shortest)


def _around(prompt: Tokens, at: int, one: Seen[Text], text: Tokens) -> Passage[Text]:
    """The longest run around a place in which prompt and text agree; empty where they do not agree there."""
    if not 0 <= one.place <= text.size:
        return Passage(at, at, one.text, one.place)
    after = common_prefix(prompt[at:], text[one.place :])
    before = common_prefix(prompt[:at][::-1], text[: one.place][::-1]) if after else 0
    return Passage(at - before, at + after, one.text, one.place - before)


def _apart(runs: list[Passage[Text]], shortest: int) -> list[Passage[Text]]:
    if not runs:
        return []
    end = max(run.stop for run in runs)
    taken = np.zeros(end, bool)
    kept: list[Passage[Text]] = []
    for run in sorted(runs, key=lambda run: (-run.tokens, run.start)):
        free = np.flatnonzero(
            np.diff(np.concatenate([[True], taken[run.start : run.stop], [True]]).astype(int))
        )
        # free[::2]: where a free stretch begins, free[1::2]: where it ends
        for first, stop in zip(free[::2].tolist(), free[1::2].tolist(), strict=True):
            if stop - first >= shortest:
                kept.append(Passage(run.start + first, run.start + stop, run.text, run.place + first))
                taken[run.start + first : run.start + stop] = True
    return sorted(kept, key=lambda run: run.start)

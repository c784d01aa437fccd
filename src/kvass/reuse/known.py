"""Texts that were read before, in memory: what an index of passages does, and the least there is to it."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvass.chunks import Tokens
from kvass.reuse.fingerprints import fingerprints
from kvass.reuse.passages import Passage, Seen, passages

MOST_PLACES: Final = 4
"""Of a very common passage, no more places are kept than that, the latest ones."""

_NOTHING = np.empty(0, "<i4")


class Known:
    """Texts under names, the oldest forgotten where more than `capacity` tokens would be held.

    Adding and forgetting take time in proportion to the text, finding to the prompt and to `MOST_PLACES`;
    neither depends on how many texts there are. Not for several threads at once.
    """

    def __init__(self, capacity: int = 1 << 24):
        self._capacity = capacity
        self._texts: OrderedDict[bytes, Tokens] = OrderedDict()
        self._rows: dict[int, deque[Seen[bytes]]] = {}
        self.tokens = 0
        self.rows = 0

    def add(self, name: bytes, text: Tokens) -> None:
        """Remember a text, in place of what had its name."""
        self.forget(name)
        found = fingerprints(text)
        for place, value in zip(found.places.tolist(), found.values.tolist(), strict=True):
            rows = self._rows.setdefault(value, deque(maxlen=MOST_PLACES))
            self.rows += len(rows) < MOST_PLACES
            rows.append(Seen(value, name, place))
        self._texts[name] = text
        self.tokens += text.size
        while self.tokens > self._capacity:
            self.forget(next(iter(self._texts)))

    def forget(self, name: bytes) -> None:
        """Forget a text, if it is there."""
        text = self._texts.pop(name, None)
        if text is None:
            return
        self.tokens -= text.size
        for value in set(fingerprints(text).values.tolist()):
            rows = self._rows.get(value, deque())
            kept = [row for row in rows if row.text != name]
            self.rows -= len(rows) - len(kept)
            if kept:
                self._rows[value] = deque(kept, maxlen=MOST_PLACES)
            else:
                self._rows.pop(value, None)

    def find(self, prompt: Tokens) -> list[Passage[bytes]]:
        """Passages of a prompt that stand in a text; see `kvass.reuse.passages.passages`."""
        return passages(prompt, self._seen, lambda name: self._texts.get(name, _NOTHING))

    def _seen(self, values: Sequence[int]) -> Iterator[Seen[bytes]]:
        for value in values:
            yield from self._rows.get(value, ())

"""KV of passages out of a cache: read as what it was stored as, the rest of an exact prefix."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from kvass.cache import KVCache, Passage, TokenIds
from kvass.cache.layers import Layers
from kvass.chunks import as_tokens
from kvass.container import Array
from kvass.keys import Namespace
from kvass.spec import KVSpec


class Stored(NamedTuple):
    """A passage out of a cache, see `kvass.reuse.arriving.Arriving`: tokens `read_at` on of what `layers`
    reads."""

    start: int
    read_at: int
    tokens: int
    layers: Layers

    @property
    def stop(self) -> int:
        """Where the prompt goes on behind it."""
        return self.start + self.tokens

    def rows(self, layer: int, name: str) -> Array:
        """`k` or `v` of one of the model's layers, `[tokens, heads, dim]`. Raises KvassError or OSError."""
        return self.layers.rows(layer, name, self.read_at, self.read_at + self.tokens)


@contextlib.contextmanager
def segments(
    cache: KVCache, namespace: Namespace, tokens: TokenIds, exact: int, seconds: float | None = None,
    within: Sequence[tuple[int, int]] = (),
) -> Iterator[list[Stored]]:  # fmt: skip
    """The passages of a prompt behind its first `exact` tokens that this machine's tiers hold, open to be
    read while this lasts, apart from each other, in order; the last token of the prompt stays new. Those that
    are longer than a window are given in pieces.

    `within`: where any of these spans are given, only what lies inside of them. Left out is what cannot be
    opened within so many seconds, or lies in an engine's own layout. Never raises because of a tier. Raises
    InputError for unusable tokens.
    """
    until = None if seconds is None else time.monotonic() + seconds
    prompt = as_tokens(tokens)
    found = cache.passages(prompt[:-1], namespace, start=exact)
    if within:
        found = [cut for one in found for span in within if (cut := _inside(one, *span)) is not None]
    found = [piece for one in found for piece in _pieces(one, namespace.spec)]
    wanted = sorted(found, key=lambda one: -one.tokens) if namespace.layout == "canonical" else []
    opened: list[Stored] = []
    with ExitStack() as stack:
        for passage, match in zip(wanted, cache.donors(wanted, namespace), strict=True):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            place, end = passage.place, passage.end
            if match is None or not np.array_equal(
                match.tokens[place:end], prompt[passage.start : passage.stop]
            ):
                continue
            layers = stack.enter_context(cache.layers(match, start=place, seconds=left))
            if layers is not None:
                opened.append(Stored(passage.start, place, passage.tokens, layers))
        yield sorted(opened, key=lambda one: one.start)


def _inside(passage: Passage, start: int, stop: int) -> Passage | None:
    """What of a passage lies between two places of the prompt."""
    first, last = max(passage.start, start), min(passage.stop, stop)
    if first >= last:
        return None
    return passage._replace(start=first, stop=last, place=passage.place + first - passage.start)


def _pieces(passage: Passage, spec: KVSpec) -> Iterator[Passage]:
    """A passage cut so that, at the end of each piece, every window still sees its first token: a load gives
    what the last token needs."""
    while passage.tokens:
        first = max(group.first_needed(passage.end) for group in spec.groups)
        size = passage.end - max(first, passage.place)  # what the windows see, the same at every end
        piece = passage._replace(stop=passage.start + size)
        if size <= 0:
            return
        yield piece
        passage = passage._replace(start=piece.stop, place=piece.end)


def joined(found: Sequence[Stored]) -> list[tuple[int, int]]:
    """Where segments lie, those that stood together in what was read as one."""
    places: list[tuple[int, int]] = []
    last: Stored | None = None
    for one in found:
        if last is not None and (one.start, one.read_at) == (last.stop, last.read_at + last.tokens):
            places[-1] = places[-1][0], one.stop
        else:
            places.append((one.start, one.stop))
        last = one
    return places

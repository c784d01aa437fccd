"""KV of passages out of a cache: loaded as what it was stored as, the rest of an exact prefix."""

import time

import numpy as np

from kvass.cache import KVCache, Match, Passage, Pool, TokenIds
from kvass.chunks import Tokens, as_tokens
from kvass.keys import Namespace
from kvass.reuse.assembly import Segment


def segments(
    cache: KVCache, namespace: Namespace, tokens: TokenIds, exact: int, seconds: float | None = None
) -> list[Segment]:
    """The passages of a prompt behind its first `exact` tokens that this machine's tiers hold, with their KV,
    apart from each other, in order; the last token of the prompt stays new. The longest are loaded first.

    Left out is what cannot be had whole within so many seconds, of which a window has passed over the
    beginning, or that lies in an engine's own layout.

    Never raises because of a tier. Raises InputError for unusable tokens.
    """
    until = None if seconds is None else time.monotonic() + seconds
    prompt = as_tokens(tokens)
    found = cache.passages(prompt[:-1], namespace, start=exact)
    wanted = [one for one in sorted(found, key=lambda one: -one.tokens) if _movable(one, namespace)]
    loaded = []
    for passage, match in zip(wanted, cache.donors(wanted, namespace), strict=True):
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            break
        if match is not None:
            loaded.append(_segment(cache, prompt, passage, match, left))
    return sorted((one for one in loaded if one is not None), key=lambda one: one.start)


def _movable(passage: Passage, namespace: Namespace) -> bool:
    """Whether its KV is laid out as what moves it expects, and every window still sees its first token."""
    first = max(group.first_needed(passage.end) for group in namespace.spec.groups)
    return namespace.layout == "canonical" and first <= passage.place


def _segment(
    cache: KVCache, prompt: Tokens, passage: Passage, match: Match, seconds: float | None
) -> Segment | None:
    place, end, spec = passage.place, passage.end, match.namespace.spec
    if not np.array_equal(match.tokens[place:end], prompt[passage.start : passage.stop]):
        return None
    start = place // match.chunk_tokens * match.chunk_tokens
    pool = Pool(spec, end - start, start)
    if cache.load(match, pool, seconds=seconds, start=start).tokens < end:
        return None
    kv = [pool.arrays(group, place, end) for group in range(len(spec.groups))]
    return Segment(passage.start, place, kv)

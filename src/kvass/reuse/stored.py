"""KV of segments out of a cache, where each was stored as what it is: the rest of an exact prefix."""

from collections.abc import Sequence

from kvass.cache import KVCache, Pool
from kvass.chunks import Tokens
from kvass.keys import Namespace
from kvass.reuse.assembly import Segment


def stored(
    cache: KVCache,
    namespace: Namespace,
    before: Tokens,
    tokens: Tokens,
    start: int,
    seconds: float | None = None,
) -> Segment | None:
    """A segment that was read behind `before`, to stand at `start` of a prompt; None where not all of it can
    be had within so many seconds, or a window has passed over its beginning."""
    whole = [*before.tolist(), *tokens.tolist()]
    windows = [group.window for group in namespace.spec.groups if group.window is not None]
    if windows and min(windows) < tokens.size:
        return None
    match = cache.lookup(whole, namespace)
    if match.length < len(whole):
        return None
    pool = Pool(namespace.spec, len(whole))
    if cache.load(match, pool, seconds=seconds).tokens < len(whole):
        return None
    groups = range(len(namespace.spec.groups))
    return Segment(start, before.size, [pool.arrays(group, before.size, len(whole)) for group in groups])


def segments(
    cache: KVCache, namespaces: Sequence[Namespace], tokens: Tokens, exact: int, seconds: float | None = None
) -> list[Segment]:
    """Passages of a prompt behind its exact prefix that were read elsewhere."""
    return []

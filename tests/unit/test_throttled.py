"""The benchmark's slow tier: the same bytes, in the time that was said."""

import time

from fixtures.world import CHUNK, blank, namespace, prompt, same, store
from kvass.bench.throttled import ThrottledTier
from kvass.cache import KVCache


def test_reading_takes_as_long_as_was_said(shm) -> None:
    tier, tokens, space = (
        ThrottledTier(shm / "tier", 16 << 20, name="slow"),
        prompt(1, 8 * CHUNK),
        namespace(),
    )
    with KVCache([tier], chunk_tokens=CHUNK) as cache:
        store(cache, tokens)
        match = cache.lookup(tokens, space)
        size = sum(path.stat().st_size for path in (tier.path / "objects").glob("*/*"))
        tier.bytes_per_second = size / 0.3
        pool, began = blank(space, match.length), time.perf_counter()
        assert cache.load(match, pool).tokens == tokens.size
        assert time.perf_counter() - began >= 0.29
        assert same(pool, tokens, space, tokens.size)

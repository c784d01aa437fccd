"""What `KVCache.explain` shows of the nearest stored text, also where texts part at a chunk's start."""

import numpy as np

from fixtures.world import CHUNK, namespace, prompt, store
from kvass.tiers.base import Tier

MB = 1 << 20
SPACE = namespace()


def parted(tokens: np.ndarray, at: int, step: int = 1) -> np.ndarray:
    """The same text with another token at `at`."""
    other = tokens.copy()
    other[at] += step
    return other


def test_a_difference_at_a_chunks_start_is_shown(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    store(cache, tokens)
    for at in (CHUNK, 3 * CHUNK, 6 * CHUNK):
        found = cache.explain(parted(tokens, at), SPACE, context=4)
        assert (found.hit, found.difference.position) == (at, at)
        assert found.difference.prompt == parted(tokens, at)[at : at + 4].tolist()
        assert found.difference.stored == tokens[at : at + 4].tolist()
        assert f"token {at}" in found.reason


def test_of_several_the_last_used_is_shown(make_cache) -> None:
    cache = make_cache()
    tokens = prompt(1, 64)
    store(cache, tokens)
    newer = parted(tokens, 32, 2)
    store(cache, newer)
    found = cache.explain(parted(tokens, 32), SPACE)
    assert found.difference.stored[0] == newer[32]


def test_the_stored_text_goes_on_over_chunks(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    store(cache, tokens)
    for at in (5, 40, 48):
        found = cache.explain(parted(tokens, at), SPACE, context=1000)
        assert found.difference.stored == tokens[at:].tolist()
        assert found.difference.prompt == parted(tokens, at)[at:].tolist()


def test_other_roots_are_never_shown(make_cache) -> None:
    cache = make_cache()
    tokens = prompt(1, 100)
    store(cache, tokens[:48])
    store(cache, tokens, namespace(tenant="somebody else"))
    found = cache.explain(parted(tokens, 48), SPACE)
    assert (found.hit, found.difference) == (48, None)
    assert "goes on" in found.reason
    assert cache.explain(parted(tokens, 0), SPACE).difference is None


def test_a_tier_that_cannot_be_scanned_only_shortens_the_text(make_cache, monkeypatch) -> None:
    cache = make_cache()
    tokens = prompt(1, 100)
    store(cache, tokens)

    def broken(self: Tier) -> None:
        raise OSError("no")

    monkeypatch.setattr(type(cache.tiers[0]), "scan", broken)
    assert cache.explain(parted(tokens, 48), SPACE).difference is None
    found = cache.explain(parted(tokens, 40), SPACE, context=100)
    assert found.difference.stored == tokens[40:48].tolist()

"""Lookup, load and store: what is stored is found to the token, and comes back bit for bit."""

import numpy as np
import pytest

from fixtures.world import (
    BIG,
    CHUNK,
    SLIDING,
    SPEC,
    WINDOWED,
    blank,
    group,
    hit,
    kv,
    namespace,
    prompt,
    same,
    store,
)
from kvass.cache import KVCache, Pool
from kvass.chunks import MAX_TOKEN_ID
from kvass.errors import InputError
from kvass.keys import address, chain
from kvass.spec import KVSpec
from kvass.tiers.memory import MemoryTier

SPACE = namespace()
SPACES = [SPACE, namespace(BIG), namespace(WINDOWED), namespace(SLIDING)]
BAD_IDS = [[-1], [MAX_TOKEN_ID + 1], [1.5], "text", [[1, 2]], [None], 7]


# -- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES, ids=["full", "big", "full and window", "window"])
@pytest.mark.parametrize("size", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7])
def test_a_text_comes_back_whole(make_cache, space, size: int) -> None:
    cache = make_cache()
    ticket = store(cache, prompt(1, size), space)
    assert ticket.copied
    assert ticket.objects == -(-size // CHUNK) * len(space.spec.groups)
    assert ticket.bytes == sum(path.stat().st_size for path in (cache.tiers[0].path / "objects").glob("*/*"))
    assert hit(cache, prompt(1, size), space) == size
    assert hit(cache, prompt(1, size + 50), space) == size
    assert hit(cache, prompt(2, size + 50), space) == 0


@pytest.mark.parametrize("space", SPACES, ids=["full", "big", "full and window", "window"])
def test_every_shorter_beginning_is_a_hit_to_the_token(make_cache, space) -> None:
    cache = make_cache()
    store(cache, prompt(1, 5 * CHUNK + 5), space)
    for size in range(1, 5 * CHUNK + 6):
        other = np.concatenate([prompt(1, size), prompt(9, 40)])
        assert hit(cache, other, space) >= size
        assert hit(cache, prompt(1, 5 * CHUNK + 5), space, limit=size) == size


def test_an_empty_text_is_no_hit_and_no_store(make_cache) -> None:
    cache = make_cache()
    ticket = store(cache, [])
    assert (ticket.copied, ticket.objects, ticket.bytes) == (True, 0, 0)
    match = cache.lookup([], SPACE)
    assert not match
    assert match.pieces() == []
    assert cache.load(match, Pool(SPEC, 0)).tokens == 0
    assert cache.explain([], SPACE).reason == "everything is stored"


def test_limits_are_kept_to(make_cache) -> None:
    cache = make_cache()
    tokens = prompt(1, 50)
    store(cache, tokens)
    for limit, wanted in [(-3, 0), (0, 0), (1, 1), (49, 49), (50, 50), (51, 50), (1000, 50)]:
        assert cache.lookup(tokens, SPACE, limit=limit).length == wanted


def test_keys_may_be_given(make_cache) -> None:
    cache = make_cache()
    tokens = prompt(1, 70)
    store(cache, tokens)
    keys = chain(SPACE.root(), tokens, CHUNK)
    assert cache.lookup(tokens, SPACE, keys=keys).length == 70
    assert cache.lookup(tokens, SPACE, keys=keys[:2]).length == 2 * CHUNK + CHUNK


def test_keys_of_another_namespace_load_nothing(make_cache) -> None:
    cache = make_cache()
    tokens = prompt(1, 2 * CHUNK)
    theirs = namespace(tenant="somebody else")
    store(cache, tokens, theirs)
    match = cache.lookup(tokens, SPACE, keys=chain(theirs.root(), tokens, CHUNK))
    assert cache.load(match, blank(SPACE, match.length)).tokens == 0


def test_edge_tokens_are_told_apart(make_cache) -> None:
    cache = make_cache()
    for ids in ([0] * 20, [MAX_TOKEN_ID] * 20, [0, MAX_TOKEN_ID] * 10, [255, 256, 65535, 65536] * 5):
        store(cache, ids)
        assert hit(cache, ids) == 20
        assert hit(cache, [*ids[:18], 1]) == 18
    assert hit(cache, [1]) == 0
    assert hit(cache, [MAX_TOKEN_ID - 1]) == 0


@pytest.mark.parametrize("size", [147, 148, 149, 296, 297, 444, 599, 600])
def test_long_chunks_are_hit_to_the_token(make_cache, size: int) -> None:
    cache = make_cache(chunk_tokens=600)
    tokens = prompt(1, size)
    store(cache, tokens)
    for cut in (1, 146, 147, 148, 149, 150, 295, 296, 297, 444, 445, 598, 599):
        if cut < size:
            other = tokens.copy()
            other[cut] ^= 1
            assert hit(cache, other) == cut
    assert hit(cache, tokens) == size


@pytest.mark.parametrize("ids", BAD_IDS)
def test_unusable_tokens_are_input_errors(make_cache, ids) -> None:
    cache = make_cache()
    for call in (
        lambda: cache.lookup(ids, SPACE),
        lambda: cache.store(ids, SPACE, Pool(SPEC, 4)),
        lambda: cache.forget(ids, SPACE),
        lambda: cache.pin(ids, SPACE, 1.0),
        lambda: cache.prefetch(ids, SPACE),
        lambda: cache.explain(ids, SPACE),
        lambda: cache.context(ids, SPACE),
    ):
        with pytest.raises(InputError):
            call()


# -- who may use what -----------------------------------------------------------------------------


def test_nobody_hits_another_namespace(make_cache) -> None:
    cache = make_cache()
    spaces = [
        SPACE,
        namespace(tenant="t"),
        namespace(adapter="a"),
        namespace(weights="x" * 64),
        namespace(numerics="test/none/float32/cpu"),
        namespace(KVSpec(groups=(group(dtype="float16"),))),
        namespace(KVSpec(groups=(group(rope=None),))),
    ]
    tokens = prompt(1, 40)
    for number, space in enumerate(spaces):
        for other in spaces[number:]:
            assert cache.lookup(tokens, other).length == 0
        store(cache, tokens, space)
        for known in spaces[: number + 1]:
            assert hit(cache, tokens, known) == 40


def test_the_models_name_does_not_matter(make_cache) -> None:
    cache = make_cache()
    store(cache, prompt(1, 40))
    assert hit(cache, prompt(1, 40), namespace(model="the same, renamed")) == 40


def test_caches_that_cut_otherwise_share_what_they_can(make_cache) -> None:
    small = make_cache()
    tokens = prompt(1, 100)
    store(small, tokens)
    large = KVCache([small.tiers[0]], chunk_tokens=48)
    assert hit(large, tokens) == CHUNK  # the first small chunk, as a beginning of a large one
    store(large, tokens)
    assert hit(large, tokens) == 100
    assert hit(small, tokens) == 100
    assert hit(small, np.concatenate([tokens[:60], prompt(5, 20)])) == 60
    large._executor.close(5)


# -- stores ---------------------------------------------------------------------------------------


def test_what_is_there_is_not_stored_again(make_cache) -> None:
    cache = make_cache()
    assert store(cache, prompt(1, 100)).objects == 7
    assert store(cache, prompt(1, 100)).objects == 0
    assert store(cache, prompt(1, 90)).objects == 0  # lies within
    assert store(cache, prompt(1, 3 * CHUNK)).objects == 0
    assert store(cache, prompt(1, 105)).objects == 1  # a longer tail, in the old one's stead
    assert cache.stats()["host"].objects == 7
    assert hit(cache, prompt(1, 105)) == 105


def test_a_growing_answer_keeps_one_tail(make_cache) -> None:
    cache = make_cache()
    for size in range(1, 60):
        store(cache, prompt(1, size))
        assert cache.stats()["host"].objects == -(-size // CHUNK)
    assert hit(cache, prompt(1, 59)) == 59


def test_branches_share_their_stem(make_cache) -> None:
    cache = make_cache()
    texts = [np.concatenate([prompt(1, 40), prompt(seed, 30)]) for seed in range(2, 8)]
    for text in texts:
        store(cache, text)
    assert cache.stats()["host"].objects == 2 + 6 * 3
    for text in texts:
        assert hit(cache, text) == 70


def test_the_callers_tokens_may_change_after_a_call(make_cache) -> None:
    cache = make_cache(16 << 20, 16 << 20)
    buffer = prompt(1, 100).copy()
    source = kv(buffer)
    cache.store(buffer, SPACE, source)
    buffer[:] = 7
    cache.flush()
    tokens = prompt(1, 100)
    assert hit(cache, tokens) == 100
    buffer[:] = tokens
    match = cache.lookup(buffer, SPACE)
    buffer[:] = 7
    pool = blank(SPACE, 100)
    assert cache.load(match, pool).tokens == 100
    assert same(pool, tokens, SPACE, 100)
    cache.flush()
    found, bad = cache.verify()
    assert (found, bad) == (14, [])
    cache.tiers[0].delete([address(match.keys[0], 0)])
    assert hit(cache, np.concatenate([tokens[:98], [5, 5, 5]])) == 98  # from the tail, in the lower tier


@pytest.mark.parametrize("harm", ["dtype", "heads", "missing", "extra", "strided", "raises", "short"])
def test_a_source_that_does_not_fit_is_not_stored(make_cache, harm: str) -> None:
    class Unfit:
        def __init__(self, inner: Pool):
            self._inner = inner

        def arrays(self, number: int, start: int, stop: int):
            found = self._inner.arrays(number, start, stop)
            match harm:
                case "dtype":
                    found["k"] = found["k"].view(np.int16)
                case "heads":
                    found["v"] = found["v"][:, :, :1]
                case "missing":
                    del found["v"]
                case "extra":
                    found["z"] = found["v"]
                case "strided":
                    found["k"] = np.asfortranarray(found["k"])
                case "raises":
                    raise RuntimeError("this source is broken")
                case "short":
                    raise InputError("too short")
            return found

    cache = make_cache()
    ticket = cache.store(prompt(1, 40), SPACE, Unfit(kv(prompt(1, 40)))).wait(10)
    assert ticket.objects == 0
    assert cache.stats()["host"].objects == 0
    assert store(cache, prompt(1, 40)).objects == 3


def test_theta_that_is_no_float_is_not_stored_rather_than_never_read(make_cache) -> None:
    from kvass.spec import RopeSpec

    cache = make_cache()
    space = namespace(KVSpec(groups=(group(rope=RopeSpec(kind="default", theta=10000, rotary_dim=8)),)))
    assert store(cache, prompt(1, 40), space).objects == 0
    assert cache.verify() == (0, [])


# -- loads ----------------------------------------------------------------------------------------


def test_ready_tells_in_order_how_much_is_in_place(make_cache) -> None:
    cache = make_cache()
    store(cache, prompt(1, 100))
    match, told = cache.lookup(prompt(1, 100), SPACE), []
    pool = blank(SPACE, 100)

    def ready(count: int) -> None:
        told.append(count)
        assert same(pool, prompt(1, 100), SPACE, count)

    assert cache.load(match, pool, ready=ready).tokens == 100
    assert told == [16, 32, 48, 64, 80, 96, 100]


def test_ready_tells_only_the_end_where_there_are_windows(make_cache) -> None:
    cache = make_cache()
    space, told = namespace(WINDOWED), []
    store(cache, prompt(1, 100), space)
    cache.load(cache.lookup(prompt(1, 100), space), blank(space, 100), ready=told.append)
    assert told == [100]


def test_a_callers_error_in_ready_ends_the_load_with_no_thread_behind(make_cache) -> None:
    cache = make_cache(chunk_tokens=1)
    store(cache, prompt(1, 200))
    pool = blank(SPACE, 200)

    def ready(count: int) -> None:
        raise RuntimeError("the engine went away")

    with pytest.raises(RuntimeError, match="went away"):
        cache.load(cache.lookup(prompt(1, 200), SPACE), pool, ready=ready)
    pool.fill(0)
    store(cache, prompt(2, 200))
    assert not any(array.view(np.uint8).any() for array in pool.arrays(0, 0, 200).values())


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_load_out_of_time_loads_nothing_or_a_beginning(make_cache, seconds: float) -> None:
    for space in (SPACE, namespace(WINDOWED)):
        cache = make_cache()
        store(cache, prompt(1, 100), space)
        result = cache.load(cache.lookup(prompt(1, 100), space), blank(space, 100), seconds=seconds)
        assert result.tokens == 0
        assert cache.load(cache.lookup(prompt(1, 100), space), blank(space, 100), seconds=60).tokens == 100
        cache.close()


@pytest.mark.parametrize("other", [BIG, WINDOWED, KVSpec(groups=(group(dtype="float16"),))])
def test_a_place_that_does_not_fit_is_an_input_error_and_no_corruption(make_cache, other) -> None:
    cache = make_cache()
    store(cache, prompt(1, 100), namespace(BIG))
    match = cache.lookup(prompt(1, 100), namespace(BIG))
    for pool in (Pool(other, 100) if other != BIG else Pool(BIG, 99), _Strided(BIG, 100)):
        with pytest.raises(InputError):
            cache.load(match, pool)
    assert hit(cache, prompt(1, 100), namespace(BIG)) == 100
    assert cache.verify() == (7, [])


class _Strided(Pool):
    """Layers that are not contiguous: a copy of one would be filled in its stead."""

    def arrays(self, number: int, start: int, stop: int):
        return {name: np.asfortranarray(array) for name, array in super().arrays(number, start, stop).items()}


def test_a_load_counts_what_it_read(make_cache) -> None:
    cache = make_cache()
    space = namespace(WINDOWED)
    store(cache, prompt(1, 100), space)
    result = cache.load(cache.lookup(prompt(1, 100), space), blank(space, 100))
    full, window = (part.bytes_per_token for part in WINDOWED.groups)
    seen = 100 - 80  # of the window's objects only those of tokens 80 and on
    assert result.bytes == result.verified == full * 100 + window * seen
    assert result.tiers == {"host": result.bytes}
    assert result.seconds > 0


# -- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space", [namespace(WINDOWED), namespace(SLIDING)], ids=["full and window", "window"]
)
def test_a_missing_part_in_the_window_shortens_the_hit(make_cache, space) -> None:
    cache = make_cache()
    number = len(space.spec.groups) - 1
    tokens = prompt(1, 100)
    store(cache, tokens, space)
    keys = chain(space.root(), tokens, CHUNK)
    path = cache.tiers[0]._path(address(keys[5], number))
    path.unlink()
    assert hit(cache, tokens, space) == 80
    cache._keep_house()
    assert cache.lookup(tokens, space).length == 80
    store(cache, tokens, space)
    assert hit(cache, tokens, space) == 100


def test_a_missing_part_outside_of_the_window_does_not(make_cache) -> None:
    cache = make_cache()
    space = namespace(WINDOWED)
    tokens = prompt(1, 100)
    store(cache, tokens, space)
    keys = chain(space.root(), tokens, CHUNK)
    cache.tiers[0]._path(address(keys[1], 1)).unlink()
    assert hit(cache, tokens, space) == 100
    assert hit(cache, tokens, space, limit=40) == 16
    assert hit(cache, tokens, space, limit=60) == 60


def test_a_row_that_is_missing_for_one_group_shortens_the_hit(make_cache) -> None:
    cache = make_cache()
    space = namespace(WINDOWED)
    tokens = prompt(1, 100)
    store(cache, tokens, space)
    key = chain(space.root(), tokens, CHUNK)[5]
    index = cache.tiers[0]._live()
    cache.tiers[0].delete(
        [piece.address for piece in cache.lookup(tokens, space).pieces() if piece.chunk == 6]
    )
    with index.write() as txn:
        index.remove(txn, address(key, 1), index.get(txn, address(key, 1)))
    assert cache.lookup(tokens, space).length == 80
    assert store(cache, tokens, space).objects == 3
    assert hit(cache, tokens, space) == 100


def test_a_tail_within_a_longer_one_that_lacks_a_part_is_stored(make_cache) -> None:
    cache = make_cache()
    space = namespace(WINDOWED)
    store(cache, prompt(1, 12), space)
    match = cache.lookup(prompt(1, 12), space)
    index = cache.tiers[0]._live()
    one = match.child[1].address[:32] + address(b"", 1)
    with index.write() as txn:
        index.remove(txn, one, index.get(txn, one))
    assert cache.lookup(prompt(1, 9), space).length == 0
    assert store(cache, prompt(1, 9), space).objects == 2
    assert hit(cache, prompt(1, 9), space) == 9


# -- without tiers --------------------------------------------------------------------------------


def test_a_cache_without_tiers_misses_everything() -> None:
    with KVCache([], chunk_tokens=CHUNK) as cache:
        ticket = cache.store(prompt(1, 40), SPACE, kv(prompt(1, 40))).wait()
        assert ticket.objects == 0
        match = cache.lookup(prompt(1, 40), SPACE)
        assert match.length == 0
        assert cache.load(match, Pool(SPEC, 0)).tokens == 0
        assert cache.forget(prompt(1, 40), SPACE) == 0
        assert cache.stats() == {}
        assert cache.verify() == (0, [])
        assert list(cache.entries()) == []


def test_memory_alone_is_a_cache_too() -> None:
    with KVCache([MemoryTier(1 << 20)], chunk_tokens=CHUNK) as cache:
        store(cache, prompt(1, 100), namespace(WINDOWED))
        assert hit(cache, prompt(1, 100), namespace(WINDOWED)) == 100

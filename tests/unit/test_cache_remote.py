"""The cache over a remote tier: what goes there, what is staged back, and what a bad server can do."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from fixtures.world import BIG, CHUNK, WINDOWED, blank, hit, kv, namespace, prompt, same, store
from harness.stores import FaultyStore, away, slow
from kvass import metrics
from kvass.cache import KVCache, Match
from kvass.cache.pace import Pace
from kvass.config import Settings
from kvass.errors import ConfigError
from kvass.keys import Namespace, address, chain
from kvass.tiers import breaker
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.remote import RemoteTier

SPACES = [namespace(), namespace(WINDOWED), namespace(BIG)]
MB = 1 << 20

MakeCache = Callable[..., KVCache]


@pytest.fixture
def far() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def make(shm: Path, far: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCache]:
    """Caches with a host tier of their own each, over the same store."""
    monkeypatch.setattr(breaker, "_FIRST_SECONDS", 0.1)
    made: list[KVCache] = []

    def build(host: int = 64 * MB, call_seconds: float = 2.0, **options: Any) -> KVCache:
        tiers = [
            DirectoryTier(shm / f"host{len(made)}", host, name="host"),
            RemoteTier("far", far, call_seconds=call_seconds),
        ]
        made.append(KVCache(tiers, chunk_tokens=CHUNK, **options))
        return made[-1]

    yield build
    for cache in made:
        cache.close(5)


@pytest.mark.parametrize("space", SPACES)
def test_what_one_machine_stored_another_loads(make: MakeCache, space: Namespace) -> None:
    text = prompt(1, 10 * CHUNK + 5)
    store(make(), text, space)
    other = make()
    assert hit(other, text, space) == 10 * CHUNK  # the tail is found by its tokens, on its machine only
    assert hit(other, text, space, limit=7 * CHUNK + 3) == 7 * CHUNK + 3  # staged with the rest


def test_what_was_staged_is_read_once_from_afar(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    other = make()
    assert hit(other, text) == 10 * CHUNK
    assert far.calls["get"] == 10
    assert hit(other, text) == 10 * CHUNK
    assert other.lookup(text, namespace(), local=True).length == 10 * CHUNK
    assert far.calls["get"] == 10


def test_passages_are_found_in_what_was_staged_and_nowhere_afar(make: MakeCache) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    other = make()
    assert other.passages(text[5:], namespace()) == []
    assert hit(other, text) == 10 * CHUNK
    (found,) = other.passages(text[5:], namespace())
    assert (found.start, found.stop, found.place) == (0, 10 * CHUNK - 5, 5)


def test_requests_that_share_a_beginning_fetch_it_once(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    other = make()
    far.trouble = slow(0.02)
    waiting = [other.stage(text, namespace(), seconds=lambda _: 10.0) for _ in range(4)]
    assert [one.result(10).length for one in waiting] == [10 * CHUNK] * 4
    assert far.calls["get"] == 10


def test_a_lookup_asks_a_far_tier_only_for_what_is_not_near(make: MakeCache, far: FaultyStore) -> None:
    cache, text = make(), prompt(1, 10 * CHUNK)
    store(cache, text)
    before = far.calls["exists"]
    for _ in range(5):
        assert hit(cache, text) == 10 * CHUNK
    assert far.calls["exists"] == before
    assert cache.lookup(prompt(2, 20 * CHUNK), namespace()).length == 0
    assert far.calls["exists"] == before + 1


def test_all_groups_are_asked_for_in_one_call(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 40 * CHUNK)
    store(make(), text, namespace(WINDOWED))
    other = make()
    before = far.calls["exists"]
    assert other.lookup(text, namespace(WINDOWED)).length == 40 * CHUNK
    assert far.calls["exists"] - before <= 2


def test_a_hole_ends_the_match(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    one = address(chain(namespace().root(), text, CHUNK)[6], 0)
    RemoteTier("far", far).within(namespace().root()).delete([one])
    assert hit(make(), text) == 6 * CHUNK


def test_what_goes_between_lookup_and_load_only_shortens_the_hit(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    other = make()
    match = other.lookup(text, namespace())
    assert match.length == 10 * CHUNK
    del far.objects[
        next(name for name in far.objects if chain(namespace().root(), text, CHUNK)[4].hex() in name)
    ]
    pool = blank(namespace(), match.length)
    assert other.load(match, pool).tokens == 4 * CHUNK
    assert same(pool, text, namespace(), 4 * CHUNK)


@pytest.mark.parametrize("at", [20, 5000, -1])
def test_a_corrupt_object_is_a_miss_and_is_deleted(make: MakeCache, far: FaultyStore, at: int) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    name = next(name for name in far.objects if chain(namespace().root(), text, CHUNK)[4].hex() in name)
    data = bytearray(far.objects[name])
    data[at] ^= 1
    far.objects[name] = bytes(data)
    assert hit(make(), text) == 4 * CHUNK
    assert name not in far.objects


def test_an_object_in_the_place_of_another_is_a_miss(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    keys = [key.hex() for key in chain(namespace().root(), text, CHUNK)]
    names = [next(name for name in far.objects if key in name) for key in keys]
    far.objects[names[3]] = far.objects[names[7]]
    assert hit(make(), text) == 3 * CHUNK


@pytest.mark.alone
def test_a_far_tier_that_hangs_costs_a_lookup_its_deadline_and_then_nothing(
    make: MakeCache, far: FaultyStore
) -> None:
    cache = make(exists_seconds=0.1, call_seconds=0.5)
    far.trouble = slow(0.7)
    spent = []
    for seed in range(6):
        began = time.monotonic()
        assert cache.lookup(prompt(seed, 10 * CHUNK), namespace()).length == 0
        spent.append(time.monotonic() - began)
    assert max(spent) < 0.3
    assert max(spent[4:]) < 0.05, "the breaker is open, and still it is waited for"
    far.trouble = None
    deadline = time.monotonic() + 20
    while metrics.remote_state.labels("far")._value.get():
        assert time.monotonic() < deadline
        cache.lookup(prompt(1, 10 * CHUNK), namespace())
        time.sleep(0.02)


def test_a_load_from_afar_ends_with_its_time(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    other = make()
    match = other.lookup(text, namespace())
    far.trouble = slow(3.0)
    pool = blank(namespace(), match.length)
    began = time.monotonic()
    assert other.load(match, pool, seconds=0.2).tokens == 0
    assert time.monotonic() - began < 1.0
    before = [array.copy() for array in pool.arrays(0, 0, match.length).values()]
    time.sleep(0.1)
    for array, now in zip(before, pool.arrays(0, 0, match.length).values(), strict=True):
        assert array.tobytes() == now.tobytes()


@pytest.mark.alone
def test_an_engine_does_not_wait_for_a_far_tier_that_is_slow_to_write(
    make: MakeCache, far: FaultyStore
) -> None:
    cache, text = make(), prompt(1, 10 * CHUNK)
    far.trouble = slow(0.3)
    began = time.monotonic()
    cache.store(text, namespace(), kv(text)).wait(5)
    assert time.monotonic() - began < 0.3
    assert hit(cache, text) == 10 * CHUNK
    cache.flush(30)
    assert len(far.objects) == 10


def test_what_does_not_fit_the_queue_is_dropped_and_counted(make: MakeCache, far: FaultyStore) -> None:
    cache = make(lane_objects=15)
    far.trouble = slow(0.05)
    before = metrics.dropped_stores.labels("far", "queue")._value.get()
    for seed in range(5):
        text = prompt(seed, 10 * CHUNK)
        cache.store(text, namespace(), kv(text)).wait(5)
    dropped = metrics.dropped_stores.labels("far", "queue")._value.get() - before
    assert dropped >= 30
    cache.flush(30)
    assert len(far.objects) == 50 - dropped
    assert metrics.queued_objects.labels("far")._value.get() == 0
    for seed in range(5):
        assert hit(cache, prompt(seed, 10 * CHUNK)) == 10 * CHUNK


def test_a_far_tier_that_is_away_changes_nothing_here(make: MakeCache, far: FaultyStore) -> None:
    cache, text = make(), prompt(1, 10 * CHUNK)
    far.trouble = away
    store(cache, text)
    assert hit(cache, text) == 10 * CHUNK
    assert not far.objects
    far.trouble = None


def test_a_host_tier_without_room_reads_from_afar(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 64 * CHUNK)
    space = namespace(BIG)
    store(make(), text, space)
    assert hit(make(host=2 * MB), text, space) == 64 * CHUNK


def test_staging_gives_what_can_be_promised(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    other = make()
    asked = []

    def seconds(tokens: int) -> float:
        asked.append(tokens)
        return 5.0

    staged: Future[Match] = other.stage(text, namespace(), seconds=seconds)
    match = staged.result(5)
    assert asked == [10 * CHUNK]
    assert match.length == 10 * CHUNK
    with other.hold(match, 60) as lease:
        assert set(lease.addresses) == {piece.address for piece in match.pieces()}
    far.objects.clear()
    assert other.check(match).length == 10 * CHUNK


@pytest.mark.alone
def test_staging_that_has_no_time_gives_what_is_here(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    other = make()
    far.trouble = lambda verb: time.sleep(0.5) if verb == "get" else None
    began = time.monotonic()
    assert other.stage(text, namespace(), seconds=lambda _: 0.1).result(5).length == 0
    assert time.monotonic() - began < 1.0


def test_a_closed_cache_stages_nothing(make: MakeCache) -> None:
    cache = make()
    cache.close()
    assert cache.stage(prompt(1, 50), namespace(), seconds=lambda _: 1.0).result(1).length == 0


def test_a_check_gives_the_beginning_that_is_sound(make: MakeCache) -> None:
    cache, text = make(), prompt(1, 10 * CHUNK)
    store(cache, text)
    match = cache.lookup(text, namespace())
    path = cache.tiers[0]._path(address(match.keys[6], 0))  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cache.check(match).length == 6 * CHUNK


def test_forgetting_reaches_far_tiers(make: MakeCache, far: FaultyStore) -> None:
    cache, text = make(), prompt(1, 10 * CHUNK + 3)
    store(cache, text, namespace(WINDOWED))
    store(cache, prompt(2, CHUNK), namespace(WINDOWED))
    assert len(far.objects) == 2 * 10 + 2  # nobody there could find the last three tokens
    cache.forget(text, namespace(WINDOWED), keep=3 * CHUNK)
    assert len(far.objects) == 2 * 3 + 2
    assert hit(cache, text, namespace(WINDOWED)) == 3 * CHUNK


def test_one_object_is_removed_by_its_address_in_far_tiers_too(make: MakeCache, far: FaultyStore) -> None:
    cache, text = make(), prompt(1, 4 * CHUNK)
    store(cache, text)
    listed = [stored for stored in cache.entries() if stored.tier == "far"]
    assert len(listed) == 4
    assert {(stored.entry.position, stored.entry.length) for stored in listed} == {
        (CHUNK * number, CHUNK) for number in range(4)
    }
    last = max(listed, key=lambda stored: stored.entry.position)
    assert last.arrays()["k"].shape[1] == CHUNK
    assert cache.remove(last.address) == 2
    assert len(far.objects) == 3


def test_far_objects_of_other_namespaces_are_not_listed(make: MakeCache) -> None:
    cache = make()
    store(cache, prompt(1, 3 * CHUNK), namespace(tenant="a"))
    store(cache, prompt(2, 2 * CHUNK), namespace(tenant="b"))
    found = [one for one in cache.entries(namespace(tenant="a")) if one.tier == "far"]
    assert len(found) == 3


def test_prefetching_brings_what_is_far(make: MakeCache, far: FaultyStore) -> None:
    text = prompt(1, 10 * CHUNK)
    store(make(), text)
    other = make()
    assert other.prefetch(text, namespace()).length == 10 * CHUNK
    deadline = time.monotonic() + 5
    while other.lookup(text, namespace(), local=True).length < 10 * CHUNK:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_remote_tier_without_a_host_tier_is_refused(tmp_path: Path) -> None:
    settings = Settings.load(host_bytes=0, disk_bytes=0, redis_url="redis://127.0.0.1:1")
    with pytest.raises(ConfigError, match="host_bytes"):
        KVCache.open(settings)


def test_pace_is_unknown_then_learned() -> None:
    pace = Pace()
    assert pace.seconds(1) == 10.0
    pace.learn(3, 100.0)  # too short to tell
    assert pace.seconds(1000) == 10.0
    pace.learn(1000, 2.0)
    assert pace.seconds(2000) == pytest.approx(4.0)
    assert pace.seconds(1) == 0.1
    for _ in range(50):
        pace.learn(1000, 1.0)
    assert pace.seconds(2000) == pytest.approx(2.0, rel=0.01)

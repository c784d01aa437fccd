"""Remote tiers in trouble: several of them, slow ones, bad ways to them; and who waits for what then."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.world import BIG, CHUNK, blank, hit, kv, namespace, prompt, store
from harness.stores import FaultyStore, away
from kvass import metrics
from kvass.cache import KVCache
from kvass.keys import chain
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.remote import RemoteTier

MB = 1 << 20
TEXT = prompt(1, 10 * CHUNK)
MakeCache = Callable[..., KVCache]


@pytest.fixture
def make(shm: Path) -> Iterator[MakeCache]:
    made: list[KVCache] = []

    def build(*stores: FaultyStore, host: int = 64 * MB, threads: int = 2, **options: Any) -> KVCache:
        tiers = [
            DirectoryTier(shm / f"host{len(made)}", host, name="host"),
            *(RemoteTier(f"far{n}", one, threads=threads) for n, one in enumerate(stores)),
        ]
        made.append(KVCache(tiers, chunk_tokens=CHUNK, **options))
        return made[-1]

    yield build
    for cache in made:
        cache.close(5)


def slow_gets(seconds: float) -> Callable[[str], None]:
    return lambda verb: time.sleep(seconds) if verb == "get" else None


def named(far: FaultyStore, chunk: int) -> str:
    key = chain(namespace().root(), TEXT, CHUNK)[chunk].hex()
    return next(name for name in far.objects if key in name)


def staged(cache: KVCache) -> int:
    return cache.stage(TEXT, namespace(), seconds=lambda _: 5.0).result(10).length


def test_a_far_tier_that_is_away_does_not_keep_the_next_from_being_staged(make: MakeCache) -> None:
    first, second = FaultyStore(), FaultyStore()
    store(make(first, second), TEXT)
    first.trouble = away
    assert staged(make(first, second)) == 10 * CHUNK


def test_a_hole_in_one_far_tier_is_filled_from_the_next_while_staging(make: MakeCache) -> None:
    first, second = FaultyStore(), FaultyStore()
    store(make(first, second), TEXT)
    del first.objects[named(first, 5)]
    assert staged(make(first, second)) == 10 * CHUNK


@pytest.mark.alone
def test_a_load_does_not_wait_for_what_others_stage(make: MakeCache) -> None:
    far = FaultyStore()
    cache, other = make(far), prompt(2, 40 * CHUNK)
    store(cache, TEXT)
    store(cache, other)
    cache = make(far, threads=8)
    match = cache.lookup(TEXT, namespace())
    far.trouble = slow_gets(0.2)
    cache.prefetch(other, namespace())
    time.sleep(0.1)
    began = time.monotonic()
    cache.load(match, blank(namespace(), match.length), seconds=0.2)
    assert time.monotonic() - began < 1.0


def test_slow_writes_do_not_turn_lookups_into_misses(make: MakeCache) -> None:
    far = FaultyStore()
    store(make(far), TEXT)
    cache = make(far)
    far.trouble = lambda verb: time.sleep(0.5) if verb == "put" else None
    other = prompt(2, 8 * CHUNK)
    cache.store(other, namespace(), kv(other)).wait(5)
    time.sleep(0.1)
    assert [cache.lookup(TEXT, namespace()).length for _ in range(4)] == [10 * CHUNK] * 4


@pytest.mark.alone
def test_a_store_does_not_wait_for_what_is_read_from_afar(make: MakeCache) -> None:
    far, space, text = FaultyStore(), namespace(BIG), prompt(5, 32 * CHUNK)
    store(make(far), text, space)
    cache = make(far, host=MB)
    match = cache.lookup(text, space)
    far.trouble = slow_gets(0.2)
    pool = blank(space, match.length)
    loading = threading.Thread(target=lambda: cache.load(match, pool, seconds=60))
    loading.start()
    waited = 0.0
    while loading.is_alive():
        began, small = time.monotonic(), prompt(int(time.monotonic() * 1000), 2 * CHUNK)
        cache.store(small, namespace(), kv(small))
        waited = max(waited, time.monotonic() - began)
        time.sleep(0.2)
    assert waited < 0.5


def test_a_pin_covers_what_is_here(make: MakeCache) -> None:
    far = FaultyStore()
    store(make(far), TEXT)
    cache = make(far)
    assert hit(cache, TEXT[: 2 * CHUNK]) == 2 * CHUNK
    assert cache.pin(TEXT, namespace(), 60) == 2 * CHUNK


def test_what_is_forgotten_is_not_brought_back_by_a_staging_under_way(make: MakeCache) -> None:
    far = FaultyStore()
    store(make(far), TEXT)
    cache = make(far)
    far.trouble = slow_gets(0.1)
    cache.prefetch(TEXT, namespace())
    time.sleep(0.25)
    cache.forget(TEXT, namespace())
    time.sleep(1.0)
    assert cache.lookup(TEXT, namespace()).length == 0


def test_an_object_in_the_place_of_another_is_not_staged_and_is_deleted(make: MakeCache) -> None:
    far = FaultyStore()
    store(make(far), TEXT)
    name = named(far, 3)
    far.objects[name] = far.objects[named(far, 7)]
    assert staged(make(far)) == 3 * CHUNK
    assert name not in far.objects


def test_closing_goes_on_as_long_as_objects_are_written(make: MakeCache) -> None:
    far = FaultyStore()
    cache = make(far)
    far.trouble = lambda verb: time.sleep(0.3) if verb == "put" else None
    cache.store(TEXT, namespace(), kv(TEXT)).wait(5)
    cache.close(1.0)
    assert len(far.objects) == 10
    assert far.closed


def test_one_hostile_object_does_not_end_a_listing(make: MakeCache) -> None:
    import msgspec

    from kvass.container import Encoded, empty_arrays, read_arrays, read_header
    from kvass.tiers.memory import BytesReader, collect

    far = FaultyStore()
    store(make(far), TEXT)
    reader = BytesReader(far.objects[named(far, 3)])
    parsed = read_header(reader)
    arrays = empty_arrays(parsed)
    read_arrays(reader, parsed, arrays)
    header = msgspec.structs.replace(parsed.header, parent="none")
    far.objects[named(far, 3)] = bytes(collect(Encoded(header, arrays)))
    assert len([one for one in make(far).entries() if one.tier == "far0"]) == 9


def test_what_the_host_tier_evicted_before_it_was_written_is_counted(make: MakeCache) -> None:
    far, space = FaultyStore(), namespace(BIG)
    cache = make(far, host=2 * MB)
    far.trouble = lambda verb: time.sleep(0.2) if verb == "put" else None

    def dropped() -> float:
        return sum(metrics.dropped_stores.labels("far0", why)._value.get() for why in ("error", "orphan"))

    before, written = dropped(), 0
    for seed in range(5):
        text = prompt(seed, 8 * CHUNK)
        written += cache.store(text, space, kv(text, space)).wait(5).objects
    cache.flush(30)
    assert len(far.objects) + dropped() - before == written


def test_a_bad_way_to_a_server_costs_the_others_no_objects(make: MakeCache) -> None:
    far = FaultyStore()
    store(make(far), TEXT)
    count = [0]

    def spoil(name: str, data: bytes) -> bytes:
        count[0] += 1
        at = count[0] % len(data)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    far.spoil = spoil
    assert staged(make(far)) == 0
    assert len(far.objects) == 10

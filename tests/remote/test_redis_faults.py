"""Objects that are gone in part or damaged, by eviction, expiry, other clients or a death: a miss, each."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.redis_server import RedisServer, opened, redis_server
from kvass.errors import CorruptObjectError, TierError, TierFullError
from kvass.testing.stores import LIMIT, get, put
from kvass.testing.tiers import content
from kvass.tiers.redis import RedisStore

BODY = content(b"body", 3_500_000)
"""Four parts."""


def _parts(server: RedisServer) -> list[bytes]:
    return sorted(server.admin.keys("kvass:*:*:*"))


def _is_a_miss(store: RedisStore, name: str) -> None:
    with pytest.raises(KeyError):
        store.get(name, LIMIT)
    assert store.exists([name]) == [False]


# -- what goes by itself ----------------------------------------------------------------------------


def test_what_is_evicted_in_part_is_a_miss() -> None:
    with redis_server(maxmemory="40mb", maxmemory_policy="allkeys-random") as server, opened(server) as store:
        bodies = {f"a/{number}": content(bytes([number]), 1_500_000) for number in range(40)}
        for name, body in bodies.items():
            with contextlib.suppress(TierFullError):  # evicted while it was written
                put(store, name, body)
        whole = {}
        for name, body in bodies.items():
            with contextlib.suppress(KeyError):
                whole[name] = get(store, name)
                assert whole[name] == body
        assert 0 < len(whole) < len(bodies)
        assert store.exists(list(bodies)) == [name in whole for name in bodies]
        assert {one.name for one in store.list("a/")} == set(whole)


def test_what_was_not_used_for_longest_goes_first() -> None:
    with redis_server(maxmemory="40mb", maxmemory_policy="allkeys-lru") as server, opened(server) as store:
        for number in range(40):
            put(store, f"a/{number}", content(bytes([number]), 3_500_000))
        for number in range(40):
            with contextlib.suppress(KeyError):
                assert get(store, f"a/{number}") == content(bytes([number]), 3_500_000)
        assert store.exists(["a/0", "a/39"]) == [False, True]


def test_an_object_expires_with_all_its_parts(server: RedisServer) -> None:
    with opened(server, redis_ttl_seconds=2) as store:
        put(store, "one", BODY)
        assert get(store, "one") == BODY
        time.sleep(2.1)
        _is_a_miss(store, "one")
        assert server.admin.dbsize() == 0


def test_an_object_stays_unless_a_time_was_set(server: RedisServer, store: RedisStore) -> None:
    put(store, "one", BODY)
    assert {server.admin.ttl(key) for key in server.admin.scan_iter()} == {-1}
    server.admin.flushall()
    with opened(server, redis_ttl_seconds=1000) as other:
        put(other, "one", BODY)
        assert all(900 < server.admin.ttl(key) <= 1000 for key in server.admin.scan_iter())


def test_a_writer_that_is_killed_leaves_nothing_for_long(server: RedisServer) -> None:
    for number in range(8):
        child = os.fork()
        if child == 0:
            with opened(server) as store:
                for count in range(1000):
                    store.put(f"{number}/{count}", [memoryview(BODY)])
            os._exit(0)
        time.sleep(0.05 + random.random() / 20)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    time.sleep(0.1)  # what it sent is still being worked on
    with opened(server) as store:
        listed = [one.name for one in store.list("")]
        assert listed
        ours = {key for key in server.admin.scan_iter() if server.admin.ttl(key) == -1}
        for name in listed:
            assert get(store, name) == BODY
        store.delete(listed)
        assert not ours & set(server.admin.scan_iter())


def test_who_loses_a_race_leaves_nothing(server: RedisServer, store: RedisStore) -> None:
    for number in range(5):
        name, start = f"a/{number}", threading.Barrier(2)

        def write(_: int, name: str = name, start: threading.Barrier = start) -> bool:
            start.wait(10)
            return put(store, name, BODY)

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(write, range(2))) == [False, True]
    assert server.admin.dbsize() == 5 * 5


# -- what others do ---------------------------------------------------------------------------------


def test_what_was_flushed_can_be_put_anew(server: RedisServer, store: RedisStore) -> None:
    put(store, "one", BODY)
    server.admin.flushall()
    _is_a_miss(store, "one")
    assert put(store, "one", BODY) is True


@pytest.mark.parametrize("number", range(4))
def test_an_object_without_one_of_its_parts_is_a_miss(
    server: RedisServer, store: RedisStore, number: int
) -> None:
    put(store, "one", BODY)
    server.admin.delete(_parts(server)[number])
    _is_a_miss(store, "one")
    assert server.admin.dbsize() == 0
    assert put(store, "one", BODY) is True
    assert get(store, "one") == BODY


def test_a_part_of_another_size_is_a_miss(server: RedisServer, store: RedisStore) -> None:
    for damage in (lambda key: server.admin.append(key, b"x"), lambda key: server.admin.set(key, b"x")):
        put(store, "one", BODY)
        damage(_parts(server)[1])
        _is_a_miss(store, "one")


def test_a_head_without_its_part_is_a_miss(server: RedisServer, store: RedisStore) -> None:
    put(store, "one", BODY)
    server.admin.delete(_parts(server)[0])
    with pytest.raises(KeyError):
        store.head("one", 4096)
    assert store.exists(["one"]) == [False]


def test_an_object_that_is_not_whole_is_written_anew(server: RedisServer, store: RedisStore) -> None:
    put(store, "one", BODY)
    server.admin.delete(_parts(server)[3])
    assert put(store, "one", b"other") is True
    assert get(store, "one") == b"other"
    assert server.admin.dbsize() == 2


def test_who_found_an_object_broken_does_not_delete_the_next(server: RedisServer, store: RedisStore) -> None:
    put(store, "one", BODY)
    broken = server.admin.get("kvass:one")
    store.delete(["one"])
    put(store, "one", BODY)
    assert store._remove([("one", broken)]) == 0
    assert get(store, "one") == BODY


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"garbage \xff\x00",
        lambda raw: b"",
        lambda raw: raw[:-1],
        lambda raw: raw.replace(b'"size":3500000', b'"size":-1'),
        lambda raw: raw.replace(b'"size":3500000', b'"size":99999999999999'),
        lambda raw: raw.replace(b'"size":3500000', b'"size":3500001'),
        lambda raw: raw.replace(b'"size":3500000', b'"size":2000000'),
        lambda raw: raw.replace(b'"part":1048576', b'"part":1'),
        lambda raw: raw.replace(b'"part":1048576', b'"part":2097152'),
        lambda raw: raw.replace(b'"write":"', b'"write":"../'),
        lambda raw: b" " * 5_000_000 + raw,
        lambda raw: raw[:-1] + b',"more":1}',
    ],
)
def test_a_damaged_manifest_is_no_object(
    server: RedisServer, store: RedisStore, change: Callable[[bytes], bytes]
) -> None:
    for heal in (lambda: store.delete(["one"]), lambda: None):
        put(store, "one", BODY)
        raw = server.admin.get("kvass:one")
        assert change(raw) != raw
        server.admin.set("kvass:one", change(raw))
        with pytest.raises((KeyError, CorruptObjectError)):
            store.get("one", LIMIT)
        list(store.list(""))
        heal()
        assert put(store, "one", b"anew") is True
        assert get(store, "one") == b"anew"
        store.delete(["one"])
        server.admin.flushall()


def test_keys_of_others_are_left_alone(server: RedisServer, store: RedisStore) -> None:
    server.admin.lpush("list", "x")
    server.admin.set("test/one", "x")
    put(store, "test/two", b"x")
    assert [one.name for one in store.list("")] == ["test/two"]
    assert store.exists(["test/one", "list"]) == [False, False]
    assert store.delete(["test/one", "list"]) == 0
    server.admin.lpush("kvass:one", "x")
    for call in (lambda: get(store, "one"), lambda: put(store, "one", b"x")):
        with pytest.raises(TierError, match="WRONGTYPE"):
            call()

"""The Mooncake store while its master or a member dies, hangs or is full: in time, and never a wrong byte."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.mooncake_server import MooncakeMaster, mooncake_master, stop
from kvass.container import Buffer
from kvass.errors import TierError, TierFullError, TierUnavailableError
from kvass.testing.stores import LIMIT, get, put
from kvass.testing.tiers import content
from kvass.tiers.mooncake import store as mooncake
from kvass.tiers.mooncake.member import Member
from kvass.tiers.store import Store


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """One with no member, which the test may kill."""
    with mooncake_master(tmp_path) as one:
        yield one


def _calls(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.exists(["absent"]),
        lambda: store.get("absent", LIMIT),
        lambda: store.head("absent", 10),
        lambda: put(store, f"new-{time.monotonic()}", b"x"),
        lambda: store.delete(["absent"]),
    ]


def _each_is_unavailable(store: Store, seconds: float) -> None:
    """All calls, one after the other. `seconds`: for each."""
    for call in _calls(store):
        began = time.monotonic()
        with pytest.raises(TierUnavailableError):
            call()
        assert time.monotonic() - began < seconds


def _until_it_works(call: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            call()
            return
        except TierError:
            assert time.monotonic() < end, f"it did not work again within {seconds} s"
            time.sleep(0.1)


def test_a_master_that_was_killed_is_unavailable_at_once_and_serves_the_same_store_again(
    alone: MooncakeMaster,
) -> None:
    with alone.lender(64 << 20):
        store = alone.store(mooncake_bytes=64 << 20)
        put(store, "before", b"x")
        alone.kill()
        _each_is_unavailable(store, 1)
        alone.start()
        _until_it_works(lambda: put(store, "after", content(b"after", 9 << 20)))
        assert get(store, "after") == content(b"after", 9 << 20)
        assert store.exists(["before", "after"]) == [False, True]
        with pytest.raises(KeyError):
            store.get("before", LIMIT)
        store.close()


@contextlib.contextmanager
def _others_run(seconds: float) -> Iterator[None]:
    """In the block, another thread never stands still for so long."""
    over = threading.Event()
    gaps = [0.0]

    def look() -> None:
        before = time.monotonic()
        while not over.wait(0.01):
            now = time.monotonic()
            gaps.append(now - before)
            before = now

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert max(gaps) < seconds


def test_a_master_that_hangs_is_unavailable_in_time(alone: MooncakeMaster) -> None:
    store, new = (
        alone.store(mooncake_bytes=64 << 20, remote_call_seconds=1),
        alone.store(remote_call_seconds=0.3),
    )
    put(store, "one", b"x")
    threads = threading.active_count()
    with alone.hanging(), _others_run(1):
        _each_is_unavailable(store, 6)
        _each_is_unavailable(new, 6)
        assert threading.active_count() <= threads + 2  # one that joins, one that looks on
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(store.exists, ["one"])
            time.sleep(0.1)
            store.close()  # while a call is under way
            with pytest.raises(TierUnavailableError):
                running.result(10)
    _until_it_works(lambda: new.exists(["one"]))
    new.close()


def test_a_name_can_be_written_after_the_master_restarted_during_its_write(
    alone: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = mooncake._send

    def restart(member: Member, name: str, size: int, parts: Sequence[Buffer]) -> None:
        send(member, name, size, parts)
        alone.kill()
        alone.start()

    with alone.lender(64 << 20):
        store = alone.store()
        monkeypatch.setattr(mooncake, "_send", restart)
        with pytest.raises(TierUnavailableError):
            put(store, "one", b"first")
        monkeypatch.undo()
        _until_it_works(lambda: put(store, "one", b"second"))
        assert get(store, "one") == b"second"
        store.close()


@pytest.mark.alone
def test_a_master_that_comes_later_is_found(tmp_path: Path) -> None:
    late = MooncakeMaster(tmp_path)
    store = late.store(mooncake_bytes=64 << 20)
    _each_is_unavailable(store, 1)
    try:
        late.start()
        assert put(store, "one", b"x")
        store.close()
    finally:
        late.kill()


def test_a_metadata_server_that_is_away_is_unavailable_in_time(alone: MooncakeMaster) -> None:
    store = alone.store(mooncake_metadata="http://127.0.0.1:1/metadata")
    began = time.monotonic()
    with pytest.raises(TierUnavailableError, match="mooncake_metadata"):
        store.exists(["one"])
    assert time.monotonic() - began < 4
    store.close()


def test_no_room_is_full_and_what_is_evicted_is_a_miss(alone: MooncakeMaster) -> None:
    store = alone.store()
    with pytest.raises(TierFullError, match="mooncake_bytes"):
        put(store, "nobody-lends", b"x")
    with alone.lender(64 << 20):
        with pytest.raises(TierFullError):
            put(store, "too-large", bytes(65 << 20))
        assert store.exists(["too-large"]) == [False]
        bodies = {str(number): content(bytes([number]), 12 << 20) for number in range(12)}
        for name, body in bodies.items():
            _until_it_works(lambda name=name, body=body: put(store, name, body))
        found = store.exists(list(bodies))
        assert not all(found)
        for name, there in zip(bodies, found, strict=True):
            with contextlib.nullcontext() if there else pytest.raises(KeyError):
                assert get(store, name) == bodies[name]
    store.close()


def test_a_member_that_stands_still_is_unavailable_in_time_and_its_half_object_is_a_miss(
    alone: MooncakeMaster,
) -> None:
    store = alone.store(remote_call_seconds=1)
    with alone.lender(64 << 20) as member:
        put(store, "before", content(b"before", 9 << 20))
        stop(member)
        for call in (lambda: store.get("before", LIMIT), lambda: put(store, "half", bytes(9 << 20))):
            began = time.monotonic()
            with pytest.raises(TierUnavailableError):
                call()
            assert time.monotonic() - began < 8
        assert store.exists(["half"]) == [False]
        with pytest.raises(TierUnavailableError, match="broke off"):  # its room may still be written to
            put(store, "half", b"x")
    store.close()


def test_objects_of_a_member_that_died_are_misses(alone: MooncakeMaster) -> None:
    store = alone.store()
    with alone.lender(64 << 20):
        put(store, "one", content(b"one", 9 << 20))
    with pytest.raises((KeyError, TierUnavailableError)):
        store.get("one", LIMIT)
    with pytest.raises(TierError):
        put(store, "two", bytes(9 << 20))
    assert store.exists(["two"]) == [False]
    store.close()

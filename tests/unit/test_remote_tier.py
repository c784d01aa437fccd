"""What RemoteTier makes of a store: deadlines, retries, the circuit breaker, names by namespace."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.stores import FaultyStore, away, slow
from kvass import metrics
from kvass.errors import TierError, TierFullError, TierUnavailableError
from kvass.keys import address_text
from kvass.testing.clock import ManualClock
from kvass.testing.tiers import ROOT, Sequencer, TierConformance, read, text
from kvass.tiers import breaker
from kvass.tiers.base import Tier
from kvass.tiers.remote import RemoteTier


class TestRemoteTier(TierConformance):
    def make_tier(self, path: Path, budget: int, clock: ManualClock) -> Tier:
        return RemoteTier("remote", FaultyStore())


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def tier(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteTier]:
    monkeypatch.setattr(breaker, "_FIRST_SECONDS", 0.1)
    made = RemoteTier("faulty", store, call_seconds=2.0)
    yield made.within(ROOT)
    made.close()


ITEMS = Sequencer().items([text(1, 2), text(3), text(4)])
ONE = ITEMS[0].address


def test_objects_are_named_by_namespace(store: FaultyStore, tier: RemoteTier) -> None:
    tier.write(ITEMS)
    assert set(store.objects) == {f"{ROOT.hex()}/{address_text(item.address)}" for item in ITEMS}
    other = tier.within(b"x" * 32)
    assert other.contains([ONE]) == [False]
    assert other.delete([ONE]) == 0
    assert tier.contains([ONE]) == [True]


def test_all_existence_checks_are_one_call(store: FaultyStore, tier: RemoteTier) -> None:
    tier.contains([ONE] * 500)
    assert store.names["exists"] == [500]


@pytest.mark.alone
def test_a_server_that_does_not_answer_is_waited_for_until_the_deadline(
    store: FaultyStore, tier: RemoteTier
) -> None:
    store.trouble = slow(1.0)
    began = time.monotonic()
    with pytest.raises(TierUnavailableError, match="did not answer"):
        tier.within(ROOT, began + 0.1).contains([ONE])
    assert time.monotonic() - began < 0.5


def test_after_the_deadline_nothing_is_asked(store: FaultyStore, tier: RemoteTier) -> None:
    with pytest.raises(TierUnavailableError):
        tier.within(ROOT, time.monotonic()).contains([ONE])
    assert not store.calls


def test_what_passes_is_tried_again(store: FaultyStore, tier: RemoteTier) -> None:
    left = [2]

    def trouble(verb: str) -> None:
        if left[0]:
            left[0] -= 1
            away(verb)

    store.trouble = trouble
    before = metrics.retries.labels("faulty")._value.get()
    assert tier.contains([ONE]) == [False]
    assert store.calls["exists"] == 3
    assert metrics.retries.labels("faulty")._value.get() - before == 2


@pytest.mark.parametrize("error", [TierError("forbidden"), TierFullError("full"), KeyError("none")])
def test_what_does_not_pass_is_not_tried_again(
    store: FaultyStore, tier: RemoteTier, error: Exception
) -> None:
    def trouble(verb: str) -> None:
        raise error

    store.trouble = trouble
    with pytest.raises(type(error)):
        read(tier, ONE)
    assert store.calls["get"] == 1


def test_a_server_that_is_away_is_left_alone_until_a_probe_succeeds(
    store: FaultyStore, tier: RemoteTier
) -> None:
    store.trouble = away
    with pytest.raises(TierUnavailableError):
        tier.contains([ONE])
    asked = store.calls["exists"]
    assert metrics.remote_state.labels("faulty")._value.get() == 2
    for _ in range(100):
        with pytest.raises(TierUnavailableError, match="left alone"):
            tier.contains([ONE])
    assert store.calls["exists"] == asked
    store.trouble = None
    deadline = time.monotonic() + 3
    while True:  # nothing was restarted
        try:
            assert tier.contains([ONE]) == [False]
            break
        except TierUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert metrics.remote_state.labels("faulty")._value.get() == 0


@pytest.mark.alone
def test_one_caller_probes_and_the_others_do_not_wait(store: FaultyStore, tier: RemoteTier) -> None:
    store.trouble = away
    with pytest.raises(TierUnavailableError):
        tier.contains([ONE])
    store.trouble = slow(0.5)
    time.sleep(0.2)
    before = store.calls["exists"]
    probe = threading.Thread(target=lambda: tier.contains([ONE]))
    probe.start()
    while store.calls["exists"] == before and probe.is_alive():
        time.sleep(0.001)
    began = time.monotonic()
    with pytest.raises(TierUnavailableError, match="left alone"):
        tier.contains([ONE])
    assert time.monotonic() - began < 0.2
    probe.join()
    assert tier.contains([ONE]) == [False]


def test_calls_that_nobody_waits_for_do_not_hold_up_others(store: FaultyStore) -> None:
    with RemoteTierOf(store, threads=2) as tier:
        release = threading.Event()
        store.trouble = lambda verb: release.wait(5) and None
        with pytest.raises(TierUnavailableError):
            tier.within(ROOT, time.monotonic() + 0.05).contains([ONE])
        store.trouble = None
        assert tier.contains([ONE]) == [False]
        release.set()


def test_what_comes_too_late_is_given_back(store: FaultyStore, tier: RemoteTier) -> None:
    released = threading.Event()
    tier.write(ITEMS[:1])
    get = store.get

    def late(name: str, limit: int):
        fetched = get(name, limit)
        time.sleep(0.3)
        return fetched._replace(release=released.set)

    store.get = late
    with pytest.raises(TierUnavailableError):
        tier.within(ROOT, time.monotonic() + 0.1).open(ONE)
    assert released.wait(2)


def test_a_write_that_fails_is_dropped_and_counted(store: FaultyStore, tier: RemoteTier) -> None:
    store.trouble = away
    before = metrics.dropped_stores.labels("faulty", "error")._value.get()
    assert tier.write(ITEMS) == [False] * 3
    assert metrics.dropped_stores.labels("faulty", "error")._value.get() - before == 3
    assert not store.objects


def test_a_corrupt_object_is_deleted_and_counted(store: FaultyStore, tier: RemoteTier) -> None:
    tier.write(ITEMS[:1])
    before = metrics.corrupt_objects.labels("faulty")._value.get()
    tier.quarantine(ONE)
    assert not store.objects
    assert metrics.corrupt_objects.labels("faulty")._value.get() - before == 1


def test_what_is_none_of_ours_is_not_listed(store: FaultyStore, tier: RemoteTier) -> None:
    tier.write(ITEMS)  # random bytes: no objects
    store.objects |= {"readme.txt": b"x", "zz/" + address_text(ONE): b"y", f"{ROOT.hex()}/none": b"z"}
    assert list(tier.scan()) == []


def test_a_forked_child_is_refused(tier: RemoteTier) -> None:
    pid = os.fork()
    if not pid:
        try:
            tier.contains([ONE])
        except TierUnavailableError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_closing_closes_the_store_once(store: FaultyStore) -> None:
    tier = RemoteTier("faulty", store)
    tier.within(ROOT).close()
    assert store.closed
    with pytest.raises(TierUnavailableError):
        tier.contains([])


class RemoteTierOf:
    """A tier over a store within a root, closed at the end."""

    def __init__(self, store: FaultyStore, **options: int):
        self._tier = RemoteTier("faulty", store, **options)

    def __enter__(self) -> RemoteTier:
        return self._tier.within(ROOT)

    def __exit__(self, *_: object) -> None:
        self._tier.close()

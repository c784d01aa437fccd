"""Several processes over one tier: leases, the same keys at once, forks, and one that stands still."""

import os
import signal
import time
from pathlib import Path

import pytest

from harness.consistency import assert_consistent, opened
from harness.forkserver import ForkServer
from harness.jobs import BIG, SPACE, cache_over, wait_for
from harness.kv import CHUNK, Source, load, store, text
from kvass.cache import KVCache
from kvass.errors import TierUnavailableError
from kvass.tiers import environment
from kvass.tiers.directory import DirectoryTier

BUDGET = 3 << 20
PROCESSES = 3


def test_leases_hold_against_eviction_by_another_process(shm: Path, server: ForkServer) -> None:
    path = shm / "tier"
    tokens, other = text(0, 0, 60), text(1, 0, 60)
    with cache_over(path, BUDGET) as cache:
        store(cache, tokens, BIG)
        store(cache, other, BIG)
        holder = server.start("harness.jobs:hold_lease", str(path), BUDGET, str(shm))
        wait_for(shm, "leased")
        assert server.wait(server.start("harness.jobs:fill_up", str(path), BUDGET, 100, 30)) == 0
        assert load(cache, tokens, BIG) == 60, "leased"
        assert load(cache, other, BIG) < 60, "nothing was evicted"
        server.kill(holder)
        with opened(path, BUDGET) as another:
            another.maintain()
        assert server.wait(server.start("harness.jobs:fill_up", str(path), BUDGET, 200, 30)) == 0
        assert load(cache, tokens, BIG) < 60, "the lease of the dead still holds"
    assert_consistent(path, BUDGET)


def test_the_same_keys_are_stored_once(shm: Path, server: ForkServer) -> None:
    path, budget = shm / "tier", 64 << 20
    names = [f"process-{number}" for number in range(PROCESSES)]
    pids = [server.start("harness.jobs:store_the_same", str(path), budget, str(shm), name) for name in names]
    for name in names:
        wait_for(shm, f"{name}-ready")
    (shm / "go").touch()
    assert [server.wait(pid) for pid in pids] == [0] * PROCESSES
    stored = [int((shm / f"{name}-objects").read_text()) for name in names]
    found = assert_consistent(path, budget).objects
    with cache_over(path, budget) as cache:
        for family in range(10):
            store(cache, text(family, 0, 150), BIG)
            assert load(cache, text(family, 0, 150), BIG) == 150
    whole = assert_consistent(path, budget).objects
    assert whole == 10 * 10 * 2
    assert found <= whole
    print(f"{stored} by each, {found} in all")


def test_fork_while_open(shm: Path, server: ForkServer) -> None:
    code = server.wait(server.start("harness.jobs:fork_while_open", str(shm / "tier"), 64 << 20, str(shm)))
    assert code == 0, (shm / "error").read_text() if (shm / "error").exists() else "in the parent"
    assert_consistent(shm / "tier", 64 << 20)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(environment, "_OPEN_SECONDS", 0.5)


@pytest.mark.alone
def test_a_process_stands_still_with_the_write_lock(shm: Path, server: ForkServer, patience: None) -> None:
    path, budget = shm / "tier", 64 << 20
    tokens = text(0, 0, 60)
    cache = KVCache([DirectoryTier(path, budget, name="waiting")], chunk_tokens=CHUNK, store_deadline=0.5)
    store(cache, tokens, SPACE)
    holder = server.start("harness.jobs:hold_write_lock", str(path), budget, str(shm))
    wait_for(shm, "locked")
    os.kill(holder, signal.SIGSTOP)
    try:
        for family in (1, 2, 3):
            began = time.monotonic()
            ticket = cache.store(text(family, 0, 60), SPACE, Source(text(family, 0, 60), SPACE.spec))
            assert time.monotonic() - began < 1.0
            assert not ticket.copied
        for _ in range(20):
            began = time.monotonic()
            assert cache.lookup(tokens, SPACE).length == 60
            assert load(cache, tokens, SPACE) == 60
            assert time.monotonic() - began < 0.5
        assert cache.stats()["waiting"].objects == 8
        assert len(list(cache.entries())) == 8
    finally:
        server.kill(holder)
    cache.flush(10)
    store(cache, text(4, 0, 60), SPACE)
    assert load(cache, text(4, 0, 60), SPACE) == 60
    cache.close()
    assert_consistent(path, budget)


@pytest.mark.alone
def test_opening_while_a_process_stands_still(shm: Path, server: ForkServer, patience: None) -> None:
    path, budget = shm / "tier", 64 << 20
    with opened(path, budget):
        pass
    holder = server.start("harness.jobs:hold_write_lock", str(path), budget, str(shm))
    wait_for(shm, "locked")
    os.kill(holder, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(TierUnavailableError, match="stands still"):
            DirectoryTier(path, budget, name="waiting")
        assert time.monotonic() - began < 5
    finally:
        server.kill(holder)
    assert_consistent(path, budget)

"""Deadlines, a lock that never comes, closing while busy, forks, threads: no call hangs, none raises."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fixtures.world import CHUNK, SPEC, blank, hit, kv, namespace, prompt, same, store
from kvass import metrics
from kvass.cache import Copying, KVCache, Pool
from kvass.cache.executor import Executor
from kvass.errors import TierError, TierUnavailableError
from kvass.tiers.base import WriteItem
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.memory import BytesBlob, MemoryTier
from kvass.workers import Workers

SPACE = namespace()

_HOLDER = """
import os, signal, sys
from pathlib import Path
from kvass.tiers.directory import DirectoryTier
tier = DirectoryTier(Path(sys.argv[1]), 16 << 20, name="holder")
with tier._live().write():
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextmanager
def stopped_writer(path: Path) -> Iterator[subprocess.Popen]:
    """A process that stands still in a write transaction."""
    process = subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        for _ in range(1000):
            if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                break
            time.sleep(0.005)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def took(began: float) -> float:
    return time.monotonic() - began


# -- a writer that stands still -------------------------------------------------------------------


@pytest.mark.alone
def test_a_writer_that_stands_still_delays_nobody_beyond_the_deadline(make_cache) -> None:
    cache = make_cache(store_deadline=0.3)
    store(cache, prompt(1, 100))
    path = cache.tiers[0].path
    dropped = metrics.dropped_stores.labels("host", "deadline")
    before = dropped._value.get()
    with stopped_writer(path) as process:
        began = time.monotonic()
        ticket = cache.store(prompt(2, 100), SPACE, kv(prompt(2, 100)))
        assert 0.3 <= took(began) < 0.6
        assert not ticket.copied
        began = time.monotonic()
        for _ in range(20):  # the second one need not find out for itself
            assert not cache.store(prompt(3, 100), SPACE, kv(prompt(3, 100))).wait().copied
            assert hit(cache, prompt(1, 100)) == 100
        assert took(began) < 0.5
        assert dropped._value.get() == before + 21
        with pytest.raises(TimeoutError):
            cache.flush(0.05)
        process.kill()
        process.wait()
        cache.flush(30)
        assert cache.lookup(prompt(2, 100), SPACE).length == 0
        assert store(cache, prompt(3, 100)).objects == 7
        assert hit(cache, prompt(3, 100)) == 100
    cache._keep_house()
    assert cache.tiers[0].usage().objects == 14


def test_a_store_that_waits_does_not_keep_its_source_alive(make_cache) -> None:
    cache = make_cache(store_deadline=0.05)
    source = kv(prompt(1, 100))
    alive = weakref.ref(source)
    held, release = threading.Event(), threading.Event()

    def occupy() -> None:
        held.set()
        release.wait(30)

    cache._executor.write(occupy)
    held.wait()
    assert not cache.store(prompt(1, 100), SPACE, source).copied
    del source
    gc.collect()
    assert alive() is None
    release.set()
    cache.flush()
    assert cache.stats()["host"].objects == 0


def test_closing_behind_a_writer_that_stands_still_ends(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = KVCache([DirectoryTier(shm / "host", 16 << 20, name="host")], store_deadline=0.1)
    with stopped_writer(shm / "host"):
        cache.store(prompt(1, 100), SPACE, kv(prompt(1, 100)))
        began = time.monotonic()
        cache.close(patience=0.3)
        assert took(began) < 2
        assert any("stands still" in record.message for record in caplog.records)
        assert cache.lookup(prompt(1, 100), SPACE).length == 0
        cache.close()


def test_a_process_ends_behind_a_writer_that_stands_still(shm: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from fixtures.world import *\n"
        "from kvass.cache import tiered\n"
        "from kvass.tiers import directory\n"
        "tiered._EXIT_PATIENCE = directory._CLOSE_SECONDS = 0.3\n"
        "tier = directory.DirectoryTier(Path(sys.argv[1]), 16 << 20, name='host')\n"
        "cache = KVCache([tier], chunk_tokens=16, store_deadline=0.1)\n"
        "store(cache, prompt(1, 100))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "hit(cache, prompt(1, 100))\n"
        "cache.store(prompt(2, 100), namespace(), kv(prompt(2, 100)))\n"
    )
    with _script(script, shm / "host") as process:
        assert process.stdout.readline() == "ready\n"
        with stopped_writer(shm / "host"):
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(20) == 0


def test_opening_behind_a_writer_that_stands_still_is_given_up(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvass.tiers import environment

    monkeypatch.setattr(environment, "_OPEN_SECONDS", 0.3)
    with stopped_writer(shm / "host") as process:
        began = time.monotonic()
        with pytest.raises(TierUnavailableError, match="stands still"):
            DirectoryTier(shm / "host", 16 << 20, name="host")
        assert took(began) < 2
        process.kill()
        process.wait()
        for _ in range(100):
            try:
                tier = DirectoryTier(shm / "host", 16 << 20, name="host")
                break
            except TierUnavailableError:  # until the late one has closed what it opened
                time.sleep(0.05)
        tier.maintain()
        assert tier.usage().objects == 0
        tier.close()


def test_a_process_that_forgets_to_close_stores_all_the_same(shm: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from fixtures.world import *\n"
        "from kvass.tiers.directory import DirectoryTier\n"
        "base = Path(sys.argv[1])\n"
        "tiers = [DirectoryTier(base / name, 16 << 20, name=name) for name in ('host', 'disk')]\n"
        "cache = KVCache(tiers, chunk_tokens=16)\n"
        "for seed in range(20): cache.store(prompt(seed, 100), namespace(), kv(prompt(seed, 100)))\n"
    )
    with _script(script, shm) as process:
        assert process.wait(30) == 0
    for name in ("host", "disk"):
        tier = DirectoryTier(shm / name, 16 << 20, name=name)
        assert tier.usage().objects == 140
        assert len(list((tier.path / "owners").iterdir())) == 1
        tier.close()


@contextmanager
def _script(script: str, *arguments: object) -> Iterator[subprocess.Popen]:
    tests = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


# -- the source of a store ------------------------------------------------------------------------


class Slow(MemoryTier):
    """Writes slowly, and says when."""

    def __init__(self) -> None:
        super().__init__(1 << 20, name="slow")
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, items, run=map):
        self.begun.set()
        self.go_on.wait(30)
        return super().write(items, run)


def test_a_source_that_was_given_back_is_never_read_again() -> None:
    tier = Slow()
    with KVCache([tier], chunk_tokens=CHUNK, store_deadline=0.1) as cache:
        source = kv(prompt(1, 100))
        ticket = cache.store(prompt(1, 100), SPACE, source)
        assert not ticket.copied
        source.fill(0)  # the engine reuses it
        tier.go_on.set()
        cache.flush()
        assert cache.lookup(prompt(1, 100), SPACE).length == 0
        assert tier.usage().objects == 0
        assert store(cache, prompt(1, 100)).objects == 7
        assert hit(cache, prompt(1, 100)) == 100


def test_giving_up_waits_for_what_is_being_copied() -> None:
    copying = Copying()
    blob = copying.wrap(BytesBlob(b"abc"))
    pieces = blob.pieces()
    next(pieces)
    waited: list[bool] = []
    waiter = threading.Thread(target=lambda: waited.append(copying.wait(0.05)))
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()  # still being read
    with pytest.raises(StopIteration):
        next(pieces)
    waiter.join(5)
    assert waited == [False]
    with pytest.raises(TierError, match="longer than store_deadline"):
        next(blob.pieces())
    assert copying.take() is None


def test_a_copy_that_is_broken_off_counts_as_ended(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copying = Copying()
    tier = DirectoryTier(shm / "host", 16 << 20, name="host")
    (item,) = _items(1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert tier.write([item._replace(blob=copying.wrap(item.blob))]) == [False]
    assert not copying.wait(0.01)  # at once: nothing is active
    tier.close()


def _items(count: int) -> list[WriteItem]:
    from kvass.testing.tiers import Sequencer, text

    return Sequencer(size=9000).items([text(number) for number in range(count)])


# -- closing --------------------------------------------------------------------------------------


def test_a_closed_cache_misses_and_raises_nothing(make_cache) -> None:
    cache = make_cache(16 << 20, 16 << 20)
    store(cache, prompt(1, 100))
    match = cache.lookup(prompt(1, 100), SPACE)
    entries = list(cache.entries())
    cache.close()
    cache.close()
    assert cache.lookup(prompt(1, 100), SPACE).length == 0
    assert cache.load(match, blank(SPACE, 100)).tokens == 0
    ticket = cache.store(prompt(2, 100), SPACE, kv(prompt(2, 100))).wait()
    assert not ticket.copied
    assert cache.prefetch(prompt(1, 100), SPACE).length == 0
    assert cache.pin(prompt(1, 100), SPACE, 5) == 0
    assert cache.forget(prompt(1, 100), SPACE) == 0
    assert cache.remove(entries[0].address) == 0
    assert cache.context(prompt(1, 100), SPACE)[0] == 0
    assert cache.explain(prompt(1, 100), SPACE).hit == 0
    assert cache.verify() == (0, [])
    assert cache.stats() == {}
    cache.flush()
    with pytest.raises(TierUnavailableError):
        entries[0].arrays()


def test_closing_finishes_what_is_pending(shm: Path) -> None:
    tiers = [DirectoryTier(shm / name, 16 << 20, name=name) for name in ("host", "disk")]
    cache = KVCache(tiers, chunk_tokens=CHUNK)
    for seed in range(30):
        cache.store(prompt(seed, 100), SPACE, kv(prompt(seed, 100)))
    cache.close()
    for name in ("host", "disk"):
        tier = DirectoryTier(shm / name, 16 << 20, name=name)
        assert tier.usage().objects == 210
        tier.close()


def test_closing_while_busy_raises_nowhere(shm: Path) -> None:
    for turn in range(5):
        tiers = [DirectoryTier(shm / name, 4 << 20, name=name) for name in ("host", "disk")]
        cache = KVCache(tiers, chunk_tokens=CHUNK)
        store(cache, prompt(1, 100))
        failed: list[BaseException] = []
        stop = threading.Event()

        def work(seed: int, cache=cache, failed=failed, stop=stop) -> None:
            try:
                while not stop.is_set():
                    seed += 10
                    assert hit(cache, prompt(1, 100)) in (0, 100)
                    cache.store(prompt(seed, 60), SPACE, kv(prompt(seed, 60)))
                    cache.prefetch(prompt(seed, 60), SPACE)
                    list(cache.entries())
                    cache.forget(prompt(seed, 60), SPACE)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it must not be
                failed.append(error)

        threads = [threading.Thread(target=work, args=(10 + number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05 * turn)
        cache.close()
        stop.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert failed == []


# -- forks ----------------------------------------------------------------------------------------


def test_a_forked_child_misses_and_harms_nobody(make_cache) -> None:
    cache = make_cache(16 << 20, 16 << 20)
    memory = KVCache([MemoryTier(1 << 20)], chunk_tokens=CHUNK)
    for one in (cache, memory):
        store(one, prompt(1, 100))
    match = cache.lookup(prompt(1, 100), SPACE)
    lease = cache.tiers[0].lease([match.pieces()[0].address], 600)
    ticket = cache.store(prompt(1, 100), SPACE, kv(prompt(1, 100)))
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(20)
            for one in (cache, memory):
                assert one.lookup(prompt(1, 100), SPACE).length == 0
                assert one.load(match, blank(SPACE, 100)).tokens == 0
                assert not one.store(prompt(2, 100), SPACE, kv(prompt(2, 100))).copied
                one.flush()
                one.forget(prompt(1, 100), SPACE)
                one.close()
            lease.close()
            with pytest.raises(TierUnavailableError):
                cache.tiers[0].usage()
            with pytest.raises(TierUnavailableError):
                cache.tiers[0].write([])
            again = DirectoryTier(cache.tiers[0].path, 16 << 20, name="child")
            with KVCache([again], chunk_tokens=CHUNK) as mine:
                assert hit(mine, prompt(1, 100)) == 100
                store(mine, prompt(3, 100))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ticket.wait(10)
    assert list((cache.tiers[0].path / "owners").glob("*/leases/*"))
    assert hit(cache, prompt(1, 100)) == 100
    assert hit(cache, prompt(3, 100)) == 100
    memory.close()


def test_a_child_that_outlives_its_parent_does_not_pass_for_it(shm: Path) -> None:
    """The lock that says 'alive' belongs to an open file, which a forked child shares."""
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from kvass.tiers.directory import DirectoryTier\n"
        "tier = DirectoryTier(Path(sys.argv[1]), 16 << 20, name='host')\n"
        "index, owner = tier._live(), tier._owner\n"
        "with index.write() as txn: index.intend(txn, bytes(35), owner.id, 4096)\n"
        "pid = os.fork()\n"
        "if not pid: sys.stdin.readline(); os._exit(0)\n"
        "print('gone', flush=True)\n"
        "os._exit(0)\n"
    )
    with _script(script, shm / "host") as process:
        assert process.stdout.readline() == "gone\n"
        process.wait(10)
        tier = DirectoryTier(shm / "host", 16 << 20, name="host")
        tier.maintain()
        index = tier._live()
        with index.read() as txn:
            assert index.writers(txn) == set()
            assert index.usage(txn) == (0, 0)
        assert len(list((tier.path / "owners").iterdir())) == 1
        tier.close()


# -- threads --------------------------------------------------------------------------------------


def test_jobs_run_in_order_and_errors_reach_who_waits() -> None:
    workers = Workers(1, "test")
    seen: list[int] = []
    futures = [workers.submit(lambda number=number: seen.append(number)) for number in range(100)]
    for future in futures:
        future.result(5)
    assert seen == list(range(100))

    def fail(number: int) -> int:
        if number == 3:
            raise KeyError("three")
        return number

    results = workers.map(fail, range(10))
    assert [next(results), next(results), next(results)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(results)
    assert workers.close(5)
    assert workers.close(5)
    with pytest.raises(TierUnavailableError):
        workers.submit(lambda: None)


def test_a_map_that_is_left_waits_for_what_runs_and_drops_the_rest() -> None:
    workers = Workers(2, "test")
    running, most, done = [0], [0], []

    def slow(number: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        running[0] -= 1
        done.append(number)
        return number

    results = workers.map(slow, range(1000))
    next(results)
    results.close()
    assert running[0] == 0
    assert len(done) < 10
    assert most[0] == 2
    workers.close(5)


def test_shared_work_is_done_once_and_waits_for_no_stranger() -> None:
    workers, release = Workers(2, "test"), threading.Event()
    assert workers.share(lambda number: number * number, range(50)) == [
        number * number for number in range(50)
    ]
    assert workers.share(lambda number: number, []) == []
    stranger = workers.submit(lambda: release.wait(30))
    began = time.monotonic()
    assert workers.share(lambda number: number, range(10)) == list(range(10))  # with the thread that is free
    assert took(began) < 5
    release.set()
    stranger.result(5)
    done: list[int] = []

    def fail(number: int) -> int:
        time.sleep(0.01)
        done.append(number)
        if number == 2:
            raise KeyError(number)
        return number

    with pytest.raises(KeyError):
        workers.share(fail, range(8))
    count = len(done)
    time.sleep(0.05)
    assert len(done) == count  # nothing runs any more
    workers.close(5)
    with pytest.raises(TierUnavailableError):
        workers.share(fail, range(8))


@pytest.mark.alone
def test_closing_gives_up_on_a_job_that_stands_still_only() -> None:
    workers, release = Workers(1, "test"), threading.Event()
    for _ in range(20):
        workers.submit(lambda: time.sleep(0.05))
    workers.submit(lambda: release.wait(30))
    began = time.monotonic()
    assert not workers.close(0.3)
    assert 1.0 < took(began) < 3.0
    release.set()
    assert workers.close(5)


def test_housekeeping_survives_whatever_it_meets(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def keep_house() -> None:
        seen.append(1)
        raise [ValueError("a mistake"), OSError("no")][len(seen) % 2]

    before = metrics.errors.labels("cache", "housekeeping")._value.get()
    executor = Executor(1, keep_house, interval=0.01)
    while len(seen) < 5:
        time.sleep(0.01)
    executor.background(lambda: seen.clear() or 1 / 0)
    executor.flush(5)
    assert executor.close(5)
    executor.background(lambda: None)
    assert metrics.errors.labels("cache", "housekeeping")._value.get() >= before + 4
    assert any(record.exc_info for record in caplog.records)


def test_many_threads_see_only_what_was_stored(make_cache) -> None:
    cache = make_cache(2 << 20, 4 << 20)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        try:
            for _ in range(60):
                tokens = np.concatenate(
                    [
                        prompt(int(random.integers(3)), int(random.integers(1, 60))),
                        prompt(int(random.integers(20)), int(random.integers(1, 60))),
                    ]
                )
                match int(random.integers(5)):
                    case 0 | 1:
                        cache.store(tokens, SPACE, kv(tokens))
                    case 2 | 3:
                        hit(cache, tokens)
                    case 4:
                        cache.forget(tokens, SPACE, keep=int(random.integers(60)))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not be
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    cache.flush()
    assert cache.verify()[1] == []


def test_a_pool_refuses_what_lies_outside() -> None:
    pool = Pool(SPEC, 4)
    from kvass.errors import InputError

    for start, stop in [(0, 5), (-1, 2), (3, 2)]:
        with pytest.raises(InputError):
            pool.arrays(0, start, stop)
    assert same(pool, [], SPACE, 0)

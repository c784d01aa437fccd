"""Several processes that ask and several that work share one queue of jobs."""

import contextlib
import os
import signal
import time
from pathlib import Path

from harness.forkserver import ForkServer
from harness.job_workers import LEASE, MODEL, job, open_jobs, results
from harness.jobs import wait_for

WORKERS = 2
ASKERS = 3


def test_each_job_is_done_once_and_workers_share(shm: Path, server: ForkServer) -> None:
    workers = [server.start("harness.job_workers:work", str(shm), f"w{n}", 0.02) for n in range(WORKERS)]
    for n in range(WORKERS):
        wait_for(shm, f"w{n}-works")
    with contextlib.closing(open_jobs(shm)) as jobs:
        name = jobs.put(job(1000), 30)
        while jobs.wait(name, 30) == "no worker":
            time.sleep(0.01)
    askers = [server.start("harness.job_workers:ask", str(shm), f"a{n}", 10 * n, 20) for n in range(ASKERS)]
    assert [server.wait(pid) for pid in askers] == [0] * ASKERS
    for n in range(ASKERS):
        assert set((shm / f"a{n}-outcomes").read_text().split(" ")) == {"done"}
    found = results(shm)
    assert found == dict.fromkeys([*range(40), 1000], 1), "each asked for by up to two, done by one"
    by = {path.name.split("-")[2] for path in shm.glob("did-*")}
    assert len(by) == WORKERS, "one did it all"
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    assert [server.wait(pid) for pid in workers] == [0] * WORKERS


def test_a_worker_that_is_told_to_stop_gives_its_job_back(shm: Path, server: ForkServer) -> None:
    slow = server.start("harness.job_workers:work", str(shm), "slow", 60.0)
    with contextlib.closing(open_jobs(shm)) as jobs:
        name = jobs.put(job(1), 60)
        _until_taken(shm)
        os.kill(slow, signal.SIGTERM)
        began = time.monotonic()
        assert server.wait(slow) == 0
        assert time.monotonic() - began < 2
        assert jobs.wait(name, 5) == "no worker"
        assert jobs.take("next", MODEL).attempt == 1, "it counts as no attempt, and needs no lease to lapse"


def test_a_worker_that_stands_still_loses_its_job_and_does_no_harm(shm: Path, server: ForkServer) -> None:
    slow = server.start("harness.job_workers:work", str(shm), "slow", 1.0)
    with contextlib.closing(open_jobs(shm)) as jobs:
        name = jobs.put(job(1), 60)
        _until_taken(shm)
        os.kill(slow, signal.SIGSTOP)
        fast = server.start("harness.job_workers:work", str(shm), "fast")
        wait_for(shm, "fast-works")
        time.sleep(2 * LEASE)
        assert jobs.wait(name, 30) == "done"
        assert results(shm) == {1: 1}
        os.kill(slow, signal.SIGCONT)
        time.sleep(2 * LEASE)
        assert jobs.wait(name, 0) == "done"
        server.kill(fast)
        server.kill(slow)


def test_a_renewed_lease_outlasts_a_long_job(shm: Path, server: ForkServer) -> None:
    workers = [server.start("harness.job_workers:work", str(shm), f"w{n}", 6 * LEASE) for n in range(2)]
    with contextlib.closing(open_jobs(shm)) as jobs:
        name = jobs.put(job(1), 60)
        _until_taken(shm)
        assert jobs.wait(name, 30) == "done"
    assert results(shm) == {1: 1}
    for pid in workers:
        server.kill(pid)


def _until_taken(folder: Path) -> None:
    import sqlite3

    end = time.monotonic() + 30
    with contextlib.closing(sqlite3.connect(folder / "jobs" / "jobs-1.sqlite")) as db:
        while not db.execute("SELECT 1 FROM jobs WHERE state = 'taken'").fetchone():
            assert time.monotonic() < end, "nobody took it"
            time.sleep(0.01)

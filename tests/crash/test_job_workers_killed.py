"""kill -9 at every step of a worker and of who asks: the job is done all the same, or was never there."""

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.forkserver import ForkServer
from harness.job_workers import LEASE, MODEL, job, open_jobs, results

LEAST_STEPS = 25


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


def test_a_worker_is_killed_at_every_step(shm: Path, server: ForkServer) -> None:
    n, code = 0, None
    while code != 0:
        n += 1
        folder = shm / "one"
        folder.mkdir()
        with contextlib.closing(open_jobs(folder)) as jobs:
            name = jobs.put(job(1), 60)
            code = server.wait(server.start("harness.job_workers:work_and_die", str(folder), n))
            assert code in (0, -signal.SIGKILL)
            before = results(folder)
            began = time.monotonic()
            outcome = jobs.wait(name, LEASE / 2)
            assert outcome in ("timeout", "no worker", "done")
            assert time.monotonic() - began < LEASE
            if outcome != "done":
                _another_does_it(folder)
            assert jobs.wait(name, 0) == "done", f"killed before step {n}"
            after = results(folder)
            assert after == {1: 2 if before and outcome != "done" else 1}
        shutil.rmtree(folder)
    print(f"{n} runs")
    assert n >= LEAST_STEPS


def test_who_asks_is_killed_at_every_step(shm: Path, server: ForkServer) -> None:
    n, code, found = 0, None, 0
    while code != 0:
        n += 1
        folder = shm / "one"
        folder.mkdir()
        code = server.wait(server.start("harness.job_workers:put_and_die", str(folder), n))
        assert code in (0, -signal.SIGKILL)
        with contextlib.closing(open_jobs(folder)) as jobs:
            taken = jobs.take("w", MODEL)
            found += taken is not None
            assert taken is None or taken.job == job(1)
            name = jobs.put(job(2), 60)
            assert jobs.take("w", MODEL).id == name
        assert not list((folder / "jobs").glob("*.damaged"))
        shutil.rmtree(folder)
    assert n >= 10
    assert found >= 2


def _another_does_it(folder: Path) -> None:
    """A worker that lives comes to it when the lease of the dead one has lapsed."""
    from kvass.jobs import Worker

    with contextlib.closing(open_jobs(folder)) as jobs:

        def do(one, cancelled) -> str:
            (folder / f"did-{int(one.prompt()[0])}-other-1").touch()
            worker.stop()
            return "it"

        worker = Worker(jobs, MODEL, do)
        worker.work()

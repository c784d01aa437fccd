"""What other processes do with a queue of jobs: ask, work, and die at a step of their own choosing."""

import os
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from kvass.jobs import Job, Jobs, Worker, model_digest

from .faults import Faults, dying
from .jobs import say
from .kv import namespace

LEASE = 0.5
SPACE = namespace()
MODEL = model_digest(SPACE)


def open_jobs(folder: Path) -> Jobs:
    """The queue in a folder, with short leases, and patience with a busy machine."""
    return Jobs(folder / "jobs", lease_seconds=LEASE, put_seconds=30)


def job(number: int) -> Job:
    return Job.of(SPACE, [number] * 300)


def results(folder: Path) -> dict[int, int]:
    """How often each job was done."""
    found: dict[int, int] = {}
    for path in folder.glob("did-*"):
        number = int(path.name.split("-")[1])
        found[number] = found.get(number, 0) + 1
    return found


def _did(folder: Path, one: Job) -> str:
    number = int(one.prompt()[0])
    (folder / f"did-{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    return f"job {number}"


def work(where: str, name: str, seconds: float = 0.0) -> None:
    """Work, `seconds` on each job, until killed or told to stop."""
    folder = Path(where)

    def do(one: Job, cancelled: threading.Event) -> str | None:
        return None if cancelled.wait(seconds) else _did(folder, one)

    jobs = open_jobs(folder)
    worker = Worker(jobs, MODEL, do)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    say(folder, f"{name}-works")
    worker.work()
    jobs.close()


def counted(folder: Path, n: int) -> Faults:
    """Steps of this process, each statement of SQLite's one of them; it is killed before the n-th."""
    steps = Faults(folder, dying(n))

    class Counting(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            steps.note(str(arguments[0]))
            return super().execute(*arguments)

    connect = sqlite3.connect
    sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Counting, **options)
    return steps


def work_and_die(where: str, n: int) -> None:
    """Do one job and end; killed before the n-th statement or step."""
    folder = Path(where)
    steps = counted(folder, n)

    def do(one: Job, cancelled: threading.Event) -> str:
        steps.note("half way")
        did = _did(folder, one)
        steps.note("all but said")
        worker.stop()
        return did

    jobs = open_jobs(folder)
    worker = Worker(jobs, MODEL, do)
    worker.work()
    jobs.close()
    steps.note("closed")
    (folder / "steps").write_text("\n".join(steps.calls))


def put_and_die(where: str, n: int) -> None:
    """Ask, killed before the n-th statement."""
    folder = Path(where)
    counted(folder, n)
    jobs = open_jobs(folder)
    assert jobs.put(job(1), 60) is not None
    jobs.wait("x", 0)
    jobs.close()


def ask(where: str, name: str, first: int, count: int) -> None:
    """Ask for jobs, some of them the same as others ask for, and wait for each."""
    folder = Path(where)
    jobs = open_jobs(folder)
    names = [jobs.put(job(number), 30) for number in range(first, first + count)]
    assert None not in names
    (folder / f"{name}-outcomes").write_text(" ".join(jobs.wait(one, 30) for one in names))
    jobs.close()

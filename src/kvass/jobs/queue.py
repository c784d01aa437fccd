"""The queue of jobs: asked for once however often, claimed by who lives, waited for up to a deadline."""

import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from kvass import metrics
from kvass.clock import Clock, system_clock
from kvass.config import Settings
from kvass.jobs import rows
from kvass.jobs.database import Database, writing
from kvass.jobs.job import Job, encode

Outcome = Literal["done", "failed", "timeout", "no worker"]

_LEASE_SECONDS: Final = 10.0
_WORKER_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = (0.005, 0.05)
"""Between two looks of who waits: at first, and at last."""


class Taken(NamedTuple):
    """A job that a worker claimed: `attempt` counts from 1, `waited` is the seconds since it was asked for,
    `awaited` whether somebody still waits."""

    id: str
    job: Job
    worker: str
    attempt: int
    waited: float
    awaited: bool


class Jobs:
    """A queue in one folder, for any number of processes that ask and work. Safe for several threads.

    Only `check` raises: where the queue cannot be used there are no jobs, which is counted in
    `kvass.metrics`. After a fork the child opens one of its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        most: int = 256,
        most_bytes: int = 64 << 20,
        lease_seconds: float = _LEASE_SECONDS,
        put_seconds: float = 0.25,
        clock: Clock = system_clock,
    ):
        """`most`, `most_bytes`: jobs that may be queued or under way, and their bytes. `lease_seconds`: after
        which a worker that said nothing is taken for dead; the same for all users of a folder.
        `put_seconds`: how long `put` may take."""
        self._database = Database(folder / "jobs-1.sqlite", rows.SCHEMA)
        self._most = most
        self._most_bytes = most_bytes
        self._put_seconds = put_seconds
        self._clock = clock
        self._told: dict[str, float] = {}
        self.lease_seconds = lease_seconds

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """The queue that the settings name."""
        return cls(settings.jobs_path, most=settings.jobs_queue, most_bytes=settings.jobs_bytes)

    def check(self) -> None:
        """Raises OSError, sqlite3.Error or TierError, saying why the queue cannot be used."""
        self._database.check()

    def close(self) -> None:
        """Close the file; what is queued stays."""
        self._database.close()

    # -- who asks -------------------------------------------------------------------------------------

    def put(self, job: Job, deadline_seconds: float) -> str | None:
        """Queue a job that somebody waits for so long, and give its id; None where it was not queued.

        The same job is there once: asked for again, it gets the later deadline, and where it ended within the
        last minute it is not done again. A full queue drops jobs that nobody waits for, the oldest first;
        where that makes no room, this one is refused.
        """
        name, raw = encode(job)
        work = partial(self._put, name=name, raw=raw, model=job.model, seconds=deadline_seconds)
        return self._database.ask("put", work, None, self._put_seconds)

    def _put(self, db: sqlite3.Connection, name: str, raw: bytes, model: str, seconds: float) -> str | None:
        with writing(db):
            now = self._clock()
            rows.tidy(db, now, self.lease_seconds)
            known = db.execute("SELECT 1 FROM jobs WHERE id = ?", (name,)).fetchone()
            if known is None and not rows.make_room(db, now, len(raw), self._most, self._most_bytes):
                metrics.jobs.labels("refused").inc()
                return None
            db.execute(
                "INSERT INTO jobs VALUES (?, ?, 'queued', ?, ?, '', 0, 0, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET deadline = max(deadline, excluded.deadline)",
                (name, model, now, now + seconds, len(raw), raw),
            )
            rows.count_queued(db)
        return name

    def wait(self, name: str | None, seconds: float) -> Outcome:
        """What became of a job, within so many seconds (0: by now).

        `no worker`, at once, where none lives that may do it; `failed` also where it was not queued, was
        dropped, or nothing can be known. Only after `done` is it worth another lookup, and even then what was
        stored may be gone.
        """
        began = time.monotonic()
        pause, longest = _LOOK_SECONDS
        found: Outcome = "failed"
        while name is not None:
            left = began + seconds - time.monotonic()
            look = partial(self._look, name=name)
            seen = self._database.ask("wait", look, None, max(left, longest))
            late = time.monotonic() >= began + seconds
            found = seen or ("timeout" if late else "failed")
            if seen != "timeout" or late:
                break
            time.sleep(min(pause, max(left, 0)))
            pause = min(2 * pause, longest)
        metrics.job_wait_seconds.labels(found).observe(time.monotonic() - began)
        return found

    def _look(self, db: sqlite3.Connection, name: str) -> Outcome | None:
        now = self._clock()
        row = db.execute(
            "SELECT state, EXISTS (SELECT 1 FROM workers WHERE model = jobs.model AND seen BETWEEN ? AND ?) "
            "FROM jobs WHERE id = ?",
            (now - 2 * self.lease_seconds, now + rows.SKEW_SECONDS, name),
        ).fetchone()
        if row is None:
            return "failed"
        state, lives = row
        if state == "done":
            return "done"
        if state not in ("queued", "taken"):
            return "failed"
        return "timeout" if lives else "no worker"

    # -- workers --------------------------------------------------------------------------------------

    def take(self, worker: str, model: str) -> Taken | None:
        """Claim a job for that model, None where there is none: the oldest of those that somebody waits for,
        else the oldest. The claim holds for `lease_seconds`, and `renew` renews it. A job that was claimed
        three times, by workers that died, has failed.

        `worker`: a name that no other has. Asking also says that the worker lives.
        """
        work = partial(self._take, worker=worker, model=model)
        return self._database.ask("take", work, None, _WORKER_SECONDS)

    def _take(self, db: sqlite3.Connection, worker: str, model: str) -> Taken | None:
        now = self._clock()
        if not 0 <= now - self._told.get(worker, 0.0) < self.lease_seconds / 3:
            self._tell(db, worker, model)
        if not rows.anything_for(db, model, now, self.lease_seconds):
            return None
        with writing(db):
            now = self._clock()  # again: the lock may have been long in coming
            rows.tidy(db, now, self.lease_seconds)
            found = rows.first(db, model, now)
            if found is not None:
                db.execute(
                    "UPDATE jobs SET state = 'taken', worker = ?, until = ?, attempts = ? WHERE id = ?",
                    (worker, now + self.lease_seconds, found[2] + 1, found[0]),
                )
            rows.count_queued(db)
        if found is None:
            return None
        name, job, attempts, asked, awaited = found
        return Taken(name, job, worker, attempts + 1, max(0.0, now - asked), awaited)

    def renew(self, taken: Taken) -> bool:
        """Say that the work goes on. False where another has the job by now, so that it may end; True where
        nothing can be known."""
        return self._database.ask("renew", partial(self._renew, taken=taken), True, _WORKER_SECONDS)

    def _renew(self, db: sqlite3.Connection, taken: Taken) -> bool:
        self._tell(db, taken.worker, taken.job.model)
        return self._update(db, taken, "until = ?", self.lease_seconds)

    def done(self, taken: Taken) -> bool:
        """What was asked for is stored. False where the job is not this worker's any more."""
        return self._end(taken, "done")

    def failed(self, taken: Taken) -> bool:
        """The job cannot be done. False where it is not this worker's any more."""
        return self._end(taken, "failed")

    def _end(self, taken: Taken, state: str) -> bool:
        change = f"state = '{state}', until = ?, size = 0, body = x''"
        return self._change(taken, state, change, rows.REMEMBER_SECONDS)

    def give_back(self, taken: Taken) -> bool:
        """Another worker is to do the job; this attempt does not count. False as for `done`."""
        change = "state = 'queued', until = ?, worker = '', attempts = attempts - 1"
        return self._change(taken, "returned", change, 0.0)

    def _change(self, taken: Taken, outcome: str, change: str, seconds: float) -> bool:
        changed = self._database.ask(
            outcome, lambda db: self._update(db, taken, change, seconds), False, _WORKER_SECONDS
        )
        if changed:
            metrics.jobs.labels(outcome).inc()
        return changed

    def _update(self, db: sqlite3.Connection, taken: Taken, change: str, seconds: float) -> bool:
        """Change a job, `until` in so many seconds, as long as it is this worker's."""
        with writing(db):
            done = db.execute(
                f"UPDATE jobs SET {change} WHERE id = ? AND worker = ? AND state = 'taken'",  # noqa: S608
                (self._clock() + seconds, taken.id, taken.worker),
            )
        return done.rowcount == 1

    def _tell(self, db: sqlite3.Connection, worker: str, model: str) -> None:
        with writing(db):
            now = self._clock()
            db.execute("INSERT OR REPLACE INTO workers VALUES (?, ?, ?)", (worker, model, now))
        self._told[worker] = now

    def leave(self, worker: str) -> None:
        """A worker ends; nobody is to wait for it."""
        self._told.pop(worker, None)
        self._database.ask("leave", partial(self._leave, worker=worker), None, _WORKER_SECONDS)

    @staticmethod
    def _leave(db: sqlite3.Connection, worker: str) -> None:
        with writing(db):
            db.execute("DELETE FROM workers WHERE name = ?", (worker,))

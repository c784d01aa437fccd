"""The rows of the queue: what stands in them, and what keeps them within bounds; all within a transaction.

Times are the wall clock's, which may jump: one counts only where it lies within reach of now.
"""

import sqlite3
from typing import Final

from kvass import metrics
from kvass.jobs.job import Job, decode

ATTEMPTS: Final = 3
REMEMBER_SECONDS: Final = 60.0
"""How long an end is remembered: who asks for the same again meanwhile gets that end."""

_KEEP_SECONDS: Final = 3600.0
"""After which a job that nobody came to is dropped."""

SKEW_SECONDS: Final = 60.0
"""By how much the clock may have been set back before a time in the future is taken for nonsense."""

SCHEMA: Final = (
    "CREATE TABLE jobs (id TEXT PRIMARY KEY, model TEXT, state TEXT, asked REAL, deadline REAL, worker TEXT, "
    "until REAL, attempts INTEGER, size INTEGER, body BLOB)",
    "CREATE INDEX jobs_by_state ON jobs (state, model)",
    "CREATE TABLE workers (name TEXT PRIMARY KEY, model TEXT, seen REAL)",
)
"""`state`: queued, taken, done or failed. `until`: the end of the lease of a job that is taken, or of the
memory of one that ended."""

# For `now` and `now + 2 * lease`: one that ends much later than any could is none.
_LAPSED: Final = "state = 'taken' AND (until BETWEEN ? AND ?) IS NOT TRUE"


def anything_for(db: sqlite3.Connection, model: str, now: float, lease: float) -> bool:
    """Whether a worker of that model has anything to take. Writes nothing, so that idle workers hold up
    nobody."""
    query = f"SELECT 1 FROM jobs WHERE model = ? AND (state = 'queued' OR ({_LAPSED})) LIMIT 1"  # noqa: S608
    return db.execute(query, (model, now, now + 2 * lease)).fetchone() is not None


def tidy(db: sqlite3.Connection, now: float, lease: float) -> None:
    """Take jobs from the dead, fail those that outlived too many, forget what ended, drop what is too old."""
    lost = db.execute(
        f"UPDATE jobs SET state = 'queued', worker = '' WHERE {_LAPSED}",  # noqa: S608
        (now, now + 2 * lease),
    )
    failed = db.execute(
        "UPDATE jobs SET state = 'failed', until = ?, size = 0, body = x'' "
        "WHERE state = 'queued' AND attempts >= ?",
        (now + REMEMBER_SECONDS, ATTEMPTS),
    )
    db.execute(
        "DELETE FROM jobs WHERE state NOT IN ('queued', 'taken') AND (until BETWEEN ? AND ?) IS NOT TRUE",
        (now, now + REMEMBER_SECONDS + SKEW_SECONDS),
    )
    dropped = db.execute(
        "DELETE FROM jobs WHERE state = 'queued' AND (asked BETWEEN ? AND ?) IS NOT TRUE",
        (now - _KEEP_SECONDS, now + SKEW_SECONDS),
    )
    db.execute(
        "DELETE FROM workers WHERE (seen BETWEEN ? AND ?) IS NOT TRUE", (now - 2 * lease, now + SKEW_SECONDS)
    )
    for outcome, done in (("lost", lost), ("failed", failed), ("dropped", dropped)):
        metrics.jobs.labels(outcome).inc(done.rowcount)


def make_room(db: sqlite3.Connection, now: float, size: int, most: int, most_bytes: int) -> bool:
    """Whether there is room for one more job, after dropping of those that nobody waits for what it takes."""
    idle = "state = 'queued' AND deadline <= ?1"
    count, total, idle_count, idle_total = db.execute(
        f"SELECT count(*), total(size), count(*) FILTER (WHERE {idle}), "  # noqa: S608
        f"total(size) FILTER (WHERE {idle}) FROM jobs WHERE state IN ('queued', 'taken')",
        (now,),
    ).fetchone()
    if count - idle_count >= most or total - idle_total + size > most_bytes:
        return False
    while count >= most or total + size > most_bytes:
        name, freed = db.execute(
            f"SELECT id, coalesce(CAST(size AS INTEGER), 0) FROM jobs WHERE {idle} "  # noqa: S608
            "ORDER BY asked LIMIT 1",
            (now,),
        ).fetchone()
        db.execute("DELETE FROM jobs WHERE id IS ?", (name,))
        metrics.jobs.labels("dropped").inc()
        count, total = count - 1, total - freed
    return True


def first(db: sqlite3.Connection, model: str, now: float) -> tuple[str, Job, int, float, bool] | None:
    """The job to be done next: its id, itself, how often it was claimed, when it was asked for, and whether
    somebody waits. Rows that were damaged are removed."""
    while True:
        row = db.execute(
            "SELECT id, CAST(body AS BLOB), coalesce(CAST(attempts AS INTEGER), 0), "
            "coalesce(CAST(asked AS REAL), 0.0), deadline > ?1 FROM jobs "
            "WHERE state = 'queued' AND model = ?2 ORDER BY deadline > ?1 DESC, asked LIMIT 1",
            (now, model),
        ).fetchone()
        if row is None:
            return None
        name, body, attempts, asked, awaited = row
        job = decode(name, body)
        if job is not None:
            return name, job, attempts, asked, bool(awaited)
        metrics.corrupt_objects.labels("jobs").inc()
        db.execute("DELETE FROM jobs WHERE id IS ?", (name,))


def count_queued(db: sqlite3.Connection) -> None:
    """Show how long the queue is."""
    (count,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
    metrics.queued_jobs.set(count)

"""The queue of jobs against a plain model of it: any order of asking, working, dying and time going by."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.kv import namespace
from kvass.jobs import Job, Jobs, Taken, model_digest
from kvass.testing.clock import ManualClock

SPACE = namespace()
MODEL = model_digest(SPACE)
MOST = 4
NUMBERS = st.integers(0, 6)
SECONDS = st.sampled_from([0.0, 1.0, 20.0, 100.0])


@dataclass
class Row:
    """What the model knows of a job."""

    asked: float
    deadline: float
    state: str = "queued"
    worker: str = ""
    until: float = 0.0
    attempts: int = 0


class Queue(RuleBasedStateMachine):
    """Two users of one folder, one of which asks and one of which works."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
        self.clock = ManualClock()
        self.asker, self.worker = (
            Jobs(self.folder, most=MOST, put_seconds=30, clock=self.clock) for _ in range(2)
        )
        self.rows: dict[str, Row] = {}
        self.claims: list[Taken] = []
        self.count = 0

    def teardown(self) -> None:
        self.asker.close()
        self.worker.close()
        shutil.rmtree(self.folder)

    def tidy(self) -> None:
        """What anybody who writes finds out."""
        now = self.clock()
        for name, row in list(self.rows.items()):
            if row.state == "taken" and now > row.until:
                row.state, row.worker = "queued", ""
            if row.state == "queued" and row.attempts >= 3:
                row.state, row.until = "failed", now + 60
            over = row.state in ("done", "failed") and now > row.until
            if over or (row.state == "queued" and now > row.asked + 3600):
                del self.rows[name]

    def living(self) -> list[Row]:
        return [row for row in self.rows.values() if row.state in ("queued", "taken")]

    @rule(number=NUMBERS, seconds=SECONDS)
    def put(self, number: int, seconds: float) -> None:
        name = self.asker.put(Job.of(SPACE, [number] * 5), seconds)
        self.tidy()
        now = self.clock()
        if name is not None and name in self.rows:
            row = self.rows[name]
            row.deadline = max(row.deadline, now + seconds)
            return
        idle = sorted(
            (row.asked, key)
            for key, row in self.rows.items()
            if row.state == "queued" and row.deadline <= now
        )
        if len(self.living()) - len(idle) >= MOST:
            assert name is None
            return
        assert name is not None
        if len(self.living()) >= MOST:
            oldest = [key for asked, key in idle if asked == idle[0][0]]
            gone = [key for key in oldest if self.asker.wait(key, 0) == "failed"]
            assert len(gone) == 1
            del self.rows[gone[0]]
        self.rows[name] = Row(now, now + seconds)

    @rule()
    def take(self) -> None:
        self.count += 1
        name = f"w{self.count}"
        taken = self.worker.take(name, MODEL)
        now = self.clock()
        if any(row.state == "queued" or now > row.until for row in self.living()):
            self.tidy()
        queued = [row for row in self.rows.values() if row.state == "queued"]
        if taken is None:
            assert not queued
            return
        row = self.rows[taken.id]
        assert row.state == "queued"
        assert taken.awaited == (row.deadline > now)
        first = min(queued, key=lambda one: (one.deadline <= now, one.asked))
        assert (row.deadline > now, row.asked) == (first.deadline > now, first.asked)
        row.state, row.worker, row.until = "taken", name, now + self.worker.lease_seconds
        row.attempts += 1
        assert taken.attempt == row.attempts
        self.claims.append(taken)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), what=st.sampled_from(["done", "failed", "give_back", "renew"]))
    def answer(self, data: st.DataObject, what: str) -> None:
        """By whoever has a claim, or had one."""
        taken = data.draw(st.sampled_from(self.claims))
        row = self.rows.get(taken.id)
        mine = row is not None and row.state == "taken" and row.worker == taken.worker
        assert getattr(self.worker, what)(taken) == mine
        if not mine:
            return
        now = self.clock()
        if what == "renew":
            row.until = now + self.worker.lease_seconds
        elif what == "give_back":
            row.state, row.worker, row.attempts = "queued", "", row.attempts - 1
        else:
            row.state, row.until = what, now + 60

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0, 61.0, 2000.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def what_waits_is_told(self) -> None:
        for name, row in self.rows.items():
            found = self.asker.wait(name, 0)
            if row.state in ("done", "failed"):
                assert found == row.state
            else:
                assert found in ("timeout", "no worker")

    @invariant()
    def it_is_bounded(self) -> None:
        assert len(self.living()) <= MOST


TestQueue = Queue.TestCase
TestQueue.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

"""Who is computed for, and when: a few requests in turn, a slice or a token at a time; the rest queue."""

import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvass import metrics
from kvass.cache import StoreTicket
from kvass.engines.transformers import Answering, Engine, PromptLogits, Sampling, Scope, Step, Usage
from kvass.errors import KvassError
from kvass.provenance import BLEND, EXACT

log = logging.getLogger("kvass.serve")

_STAGING_LOOK = 0.005
"""Seconds between looks at what comes from other machines, while there is nothing else to do."""

_VISIBLE_SECONDS = 1.0
"""How long a request waits for what the one before it stored to be visible."""


class Busy(KvassError):
    """The queue is full; `seconds` says when to come again."""

    def __init__(self, seconds: int):
        super().__init__(f"too many requests are waiting; try again in {seconds} s")
        self.seconds = seconds


class Stopping(KvassError):
    """The server is about to stop and takes no more requests."""


@dataclass(frozen=True, slots=True)
class Done:
    """A request is over. What it computed is stored before the next one begins.

    `reason`: `stop`, `length`, or `cancelled`.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A request could not be answered; the log says why."""


Event = Step | Done | Failed


@dataclass(eq=False)
class Job:
    """One answer that somebody waits for. `deliver` is called in the scheduler's thread; it must not wait."""

    tenant: str
    answering: Answering
    deliver: Callable[[Event], None]
    cancelled: threading.Event
    arrived: float
    began: float = 0.0

    @property
    def usage(self) -> Usage:
        return self.answering.usage

    @property
    def reading(self) -> bool:
        """Whether its prompt is still being read."""
        return self.answering.read < self.answering.tokens.size

    def shares_with(self, other: "Job", chunk_tokens: int) -> bool:
        """Whether this one's prompt begins with a chunk or more that the other computes."""
        if self.tenant != other.tenant:
            return False
        if not self.answering.scope.load or not other.answering.scope.keep:
            return False
        made = other.usage.provenance
        if made != EXACT.kind and (made == BLEND or not self.answering.scope.lossy):
            return False  # what the other stores is not for this one
        first = other.usage.cached_tokens
        end = first + chunk_tokens
        mine, theirs = self.answering.tokens[:end], other.answering.tokens[:end]
        return mine.size == theirs.size == end and bool(np.array_equal(mine, theirs))


class Scheduler:
    """Drives an engine in a thread of its own: up to `slots` requests in turn, each a slice of its prompt or
    a token of its answer at a time. Up to `queue` more wait for each tenant, and tenants take turns: one of
    which nothing is computed gets a slot beyond the others', up to twice as many in all.

    A prompt is stored as soon as it is read. Where another begins alike, it waits for that, and loads it.
    """

    def __init__(self, engine: Engine, *, slots: int, queue: int):
        self._engine = engine
        self._chunk_tokens = engine.cache.chunk_tokens if engine.cache is not None else sys.maxsize
        self._slots = slots
        self._limit = queue
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Job]] = {}
        self._active: list[Job] = []
        self._stopping = False
        self.failed = False  # for good: only another server helps
        self._seconds = 1.0  # that a request takes, a moving average
        self._tickets: list[tuple[str, bytes, StoreTicket]] = []  # by tenant and beginning
        self._thread = threading.Thread(target=self._run, name="kvass-scheduler", daemon=True)
        self._thread.start()

    # -- from any thread ------------------------------------------------------------------------------

    def start(
        self,
        tenant: str,
        prompt: list[int],
        sampling: Sampling,
        *,
        scope: Scope,
        deliver: Callable[[Event], None],
        arrived: float,
        prompt_logits: PromptLogits | None = None,
    ) -> Job:
        """Make a job. `arrived`: when its request did, by `time.perf_counter`. Raises InputError for a prompt
        that the model cannot take."""
        cancelled = threading.Event()
        answering = self._engine.start(
            prompt, sampling, scope=scope, cancelled=cancelled, prompt_logits=prompt_logits
        )
        return Job(tenant, answering, deliver, cancelled, arrived)

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs, all or none. Raises Busy or Stopping."""
        with self._changed:
            if self._stopping or not self._thread.is_alive():
                raise Stopping("the server is stopping; try another one")
            self._check_room(jobs[0].tenant, len(jobs))
            for job in jobs:
                self._waiting.setdefault(job.tenant, deque()).append(job)
            self._count()
            self._changed.notify_all()

    def check_room(self, tenant: str) -> None:
        """Raises Busy where a tenant's queue is full: before any work is done for one more request."""
        with self._changed:
            self._check_room(tenant, 1)

    def _check_room(self, tenant: str, more: int) -> None:
        waiting = len(self._waiting.get(tenant, ())) - max(0, self._slots - len(self._active))
        if waiting + more > self._limit:
            rounds = sum(map(len, self._waiting.values())) / self._slots
            raise Busy(max(1, min(60, math.ceil(rounds * self._seconds))))

    def cancel(self, job: Job) -> None:
        """End a job, in mid-forward too; what was computed is stored. A job that is over: nothing."""
        job.cancelled.set()
        with self._changed:
            self._changed.notify_all()

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._stopping

    def close(self, grace: float) -> None:
        """Take no more jobs, give those there are `grace` seconds, then cancel them; ends with the last."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(grace)
        with self._changed:
            for job in [*self._active, *(job for jobs in self._waiting.values() for job in jobs)]:
                job.cancelled.set()
            self._changed.notify_all()
        self._thread.join()

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._admit():
                for job in list(self._active):
                    self._guarded(job, partial(self._advance, job))
        except Exception:
            log.exception("kvass: the scheduler ended; no request is answered any more")
            self._fail_all()

    def _fail_all(self) -> None:
        """Nobody must wait for what will never come."""
        with self._changed:
            self._stopping = self.failed = True
            left = [*self._active, *(job for jobs in self._waiting.values() for job in jobs)]
            self._active, self._waiting = [], {}
            self._count()
        for job in left:
            metrics.failed_requests.inc()
            job.deliver(Failed())

    def _admit(self) -> bool:
        """Fill the slots; wait while there is nothing to do. False at the end."""
        while True:
            with self._changed:
                self._drop_cancelled()
                job = self._next()
                if job is None:
                    if self._active:
                        return True
                    if self._stopping and not self._waiting:
                        return False
                    self._changed.wait(None if not self._waiting else _STAGING_LOOK)
                    continue
                self._active.append(job)
                self._count()
            self._begin(job)

    def _count(self) -> None:
        metrics.queued_requests.set(sum(map(len, self._waiting.values())))
        metrics.active_requests.set(len(self._active))

    def _drop_cancelled(self) -> None:
        for tenant, jobs in list(self._waiting.items()):
            for job in [one for one in jobs if one.cancelled.is_set()]:
                jobs.remove(job)
                job.answering.close()
                job.deliver(Done("cancelled"))
            if not jobs:
                del self._waiting[tenant]
        self._count()

    def _next(self) -> Job | None:
        """The first job that need not wait for another's prompt, of the tenant that waited longest."""
        reading = [one for one in self._active if one.reading]
        served = {one.tenant for one in self._active}
        for tenant, jobs in list(self._waiting.items()):
            if len(self._active) >= self._slots * (1 if tenant in served else 2):
                continue
            for job in jobs:
                if not self._is_here(job):
                    continue
                if not any(job.shares_with(one, self._chunk_tokens) for one in reading):
                    jobs.remove(job)
                    del self._waiting[tenant]  # and last in turn, if it has more
                    if jobs:
                        self._waiting[tenant] = jobs
                    return job
        return None

    @staticmethod
    def _is_here(job: Job) -> bool:
        """Whether what other machines have of a prompt has come, so that nobody's answer waits for them."""
        try:
            staging = job.answering.stage()
        except Exception:  # the request itself will say what is wrong
            log.exception("kvass: a prompt could not be looked for on other machines")
            return True
        return staging is None or staging.done()

    def _begin(self, job: Job) -> None:
        job.began = time.perf_counter()
        mine = (job.tenant, self._beginning(job))
        for tenant, beginning, ticket in self._tickets:
            if (tenant, beginning) == mine:  # of another's store it must not even feel that it is there
                with contextlib.suppress(TimeoutError):
                    ticket.wait(_VISIBLE_SECONDS)
        self._tickets = [one for one in self._tickets if one[2].future and not one[2].future.done()]
        self._guarded(job, job.answering.begin)

    def _beginning(self, job: Job) -> bytes:
        return job.answering.tokens[: self._chunk_tokens].tobytes()

    def _advance(self, job: Job) -> None:
        reading = job.reading
        step = job.answering.advance() if not job.cancelled.is_set() else None
        if job.cancelled.is_set():
            self._end(job, Done("cancelled"))
            return
        if step is not None:
            if job.usage.completion_tokens == 1:
                metrics.ttft_seconds.labels(hit_class(job.usage)).observe(time.perf_counter() - job.arrived)
            job.deliver(step)
        if job.answering.finished:
            self._end(job, Done(job.usage.finish_reason))
        elif reading and not job.reading and self._new_to_others(job.usage):
            self._store(job, job.answering.keep)

    def _new_to_others(self, usage: Usage) -> bool:
        """Whether so much of a prompt was computed that others may want it while it is still answered."""
        return usage.prompt_tokens - usage.cached_tokens >= self._chunk_tokens

    def _guarded(self, job: Job, work: Callable[[], None]) -> None:
        """The outermost loop of a request: whatever happens in it ends that request and no other."""
        try:
            work()
        except Exception:
            log.exception("kvass: a request failed")
            metrics.failed_requests.inc()
            if job in self._active:
                self._end(job, Failed())

    def _end(self, job: Job, event: Event) -> None:
        """What a request computed that failed is in doubt, and not stored."""
        self._active.remove(job)
        self._count()
        self._seconds += 0.2 * (time.perf_counter() - job.began - self._seconds)
        job.deliver(event)
        self._store(job, partial(job.answering.close, keep=not isinstance(event, Failed)))

    def _store(self, job: Job, store: Callable[[], object]) -> None:
        """Have what was computed stored; where that fails, the answer is none the worse."""
        try:
            store()
        except Exception:
            log.exception("kvass: an answer was not stored")
            metrics.errors.labels("cache", "store").inc()
        if job.usage.ticket is not None:
            self._tickets.append((job.tenant, self._beginning(job), job.usage.ticket))


def hit_class(usage: Usage) -> str:
    """How much of a prompt was loaded: `none`, `part`, or `most` (half of it or more)."""
    if not usage.cached_tokens:
        return "none"
    return "most" if 2 * usage.cached_tokens >= usage.prompt_tokens else "part"

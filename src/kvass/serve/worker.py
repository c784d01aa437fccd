"""`kvass worker`: takes jobs from the queue one at a time, and has a model do them."""

import logging
import threading
import uuid
from collections.abc import Callable

from kvass.engines.transformers import Engine, Scope, Usage
from kvass.errors import InputError, KvassError
from kvass.jobs import Job, Jobs, Taken
from kvass.quality import Budget

log = logging.getLogger("kvass.worker")

_LOOK_SECONDS = 0.025
"""Between two looks at a queue that has nothing to do."""

_VISIBLE_SECONDS = 30.0

DoJob = Callable[[Job, threading.Event], Usage]
"""Does a job; setting the event ends it. What it stored is there for others when it returns. Raises
KvassError where it cannot be done."""


class Worker:
    """One worker. `work` runs until `stop`; the job under way is given back then, for another to go on with.

    Where a job is taken away, since this process stood still for too long, it ends early.
    """

    def __init__(self, jobs: Jobs, model: str, do: DoJob):
        """`model`: see `kvass.jobs.model_digest`."""
        self._jobs = jobs
        self._model = model
        self._do = do
        self._name = uuid.uuid4().hex
        self._stopping = threading.Event()
        self._cancelled = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """From any thread, or a signal's handler."""
        self._stopping.set()
        self._cancelled.set()

    def work(self) -> None:
        """Do what there is to do, as it comes."""
        try:
            while not self._stopping.is_set():
                taken = self._jobs.take(self._name, self._model)
                if taken is not None:
                    self._work_on(taken)
                else:
                    self._stopping.wait(_LOOK_SECONDS)
        finally:
            self._jobs.leave(self._name)

    def _work_on(self, taken: Taken) -> None:
        self._cancelled.clear()
        if self._stopping.is_set():
            self._cancelled.set()
        over = threading.Event()
        beat = threading.Thread(target=self._keep, args=(taken, over), name="kvass-lease", daemon=True)
        beat.start()
        name = taken.id[:12]
        try:
            usage = self._do(taken.job, self._cancelled)
        except KvassError as error:
            self._jobs.failed(taken)
            log.warning("job %s failed: %s", name, error)
        except Exception:  # the outermost loop of a job: whatever happens in it ends that job and no other
            self._jobs.failed(taken)
            log.exception("job %s failed", name)
        else:
            if usage.finish_reason == "cancelled":
                mine = self._jobs.give_back(taken)
                log.info("job %s %s", name, "given back" if mine else "is another worker's by now")
            else:
                mine = self._jobs.done(taken)
                _report(name, taken, usage, mine)
        finally:
            over.set()
            beat.join()

    def _keep(self, taken: Taken, over: threading.Event) -> None:
        """Say that this worker lives, until the job is over or somebody else's."""
        while not over.wait(self._jobs.lease_seconds / 3):
            if not self._jobs.renew(taken):
                self._cancelled.set()
                return


def _report(name: str, taken: Taken, usage: Usage, mine: bool) -> None:
    log.info(
        "job %s done%s: %d tokens, %d were stored, %.2f s; it had waited %.2f s%s",
        name, "" if mine else ", by another too", usage.prompt_tokens, usage.cached_tokens,
        usage.load_seconds + usage.prefill_seconds, taken.waited, "" if taken.awaited else ", for nobody",
    )  # fmt: skip


def reading(engine: Engine) -> DoJob:
    """Has the engine read a job's prompt, in the name of its tenant."""

    def read(job: Job, cancelled: threading.Event) -> Usage:
        scope = Scope(job.tenant, job.public, budget=_budget(job), digests=True)
        usage = engine.read(job.prompt(), scope=scope, cancelled=cancelled)
        if usage.finish_reason != "cancelled" and usage.ticket is not None:
            try:
                stored = usage.ticket.wait(_VISIBLE_SECONDS).copied
            except TimeoutError:
                stored = False
            if not stored:
                raise KvassError("its KV was not stored; the tiers say why")
        return usage

    return read


def _budget(job: Job) -> Budget | None:
    """Raises InputError for the budget of another kvass."""
    if job.budget is None:
        return None
    if len(job.budget) != len(Budget._fields):
        raise InputError(f"a budget has {len(Budget._fields)} fields, not {len(job.budget)}")
    return Budget(*job.budget)

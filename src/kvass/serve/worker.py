"""What `kvass worker` does for a job: its engine reads the prompt, and the cache keeps what that gave."""

import threading

from kvass.engines.transformers import Engine, Sampling, Scope
from kvass.errors import InputError, TierError
from kvass.jobs import DoJob, Job
from kvass.quality import Budget
from kvass.reuse.plan import Reuse

_VISIBLE_SECONDS = 30.0


def reading(engine: Engine) -> DoJob:
    """Has the engine read a job's prompt, in the name of its tenant, or repair it where that is asked for."""

    def read(job: Job, cancelled: threading.Event) -> str | None:
        reuse = Reuse(job.max_fraction) if job.max_fraction else None
        scope = Scope(job.tenant, job.public, budget=_budget(job), reuse=reuse, digests=True)
        answering = engine.start(job.prompt(), Sampling(max_tokens=0), scope=scope, cancelled=cancelled)
        usage, done = answering.usage, False
        try:
            answering.begin()
            if reuse is not None and not usage.reused_tokens:
                raise InputError("nothing of the prompt can be reused that was read elsewhere")
            while not answering.finished and not cancelled.is_set():
                answering.advance()
            done = answering.finished
        finally:
            answering.close(keep=done or cancelled.is_set())
        if not done:
            return None
        try:
            stored = usage.ticket is None or usage.ticket.wait(_VISIBLE_SECONDS).copied
        except TimeoutError:
            stored = False
        if not stored:
            raise TierError("its KV was not stored in time")
        seconds = usage.load_seconds + usage.prefill_seconds
        moved = f", {usage.reused_tokens:,} were read elsewhere" if usage.reused_tokens else ""
        cached = usage.cached_tokens - usage.reused_tokens
        return f"{usage.prompt_tokens:,} tokens, {cached:,} were stored{moved}, {seconds:.2f} s"

    return read


def _budget(job: Job) -> Budget | None:
    """Raises InputError for the budget of another kvass."""
    if job.budget is None:
        return None
    if len(job.budget) != len(Budget._fields):
        raise InputError(f"a budget has {len(Budget._fields)} fields, not {len(job.budget)}")
    return Budget(*job.budget)

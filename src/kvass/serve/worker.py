"""What `kvass worker` does for a job: its engine reads the prompt, and the cache keeps what that gave."""

import threading

from kvass.engines.transformers import Engine, Scope
from kvass.errors import InputError, TierError
from kvass.jobs import DoJob, Job
from kvass.quality import Budget

_VISIBLE_SECONDS = 30.0


def reading(engine: Engine) -> DoJob:
    """Has the engine read a job's prompt, in the name of its tenant."""

    def read(job: Job, cancelled: threading.Event) -> str | None:
        scope = Scope(job.tenant, job.public, budget=_budget(job), digests=True)
        usage = engine.read(job.prompt(), scope=scope, cancelled=cancelled)
        if usage.finish_reason == "cancelled":
            return None
        try:
            stored = usage.ticket is None or usage.ticket.wait(_VISIBLE_SECONDS).copied
        except TimeoutError:
            stored = False
        if not stored:
            raise TierError("its KV was not stored in time")
        seconds = usage.load_seconds + usage.prefill_seconds
        return f"{usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} were stored, {seconds:.2f} s"

    return read


def _budget(job: Job) -> Budget | None:
    """Raises InputError for the budget of another kvass."""
    if job.budget is None:
        return None
    if len(job.budget) != len(Budget._fields):
        raise InputError(f"a budget has {len(Budget._fields)} fields, not {len(job.budget)}")
    return Budget(*job.budget)

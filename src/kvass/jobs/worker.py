"""A worker: takes jobs from a queue one at a time, does them, and says what came of each."""

import logging
import threading
import uuid
from collections.abc import Callable

from kvass.errors import KvassError
from kvass.jobs.job import Job
from kvass.jobs.queue import Jobs, Taken

log = logging.getLogger("kvass.worker")

_LOOK_SECONDS = 0.025
"""Between two looks at a queue that has nothing to do."""

DoJob = Callable[[Job, threading.Event], str | None]
"""Does a job, and says in some words what that was; None where it ended early, since the event was set. What
it stored is there for others when it returns. Raises KvassError where the job cannot be done."""


class Worker:
    """`work` runs until `stop`; the job under way is given back then, for another worker to go on with.

    Where a job is taken away, since this process stood still for too long, it ends early.
    """

    def __init__(self, jobs: Jobs, model: str, do: DoJob):
        """`model`: see `model_digest`."""
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
            did = self._do(taken.job, self._cancelled)
        except KvassError as error:
            self._jobs.failed(taken)
            log.warning("job %s failed: %s", name, error)
        except Exception:  # the outermost loop of a job: whatever happens in it ends that job and no other
            self._jobs.failed(taken)
            log.exception("job %s failed", name)
        else:
            if did is None:
                mine = self._jobs.give_back(taken)
                log.info("job %s %s", name, "given back" if mine else "is another worker's by now")
            else:
                mine = self._jobs.done(taken)
                late = "" if taken.awaited else ", for nobody"
                again = "" if mine else "; it was another worker's by then"
                log.info("job %s done: %s; it had waited %.2f s%s%s", name, did, taken.waited, late, again)
        finally:
            over.set()
            beat.join()

    def _keep(self, taken: Taken, over: threading.Event) -> None:
        """Say that this worker lives, until the job is over or somebody else's."""
        while not over.wait(self._jobs.lease_seconds / 3):
            if not self._jobs.renew(taken):
                self._cancelled.set()
                return

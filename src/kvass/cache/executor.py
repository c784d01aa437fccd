"""The cache's threads: I/O workers, one writer, one background worker, one housekeeper."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from kvass import metrics
from kvass.cache.pool import KVView
from kvass.container import Blob, Buffer
from kvass.errors import KvassError, TierError, TierUnavailableError

log = logging.getLogger("kvass.cache")

T = TypeVar("T")
U = TypeVar("U")


class Copying:
    """Tracks when a store no longer needs its source, and lets the caller give up before it began.

    The source may be reused as soon as `wait` returns: either everything was copied, or nothing will be.
    """

    def __init__(self, source: KVView | None = None) -> None:
        self._changed = threading.Condition()
        self._source = source
        self._active = 0
        self._over = False
        self.given_up = False

    def take(self) -> KVView | None:
        """The source, once; None when the store was given up. A store that waits does not keep it alive."""
        with self._changed:
            source, self._source = self._source, None
            return source

    def wrap(self, blob: Blob) -> "Blob":
        """The same blob, counted while it is being read."""
        return _Counted(blob, self)

    def begin(self) -> None:
        """A thread starts to read the source. Raises TierError when the store was given up."""
        with self._changed:
            if self.given_up:
                raise TierError("the store was given up")
            self._active += 1

    def end(self) -> None:
        """A thread stopped reading the source."""
        with self._changed:
            self._active -= 1
            self._changed.notify_all()

    def over(self) -> None:
        """Nothing will be read any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until the source was copied; after `seconds`, give up and return False."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, seconds):
                self.given_up = True
                self._source = None
                self._changed.wait_for(lambda: self._active == 0)
            return not self.given_up


class _Counted:
    def __init__(self, blob: Blob, copying: Copying):
        self._blob = blob
        self._copying = copying

    @property
    def size(self) -> int:
        return self._blob.size

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        self._copying.begin()
        try:
            yield from self._blob.pieces()
        finally:
            self._copying.end()


class Workers:
    """Threads that run jobs in the order in which they came.

    Not those of `concurrent.futures`: the interpreter waits for them at its end, for ever where one
    stands still in a tier.
    """

    def __init__(self, count: int, name: str):
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._done = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del job, future, function  # what they hold must not live until the next job comes
            self._done += 1

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a job. Raises TierUnavailableError after `close`, and in a forked child."""
        if self._pid != os.getpid():
            raise TierUnavailableError("the cache was opened before a fork; open it again")
        future: Future[T] = Future()
        with self._guard:
            if self._closed:
                raise TierUnavailableError("the cache is closed")
            self._jobs.put((future, function))
        return future

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """`map` over the threads. Ends, by an exception too, only when no call is running any more."""
        futures: list[Future[U]] = []
        try:
            futures.extend(self.submit(partial(function, item)) for item in items)
            for future in futures:
                yield future.result()
        finally:
            running = [future for future in futures if not future.done() and not future.cancel()]
            if running:
                wait(running)

    def share(self, function: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """The results of `map`, all at once: each thread takes the next item by itself, which spares a
        hand-over of the interpreter's lock for each item. Ends only when no call is running any more."""
        todo = list(items)
        found: dict[int, U] = {}
        numbers = iter(range(len(todo)))

        def work() -> None:
            for number in numbers:
                found[number] = function(todo[number])

        futures: list[Future[None]] = []
        try:
            futures.extend(self.submit(work) for _ in range(min(len(self._threads), len(todo))))
            for number, future in enumerate(futures):
                if not number or not future.cancel():  # once one is through, who has not begun need not
                    future.result()
        finally:
            wait([future for future in futures if not future.cancel()])
        return [found[number] for number in range(len(todo))]

    def close(self, patience: float) -> bool:
        """Take no more jobs and finish those there are; False when none ended for `patience` seconds."""
        with self._guard:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)
        for thread in self._threads:
            while thread.is_alive():
                before = self._done
                thread.join(patience)
                if thread.is_alive() and self._done == before:
                    return False
        return True


class Executor:
    """Runs what must not run on the engine's thread. Jobs never raise into the threads' loops."""

    def __init__(self, io_threads: int, housekeeping: Callable[[], None], interval: float = 1.0):
        self._io = Workers(io_threads, "kvass-io")
        self._writer = Workers(1, "kvass-writer")
        self._background = Workers(1, "kvass-background")
        self._background_io = Workers(io_threads, "kvass-background-io")
        self._housekeeping = housekeeping
        self._stop = threading.Event()
        self._housekeeper = threading.Thread(
            target=self._keep_house, args=(interval,), name="kvass-housekeeper", daemon=True
        )
        self._housekeeper.start()

    def io_map(self, function: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """`map` over the I/O threads, all results at once."""
        return self._io.share(function, items)

    def io_stream(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """`map` over the I/O threads, each result as soon as it and those before it are there."""
        return self._io.map(function, items)

    def background_io_map(self, function: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """`map` over threads that loads never wait for."""
        return self._background_io.share(function, items)

    def write(self, job: Callable[[], None]) -> "Future[None]":
        """Run a store, after those before it. Raises TierUnavailableError when closed."""
        return self._writer.submit(partial(self._guarded, job, "store"))

    def background(self, job: Callable[[], None]) -> None:
        """Run a cascade, promotion or removal, after those before it; not at all when closed."""
        try:
            self._background.submit(partial(self._guarded, job, "background"))
        except TierUnavailableError:
            metrics.errors.labels("cache", "background").inc()

    @staticmethod
    def _guarded(job: Callable[[], None], operation: str) -> None:
        """A thread's outermost loop: what happens here must not end it, nor reach who waits for a store."""
        try:
            job()
        except (KvassError, OSError) as error:
            metrics.errors.labels("cache", operation).inc()
            log.warning("kvass: a %s job failed: %s", operation, error)
        except Exception:
            metrics.errors.labels("cache", operation).inc()
            log.exception("kvass: a %s job failed", operation)

    def _keep_house(self, interval: float) -> None:
        while not self._stop.wait(interval):
            self._guarded(self._housekeeping, "housekeeping")

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all that was asked for so far is done. Raises TimeoutError after `seconds`."""
        for workers in (self._writer, self._background):  # a store asks for its cascade
            try:
                done = workers.submit(lambda: None)
            except TierUnavailableError:
                return
            done.result(seconds)

    def close(self, patience: float) -> bool:
        """Finish what was asked for, then stop; False when something stood still for `patience` seconds."""
        self._stop.set()
        for workers in (self._writer, self._background, self._background_io, self._io):
            if not workers.close(patience):
                return False
        self._housekeeper.join(patience)
        return not self._housekeeper.is_alive()

"""The cache's threads: I/O workers, one writer, one background worker, one housekeeper."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvass import metrics
from kvass.container import Blob, Buffer
from kvass.errors import KvassError, TierError

log = logging.getLogger("kvass.cache")

T = TypeVar("T")
U = TypeVar("U")


class Copying:
    """Tracks when a store no longer needs its source, and lets the caller give up before it began.

    The source may be reused as soon as `wait` returns: either everything was copied, or nothing will be.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0
        self._over = False
        self.given_up = False

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
                self._changed.wait_for(lambda: self._active == 0)
            return not self.given_up


class _Counted:
    def __init__(self, blob: Blob, copying: Copying):
        self._blob = blob
        self._copying = copying
        self.size = blob.size

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        self._copying.begin()
        try:
            yield from self._blob.pieces()
        finally:
            self._copying.end()


class Executor:
    """Runs what must not run on the engine's thread. Jobs never raise into the threads' loops."""

    def __init__(self, io_threads: int, housekeeping: Callable[[], None], interval: float = 1.0):
        self._io = ThreadPoolExecutor(io_threads, "kvass-io")
        self._writer = ThreadPoolExecutor(1, "kvass-writer")
        self._background = ThreadPoolExecutor(1, "kvass-background")
        self._background_io = ThreadPoolExecutor(io_threads, "kvass-background-io")
        self._housekeeping = housekeeping
        self._stop = threading.Event()
        self._housekeeper = threading.Thread(
            target=self._keep_house, args=(interval,), name="kvass-housekeeper", daemon=True
        )
        self._housekeeper.start()

    def io_map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterable[U]:
        """`map` over the I/O threads."""
        return self._io.map(function, items)

    def background_io_map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterable[U]:
        """`map` over threads that loads never wait for."""
        return self._background_io.map(function, items)

    def write(self, job: Callable[[], None]) -> "Future[None]":
        """Run a store, after those before it."""
        return self._writer.submit(self._guarded, job, "store")

    def background(self, job: Callable[[], None]) -> "Future[None]":
        """Run a cascade, promotion or removal, after those before it."""
        return self._background.submit(self._guarded, job, "background")

    @staticmethod
    def _guarded(job: Callable[[], None], operation: str) -> None:
        try:
            job()
        except (KvassError, OSError, KeyError) as error:
            metrics.errors.labels("cache", operation).inc()
            log.warning("kvass: a %s job failed: %s", operation, error)

    def _keep_house(self, interval: float) -> None:
        while not self._stop.wait(interval):
            self._guarded(self._housekeeping, "housekeeping")

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all that was asked for so far is done."""
        for pool in (self._writer, self._background):  # a store asks for its cascade
            pool.submit(lambda: None).result(seconds)

    def close(self) -> None:
        """Finish what was asked for, then stop."""
        self._stop.set()
        for pool in (self._writer, self._background, self._background_io, self._io):
            pool.shutdown(wait=True)
        self._housekeeper.join()

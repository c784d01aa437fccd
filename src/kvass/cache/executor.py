"""The cache's threads: I/O workers, one writer, one background worker, one housekeeper."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvass import metrics
from kvass.cache.pool import KVView
from kvass.container import Blob, Buffer
from kvass.errors import KvassError, TierError, TierUnavailableError
from kvass.tiers.base import Run
from kvass.tiers.remote import FAR_THREADS
from kvass.workers import Workers

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

    def wrap(self, blob: Blob) -> "CountedBlob":
        """The same blob, counted while it is being read."""
        return CountedBlob(blob, self)

    def begin(self) -> None:
        """A thread starts to read the source. Raises TierError when the store was given up."""
        with self._changed:
            if self.given_up:
                raise TierError("its store waited longer than store_deadline")
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


class CountedBlob:
    """A blob that tells while it reads the source."""

    def __init__(self, blob: Blob, copying: Copying):
        self._blob = blob
        self._copying = copying

    @property
    def size(self) -> int:
        return self._blob.size

    def remade(self, make: Callable[[Blob], Blob]) -> "CountedBlob":
        """What `make` makes of the blob, now. Raises TierError where the store was given up, and what `make`
        raises."""
        self._copying.begin()
        try:
            return CountedBlob(make(self._blob), self._copying)
        finally:
            self._copying.end()

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        self._copying.begin()
        try:
            yield from self._blob.pieces()
        finally:
            self._copying.end()


class Lane:
    """The way down to one lower tier: jobs in order, on threads that nothing else waits for; bounded."""

    def __init__(self, tier: str, most: int, io_threads: int):
        self._tier = tier
        self._most = most
        self._guard = threading.Lock()
        self._objects = 0
        self._gauge = metrics.queued_objects.labels(tier)
        self.worker = Workers(1, f"kvass-to-{tier}")
        self.io = Workers(io_threads, f"kvass-to-{tier}-io")

    def submit(self, objects: int, job: Callable[[], None]) -> bool:
        """Run a job that writes so many objects; False, and nothing, where too many wait already.

        Raises TierUnavailableError when closed.
        """
        with self._guard:
            if self._objects and self._objects + objects > self._most:
                return False
            self._objects += objects
            self._gauge.set(self._objects)
        try:
            self.worker.submit(job).add_done_callback(lambda _: self._done(objects))
        except TierUnavailableError:
            self._done(objects)
            raise
        return True

    def _done(self, objects: int) -> None:
        with self._guard:
            self._objects -= objects
            self._gauge.set(self._objects)


class Executor:
    """Runs what must not run on the engine's thread. Jobs never raise into the threads' loops."""

    def __init__(
        self,
        io_threads: int,
        housekeeping: Callable[[], None],
        interval: float = 1.0,
        *,
        lanes: Iterable[str] = (),
        lane_objects: int = 4096,
        far: bool = False,
    ):
        """`lanes`: names of the lower tiers; `lane_objects`: how many objects may wait for each; `far`: some
        are on other machines, which takes threads that may wait for those."""
        self._io = Workers(io_threads, "kvass-io")
        self._writer = Workers(1, "kvass-writer")
        self._background = Workers(1, "kvass-background")
        self._background_io = Workers(io_threads, "kvass-background-io")
        self._staging = Workers(io_threads if far else 1, "kvass-staging")
        self._staging_io = Workers(max(FAR_THREADS, io_threads) if far else 0, "kvass-staging-io")
        self._lanes = {name: Lane(name, lane_objects, io_threads) for name in lanes}
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

    def staging_io_map(self, function: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """`map` over threads that may wait for another machine, and the caller's: it waits for no others."""
        return self._staging_io.share(function, items, here=True)

    def lane_io_map(self, tier: str) -> Run:
        """`map` over threads that only writes to that lower tier use."""
        return self._lanes[tier].io.share

    def write(self, job: Callable[[], None]) -> "Future[None]":
        """Run a store, after those before it. Raises TierUnavailableError when closed."""
        return self._writer.submit(partial(self._guarded, job, "store"))

    def background(self, job: Callable[[], None]) -> None:
        """Run a promotion or removal, after those before it; not at all when closed."""
        try:
            self._background.submit(partial(self._guarded, job, "background"))
        except TierUnavailableError:
            metrics.errors.labels("cache", "background").inc()

    def stage(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job that waits for other machines. Raises TierUnavailableError when closed."""
        return self._staging.submit(job)

    def behind(self, tier: str, objects: int, job: Callable[[], None]) -> bool:
        """Write so many objects to a lower tier, after those before; False where too many wait already."""
        try:
            return self._lanes[tier].submit(objects, partial(self._guarded, job, "cascade"))
        except TierUnavailableError:
            metrics.errors.labels("cache", "cascade").inc()
            return True

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
        lanes = [lane.worker for lane in self._lanes.values()]
        for workers in (self._writer, self._background, *lanes):  # a store asks for its cascade
            try:
                done = workers.submit(lambda: None)
            except TierUnavailableError:
                return
            done.result(seconds)

    def close(self, patience: float) -> bool:
        """Finish what was asked for, then stop; False when something stood still for `patience` seconds."""
        self._stop.set()
        lanes = [workers for lane in self._lanes.values() for workers in (lane.worker, lane.io)]
        ends = (
            self._writer,
            self._staging,
            self._background,
            self._background_io,
            self._staging_io,
            self._io,
        )
        all_of_them = (*ends, *lanes)
        for workers in all_of_them:
            if not workers.close(patience, lambda: sum(one.done for one in all_of_them)):
                return False
        self._housekeeper.join(patience)
        return not self._housekeeper.is_alive()

"""Threads that run jobs in the order in which they came."""

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from kvass.errors import TierUnavailableError

T = TypeVar("T")
U = TypeVar("U")


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
        self.done = 0
        """Calls that ended, more or less: says whether anything moves."""
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
            self.done += 1

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

    def share(self, function: Callable[[T], U], items: Iterable[T], *, here: bool = False) -> list[U]:
        """The results of `map`, all at once: each thread takes the next item by itself, which spares a
        hand-over of the interpreter's lock for each item. `here`: the caller's thread takes items too, so
        that it does not wait for threads that are busy. Ends only when no call is running any more."""
        todo = list(items)
        found: dict[int, U] = {}
        numbers = iter(range(len(todo)))

        def work() -> None:
            for number in numbers:
                found[number] = function(todo[number])
                self.done += 1

        futures: list[Future[None]] = []
        try:
            futures.extend(self.submit(work) for _ in range(min(len(self._threads), len(todo))))
            if here:
                work()
            for number, future in enumerate(futures):
                # once one is through, who has not begun need not
                if not (number or here) or not future.cancel():
                    future.result()
        finally:
            wait([future for future in futures if not future.cancel()])
        return [found[number] for number in range(len(todo))]

    def close(self, patience: float, moved: Callable[[], int] | None = None) -> bool:
        """Take no more jobs and finish those there are; False when none ended, and `moved` gave the same,
        for `patience` seconds."""
        with self._guard:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)
        for thread in self._threads:
            while thread.is_alive():
                before = moved() if moved else self.done
                thread.join(patience)
                if thread.is_alive() and (moved() if moved else self.done) == before:
                    return False
        return True

"""Calls to a server that may be slow, away or broken: deadline, bounded retry, circuit breaker."""

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TypeVar

from kvass import metrics
from kvass.errors import KvassError, TierUnavailableError
from kvass.tiers.breaker import Breaker
from kvass.workers import Workers

T = TypeVar("T")

_ATTEMPTS = 3
_PAUSE_SECONDS = 0.02
"""Before the second attempt, on average; doubled for the third."""
_CLOSE_SECONDS = 2.0


def _late(late: Callable[[T], None], done: "Future[T]") -> None:
    if done.exception() is None:
        late(done.result())


class Caller:
    """Runs calls on threads of its own, so that whoever waits for one can stop waiting."""

    def __init__(self, name: str, seconds: float, threads: int, state: Callable[[int], None]):
        """`seconds`: what one call may take where nobody set a nearer deadline. `state`: told of changes."""
        self._name = name
        self._seconds = seconds
        self._random = random.Random()
        self._breaker = Breaker(name, state)
        self._workers = Workers(threads, f"kvass-{name}")
        self._pid = os.getpid()
        self._closed = False

    def check(self) -> None:
        """Raises TierUnavailableError once closed, and in a forked child."""
        if self._pid != os.getpid():
            raise TierUnavailableError(f"the {self._name} tier was opened before a fork; open it again")
        if self._closed:
            raise TierUnavailableError(f"the {self._name} tier is closed")

    def call(
        self, function: Callable[[], T], until: float | None, late: Callable[[T], None] = lambda _: None
    ) -> T:
        """A call's result, by `until` (monotonic seconds) at the latest; what may pass is tried again.

        `late`: given the result of a call that nobody waits for any more. Raises what the call raises, and
        TierUnavailableError where there is no answer in time or the breaker is open.
        """
        self.check()
        end = time.monotonic() + self._seconds
        end = end if until is None else min(end, until)
        pause = _PAUSE_SECONDS
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._once(function, end, late)
            except TierUnavailableError:
                wait = pause * self._random.uniform(0.5, 1.5)
                if time.monotonic() + wait >= end or self._breaker.is_open:
                    raise
            metrics.retries.labels(self._name).inc()
            time.sleep(wait)
            pause *= 2
        return self._once(function, end, late)

    def _once(self, function: Callable[[], T], end: float, late: Callable[[T], None]) -> T:
        left = end - time.monotonic()
        if left <= 0:
            raise TierUnavailableError(f"{self._name}: no time is left")
        self._breaker.enter()
        answered = False
        try:
            future = self._workers.submit(function)
            try:
                result = future.result(left)
            except FutureTimeoutError:
                if not future.cancel():
                    future.add_done_callback(partial(_late, late))
                raise TierUnavailableError(f"{self._name} did not answer within {left:.3g} s") from None
            answered = True
            return result
        except TierUnavailableError:
            raise
        except (KeyError, KvassError):
            answered = True
            raise
        finally:
            (self._breaker.succeeded if answered else self._breaker.failed)()

    def close(self) -> bool:
        """Take no more calls; False where it was closed already or belongs to a forked child's parent."""
        if self._closed or self._pid != os.getpid():
            return False
        self._closed = True
        self._workers.close(_CLOSE_SECONDS)
        return True

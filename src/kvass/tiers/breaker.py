"""A circuit breaker: after several failures in a row nobody waits for a server until a probe succeeds."""

import random
import threading
from collections.abc import Callable
from time import monotonic

from kvass.errors import TierUnavailableError

_FAILURES = 3
_FIRST_SECONDS = 1.0
_MOST_SECONDS = 30.0


class Breaker:
    """Closed, open for a time that doubles (with jitter), then half open: one caller tries.

    `state`: told of each change (0 closed, 1 half open, 2 open).
    """

    def __init__(self, name: str, state: Callable[[int], None], seed: int | None = None):
        self._name = name
        self._state = state
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._failures = 0
        self._wait = _FIRST_SECONDS
        self._until = 0.0
        self._probing = False
        state(0)

    def enter(self) -> None:
        """Ask before a call; `succeeded` or `failed` must follow. Raises TierUnavailableError while open."""
        with self._guard:
            if self._failures < _FAILURES:
                return
            now = monotonic()
            if self._probing or now < self._until:
                raise TierUnavailableError(
                    f"{self._name} failed {self._failures} times in a row and is left alone for now"
                )
            self._probing = True
            self._state(1)

    @property
    def is_open(self) -> bool:
        """Whether a call would be refused now."""
        with self._guard:
            return self._failures >= _FAILURES and (self._probing or monotonic() < self._until)

    def succeeded(self) -> None:
        """The server answered, whatever it said."""
        with self._guard:
            was, self._failures, self._probing = self._failures, 0, False
            self._wait = _FIRST_SECONDS
            if was >= _FAILURES:
                self._state(0)

    def failed(self) -> None:
        """The server did not answer, or not in time."""
        with self._guard:
            late = self._failures >= _FAILURES and not self._probing  # began before it opened
            self._failures += 1
            self._probing = False
            if self._failures < _FAILURES or late:
                return
            self._until = monotonic() + self._wait * self._random.uniform(0.75, 1.25)
            self._wait = min(2 * self._wait, _MOST_SECONDS)
            self._state(2)

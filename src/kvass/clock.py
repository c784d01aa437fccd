"""Time as an object, so that tests can make it jump."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the epoch; may jump, so nothing that must be right depends on it."""

    def __call__(self) -> float: ...


def system_clock() -> float:
    """The machine's wall clock, in seconds since the epoch."""
    return time.time()

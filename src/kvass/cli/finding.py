"""One thing that `kvass doctor` found, and how long it looks."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from kvass.errors import KvassError

Status = Literal["ok", "warning", "problem"]

BROKEN = (KvassError, OSError, RuntimeError, ValueError, KeyError, TypeError, ImportError)
"""What a machine in disorder makes these checks raise: it is reported, not passed on."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: where, how it is and, where that is not well, what to do."""

    area: str
    name: str
    status: Status
    text: str
    fix: str | None = None


def guarded(area: str, name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a check finds, and where it fails that."""
    try:
        yield from check()
    except BROKEN as error:
        yield Finding(area, name, "problem", f"cannot look: {error}", "mend what the message names")


def within(seconds: float, findings: Iterator[Finding], late: Finding) -> Iterator[Finding]:
    """What is found in this time, and `late` where more was to come."""
    found: SimpleQueue[Finding | None] = SimpleQueue()

    def look() -> None:
        try:
            for one in findings:
                found.put(one)
        finally:
            found.put(None)

    threading.Thread(target=look, daemon=True).start()
    end = time.monotonic() + seconds
    while True:
        try:
            one = found.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            yield late
            return
        if one is None:
            return
        yield one

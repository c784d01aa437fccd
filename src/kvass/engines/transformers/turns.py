"""Whose turn it is to compute: one request at a time, without one that was abandoned blocking the rest."""

import threading
import time
from collections import deque

_POLL_SECONDS = 0.02


class Turns:
    """Requests compute one after another, in the order in which they asked.

    A request keeps its turn while its consumer looks at a token. Where the consumer takes longer than
    `patience` seconds, or waits for another request in the very thread that would have to go on, the turn
    passes on; the request queues again when it is asked for its next token, and loses nothing.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._holder: object = None
        self._thread = 0
        self._paused_at: float | None = None

    def take(self, who: object, cancelled: threading.Event) -> bool:
        """Wait until it is the turn of `who`; False if cancelled before."""
        with self._changed:
            if self._holder is not who:
                self._waiting.append(who)
                try:
                    while self._waiting[0] is not who or not self._free():
                        if cancelled.is_set():
                            return False
                        self._changed.wait(_POLL_SECONDS)
                finally:
                    self._waiting.remove(who)
            self._holder, self._thread, self._paused_at = who, threading.get_ident(), None
            return True

    def _free(self) -> bool:
        if self._holder is None:
            return True
        if self._paused_at is None:
            return False
        return self._thread == threading.get_ident() or time.monotonic() - self._paused_at >= self._patience

    def pause(self, who: object) -> None:
        """`who` computes nothing until it takes its turn again."""
        with self._changed:
            if self._holder is who:
                self._paused_at = time.monotonic()

    def leave(self, who: object) -> None:
        """`who` is done. More than once is fine."""
        with self._changed:
            if self._holder is who:
                self._holder = None
                self._changed.notify_all()

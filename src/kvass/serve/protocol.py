"""HTTP/1.1 for clients of any intent: whoever sends a request's head too slowly is let go."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def with_deadline(seconds: float) -> type[H11Protocol]:
    """A protocol for uvicorn, which itself waits for ever for a head that never ends.

    Bodies are the guard's matter, and idle connections uvicorn's own.
    """

    class Protocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._computing():
                self._drop_deadline()
            else:  # the beginning of a next head
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._drop_deadline()
            super().connection_lost(exc)

        def _computing(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _expect_head(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(seconds, self._too_slow)

        def _drop_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            self._deadline = None
            if not self._computing() and not self.transport.is_closing():
                self.transport.close()

    return Protocol

"""The contract of a store: a server that keeps whole objects by name. `RemoteTier` makes a tier of it.

A store does one call at a time per thread and may be used by many threads at once. It neither retries nor
waits for long: `RemoteTier` does the retrying, and bounds every call by a deadline of its own.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from kvass.config import Settings
from kvass.container import Buffer


def _nothing() -> None:
    pass


class Fetched(NamedTuple):
    """An object's bytes, in order and in as many parts as they came; valid until `release` is called."""

    parts: Sequence[Buffer]
    release: Callable[[], None] = _nothing


class Listed(NamedTuple):
    """One stored object, as listed: bytes, and when it was written (seconds since the epoch; 0: unknown)."""

    name: str
    size: int
    created: float


class Held(NamedTuple):
    """What a store says of itself: bytes and objects held, bytes it may hold; -1: it does not say."""

    bytes: int
    budget: int
    objects: int


class Store(abc.ABC):
    """Objects by name, written once.

    Names are ASCII: letters, digits, `/`, `-`, `_` and `.`. Every method may raise

    - `TierUnavailableError` for what may pass: no connection, a timeout, a server that is starting, busy
      or says 5xx. It is tried again, and enough of it opens the circuit breaker;
    - `TierFullError` where there is no room; not tried again;
    - `TierError` for anything else (refused credentials, no such bucket); not tried again;
    - `CorruptObjectError` where what came is not what was asked for: too short, a wrong range.

    No message, repr or log of a store holds a password or a secret key.
    """

    @classmethod
    @abc.abstractmethod
    def open(cls, settings: Settings) -> Self:
        """The store that the settings name. Connects to nothing yet. Raises ConfigError, naming the setting
        or the extra that is missing, and what to do."""

    @abc.abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which objects are there, in as few round trips as the server allows."""

    @abc.abstractmethod
    def get(self, name: str, limit: int) -> Fetched:
        """A whole object. Raises KeyError when it is not there, or not all of it; CorruptObjectError, before
        anything large is read, when it has more than `limit` bytes."""

    @abc.abstractmethod
    def head(self, name: str, size: int) -> tuple[int, Buffer]:
        """An object's size and its first `size` bytes (all, where it has fewer). Raises KeyError."""

    @abc.abstractmethod
    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Write an object: visible with all its bytes or not at all, and never in place of another. False
        where the name was there already, or is just being written by somebody else. What fails leaves
        nothing that is visible, nor stays for long."""

    @abc.abstractmethod
    def delete(self, names: Sequence[str]) -> int:
        """Delete objects; how many were there, as far as the server tells. May take two round trips."""

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[Listed]:
        """All objects whose names begin so, in no order, while the store goes on changing."""

    @abc.abstractmethod
    def held(self) -> Held:
        """What the server says that it holds, of everybody's. Cheap, or -1."""

    @abc.abstractmethod
    def advice(self) -> Iterator[tuple[str, str | None]]:
        """For `kvass doctor`: connects, and yields what was found and, where that is not well, what to do."""

    def maintain(self) -> None:  # noqa: B027 - most have nothing to do
        """Called every second or so: ends what takes longer than a call may. Waits for nothing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give connections and buffers back. More than once is fine."""

"""The contract of a tier; `kvass.testing.tiers` is its conformance suite.

An object is visible only once all its bytes and its record are in place. A tier never answers with
bytes that it knows to be doubtful, but it does not verify them either: whoever reads does.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kvass.chunks import Tokens
from kvass.container import Blob, Reader
from kvass.fingerprints import Fingerprints


class WriteItem(NamedTuple):
    """One object to be stored.

    `parent`: address of the chunk before it, None for a sequence's first. `tokens` only for objects of
    the primary group, whose tree answers `nearest_child`. `marks`: fingerprints that are to lead to it (see
    `Marking`), places relative to its first token.
    """

    address: bytes
    parent: bytes | None
    root: bytes
    position: int
    length: int
    tokens: Tokens | None
    blob: Blob
    marks: Fingerprints | None = None


Run = Callable[[Callable[[WriteItem], bool], Iterable[WriteItem]], Iterable[bool]]
"""`map`, or an executor's: how a tier spreads the copying of several objects over the caller's threads.

It ends, by an exception too, only when none of the calls is running any more.
"""


class Child(NamedTuple):
    """A stored chunk that begins with what was asked for: its address, its tokens, how many agree."""

    address: bytes
    length: int
    common: int


class Mark(NamedTuple):
    """A fingerprint's value stands at `place` of a stored chunk, relative to its first token: less than 0
    where it begins in a chunk before it."""

    value: int
    address: bytes
    place: int


class Entry(NamedTuple):
    """One stored object, as listed. Times in seconds since the epoch."""

    address: bytes
    parent: bytes | None
    root: bytes
    position: int
    length: int
    size: int
    created: float
    accessed: float
    pinned_until: float


class Usage(NamedTuple):
    """Bytes charged against the budget (block-rounded; what is being written included) and objects."""

    bytes: int
    budget: int
    objects: int


class Lease(AbstractContextManager["Lease"]):
    """Objects that eviction leaves alone until `close` or until the lease's time is over."""

    def __init__(self, addresses: Sequence[bytes], release: Callable[[], None]):
        self.addresses = tuple(addresses)
        self._release = release

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lease. More than once is fine."""
        release, self._release = self._release, lambda: None
        release()


class Tier(abc.ABC):
    """Where objects are kept.

    Every method may raise TierError; the cache answers it with a miss. `durable`: survives a restart
    of the machine. `shared`: other processes see the same objects. `remote`: on another machine, where
    holes, a budget of the server's own and silence are possible (see `kvass.tiers.remote`); what is said
    below of parents, budgets, pins and leases holds for the others, at every moment.
    """

    name: str
    durable: bool
    shared: bool
    remote = False

    def within(self, root: bytes, until: float | None = None) -> "Tier":
        """This tier for one request: for objects of that root only, and all calls together end by `until`
        (monotonic seconds). Remote tiers name objects by namespace and need it; others answer themselves."""
        return self

    @abc.abstractmethod
    def contains(self, addresses: Sequence[bytes]) -> list[bool]:
        """Which of the objects are there. Costs one index read each."""

    @abc.abstractmethod
    def nearest_child(self, parent: bytes, tokens: Tokens) -> Child | None:
        """The chunk stored behind `parent` (an address; a root's for a first chunk) with the longest
        common beginning with `tokens`, or None if nothing agrees. Costs a few index reads, however many
        children there are."""

    @abc.abstractmethod
    def open(self, address: bytes) -> AbstractContextManager[Reader]:
        """An object's bytes. Raises KeyError when it is not there. Stays readable while open, even if
        the object is evicted meanwhile."""

    @abc.abstractmethod
    def write(self, items: Sequence[WriteItem], run: Run = map) -> list[bool]:
        """Store objects, parents before children. Returns which are in the tier afterwards.

        An object whose parent is missing is not stored, nor one for which no room may be freed. One that
        is there already is left as it is. One that extends a childless sibling replaces it, and inherits
        its pin. What fails leaves nothing: a blob that raises OSError or KvassError is not stored; anything
        else it raises passes through.
        """

    @abc.abstractmethod
    def delete(self, addresses: Sequence[bytes]) -> int:
        """Delete objects with every part and everything stored behind them; how many went. Pins and
        leases do not hold against this."""

    @abc.abstractmethod
    def quarantine(self, address: bytes) -> None:
        """Take a corrupt object out of sight, keeping its bytes for inspection as long as there is room."""

    @abc.abstractmethod
    def touch(self, addresses: Sequence[bytes]) -> None:
        """Note that objects were used now. Returns at once; may be lost in a crash."""

    @abc.abstractmethod
    def pin(self, addresses: Sequence[bytes], until: float) -> int:
        """Keep objects from eviction until that time (0: unpin); how many of them are there."""

    @abc.abstractmethod
    def lease(self, addresses: Sequence[bytes], seconds: float) -> Lease:
        """Hold objects for a promise to an engine; those that are not there are left out of the lease."""

    @abc.abstractmethod
    def scan(self) -> Iterator[Entry]:
        """All objects, in no order, while the tier goes on changing."""

    @abc.abstractmethod
    def usage(self) -> Usage:
        """What is charged, at this moment, over all processes."""

    @abc.abstractmethod
    def maintain(self) -> None:
        """Housekeeping, called every second or so from a background thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Afterwards every call raises TierUnavailableError."""


@runtime_checkable
class Replacing(Protocol):
    """A tier that can replace what it holds."""

    def replace(self, item: WriteItem) -> bool:
        """Write an object in place of the one at its address, at once: whoever opens it gets one of both,
        whole. Parent, children and pin stay. False, and nothing changed, where there is none or no room."""


@runtime_checkable
class Pruning(Protocol):
    """A tier that keeps a tree, and can take objects out of it that nothing depends on."""

    def delete_leaves(self, addresses: Sequence[bytes]) -> int:
        """Delete objects with every part, but none that is pinned or has something stored behind it, by
        anybody, up to this moment; how many went."""


MOST_MARKS: Final = 4
"""Of a fingerprint that many chunks have, a tier keeps no more than that, the latest ones."""


@runtime_checkable
class Marking(Protocol):
    """A tier that finds chunks by fingerprints of their text, wherever in a sequence they stand."""

    def seen(self, root: bytes, values: Sequence[int]) -> list[Mark]:
        """Where under that root these fingerprints were stored: up to `MOST_MARKS` of each, of objects that
        are there. Whoever asks compares the tokens. Costs an index read a value and chunk."""

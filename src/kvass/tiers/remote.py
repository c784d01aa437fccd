"""A tier on another machine: a store with a deadline, bounded retries and a circuit breaker around it.

Remote tiers keep no tree: a hole just ends a match, children are not found by their tokens, and whoever
runs the server decides what is evicted. Nothing is promised from them: what they hold is staged first.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from kvass import metrics
from kvass.chunks import Tokens
from kvass.container import ALIGNMENT, MAX_HEADER_BYTES, Buffer, Header, read_header
from kvass.errors import CorruptObjectError, InputError, KvassError, TierError
from kvass.keys import address_text, parse_address
from kvass.tiers.base import Child, Entry, Lease, Run, Tier, Usage, WriteItem
from kvass.tiers.caller import Caller
from kvass.tiers.memory import BytesReader, collect
from kvass.tiers.store import Fetched, Listed, Store

log = logging.getLogger("kvass.tiers")

T = TypeVar("T")

_MAX_OBJECT_BYTES = 1 << 30

FAR_THREADS = 4
"""Wait for other machines at once, at least: that is most of what they do."""


class RemoteReader(contextlib.AbstractContextManager["RemoteReader"]):
    """A fetched object, in the parts in which it came."""

    def __init__(self, fetched: Fetched):
        self._fetched = fetched
        self.parts = [memoryview(part) for part in fetched.parts]
        self.size = sum(map(len, self.parts))

    def __exit__(self, *_: object) -> None:
        self.parts = []
        self._fetched.release()

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Copy into the buffers, one after the other. Raises CorruptObjectError past the end."""
        if offset + sum(map(len, buffers)) > self.size:
            raise CorruptObjectError(f"object ends at {self.size}, before it was read")
        pieces = self._from(offset)
        piece = memoryview(b"")
        for buffer in buffers:
            done, target = 0, memoryview(buffer)
            while done < len(target):
                piece = piece or next(pieces)
                step = min(len(piece), len(target) - done)
                target[done : done + step] = piece[:step]
                piece, done = piece[step:], done + step

    def _from(self, offset: int) -> Iterator[Buffer]:
        for part in self.parts:
            if offset < len(part):
                yield part[offset:]
            offset = max(0, offset - len(part))


class RemoteTier(Tier):
    """Objects as `<prefix><root in hex>/<address>` in a store."""

    durable = True
    shared = True
    remote = True

    def __init__(self, name: str, store: Store, *, call_seconds: float = 10.0, threads: int = FAR_THREADS):
        """Takes the store over. `call_seconds`: what one call of it may take."""
        self.name = name
        self._store = store
        states = {"ask": 0, "move": 0}

        def tell(which: str, state: int) -> None:
            states[which] = state
            metrics.remote_state.labels(name).set(max(states.values()))

        self._caller = Caller(name, call_seconds, threads, partial(tell, "move"))
        # A lookup neither waits for others' transfers, nor is its short time what a store has.
        self._asking = Caller(name, call_seconds, threads, partial(tell, "ask"))
        self._root = b""
        self._until: float | None = None

    def within(self, root: bytes, until: float | None = None) -> "RemoteTier":
        made = copy.copy(self)
        made._root, made._until = root, until
        return made

    def _call(self, function: Callable[[], T], late: Callable[[T], None] = lambda _: None) -> T:
        return self._caller.call(function, self._until, late)

    def _name(self, one: bytes) -> str:
        self._caller.check()
        if not self._root:
            raise TierError(f"objects of the {self.name} tier are found within a namespace only")
        return f"{self._root.hex()}/{address_text(one)}"

    # -- reading --------------------------------------------------------------------------------------

    def contains(self, addresses: Sequence[bytes]) -> list[bool]:
        self._caller.check()  # also where nothing is asked for
        names = [self._name(one) for one in addresses]
        if not names:
            return []
        caller = self._caller if self._until is None else self._asking
        return caller.call(lambda: self._store.exists(names), self._until)

    def nearest_child(self, parent: bytes, tokens: Tokens) -> Child | None:
        self._caller.check()
        return None

    def open(self, address: bytes) -> AbstractContextManager[RemoteReader]:
        name = self._name(address)
        return RemoteReader(
            self._call(lambda: self._store.get(name, _MAX_OBJECT_BYTES), lambda fetched: fetched.release())
        )

    def scan(self) -> Iterator[Entry]:
        self._caller.check()
        return self._scan()

    def _scan(self) -> Iterator[Entry]:
        for listed in self._listed():
            try:
                root, one = _parsed(listed.name)
                header = self._header(listed.name)
                parent = parse_address(header.parent) if header.parent else None
            except (KeyError, InputError, CorruptObjectError):
                continue  # gone meanwhile, or nothing of ours
            yield Entry(
                one, parent, root, header.position, len(header.tokens), listed.size, listed.created,
                listed.created, 0.0,
            )  # fmt: skip

    def _listed(self) -> Iterator[Listed]:
        """Everything below this root, or below all. The listing itself has no deadline but its calls'."""
        return self._store.list(f"{self._root.hex()}/" if self._root else "")

    def _header(self, name: str) -> Header:
        size, raw = self._call(lambda: self._store.head(name, 2 * ALIGNMENT))
        try:
            return read_header(_Beginning(size, raw)).header
        except CorruptObjectError:
            if size <= len(raw):
                raise
        size, raw = self._call(lambda: self._store.head(name, MAX_HEADER_BYTES))
        return read_header(_Beginning(size, raw)).header

    def usage(self) -> Usage:
        held = self._call(self._store.held)
        return Usage(max(0, held.bytes), max(0, held.budget), max(0, held.objects))

    # -- writing --------------------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], run: Run = map) -> list[bool]:
        self._caller.check()
        return list(run(self._write, items))

    def _write(self, item: WriteItem) -> bool:
        name = f"{item.root.hex()}/{address_text(item.address)}"
        try:
            data = collect(item.blob)
            if self._call(lambda: self._store.put(name, [memoryview(data)])):
                metrics.store_bytes.labels(self.name).inc(len(data))
        except (OSError, KvassError) as error:
            metrics.dropped_stores.labels(self.name, "error").inc()
            log.debug("kvass: %s: an object was not stored: %s", self.name, error)
            return False
        return True

    def delete(self, addresses: Sequence[bytes]) -> int:
        """Only the objects named, and nothing behind them: nobody knows what is there."""
        self._caller.check()
        if self._root:
            names = [self._name(one) for one in addresses]
        else:
            wanted = {address_text(one) for one in addresses}
            names = [listed.name for listed in self._listed() if listed.name.partition("/")[2] in wanted]
        return self._call(lambda: self._store.delete(names)) if names else 0

    def quarantine(self, address: bytes) -> None:
        """The server's room is not for broken objects: it is deleted."""
        if self.delete([address]):
            metrics.corrupt_objects.labels(self.name).inc()

    def touch(self, addresses: Sequence[bytes]) -> None:
        self._caller.check()

    def pin(self, addresses: Sequence[bytes], until: float) -> int:
        """None: the server decides what it keeps."""
        self._caller.check()
        return 0

    def lease(self, addresses: Sequence[bytes], seconds: float) -> Lease:
        """Of nothing: what is on another machine can be promised to nobody."""
        self._caller.check()
        return Lease((), lambda: None)

    def maintain(self) -> None:
        self._caller.check()
        self._store.maintain()

    def close(self) -> None:
        if self._asking.close() & self._caller.close():
            self._store.close()


class _Beginning(BytesReader):
    """The first bytes of an object of which more is stored."""

    def __init__(self, size: int, raw: Buffer):
        super().__init__(bytes(raw))
        self._held = len(raw)
        self.size = size

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if offset + sum(map(len, buffers)) > self._held:
            raise CorruptObjectError("the header is longer than what was fetched of it")
        super().read_into(offset, buffers)


def _parsed(name: str) -> tuple[bytes, bytes]:
    """Root and address of a name. Raises InputError for any other name."""
    root, _, text = name.partition("/")
    try:
        return bytes.fromhex(root), parse_address(text)
    except ValueError as error:
        raise InputError(f"{name!r} is no object of kvass") from error

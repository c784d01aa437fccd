"""The memory tier: objects in this process, gone with it. The reference for all other tiers."""

import bisect
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import monotonic

from kvass import metrics
from kvass.chunks import Tokens, common_prefix
from kvass.clock import Clock, system_clock
from kvass.container import Blob, Buffer, Reader
from kvass.errors import CorruptObjectError, TierUnavailableError
from kvass.keys import KEY_BYTES, address, split_address
from kvass.policy.eviction import EvictionPolicy, Facts, lru
from kvass.tiers.base import Child, Entry, Lease, Run, Tier, Usage, WriteItem

_SAMPLES = 8


class BytesReader:
    """An object that lies in memory."""

    def __init__(self, data: bytes | bytearray):
        self._data = memoryview(data)
        self.size = len(data)

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Copy into the buffers, one after the other."""
        for buffer in buffers:
            end = offset + len(buffer)
            if end > self.size:
                raise CorruptObjectError(f"object ends at {self.size}, before byte {end}")
            buffer[:] = self._data[offset:end]
            offset = end


def collect(blob: Blob) -> bytearray:
    """A blob's bytes in one piece."""
    data = bytearray(blob.size)
    view = memoryview(data)
    for offset, buffers in blob.pieces():
        at = offset
        for buffer in buffers:
            view[at : at + len(buffer)] = buffer
            at += len(buffer)
    return data


@dataclass(slots=True)
class _Object:
    data: bytearray
    item: WriteItem
    created: float
    accessed: float
    pinned_until: float = 0.0
    children: set[bytes] = field(default_factory=set)
    leases: list[float] = field(default_factory=list)


class MemoryTier(Tier):
    """Objects in a dict, under one lock; within `budget` bytes, the object being written included."""

    durable = False
    shared = False

    def __init__(
        self,
        budget: int,
        *,
        name: str = "host",
        policy: EvictionPolicy = lru,
        clock: Clock = system_clock,
        seed: int | None = None,
    ):
        self.name = name
        self._budget = budget
        self._policy = policy
        self._clock = clock
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._objects: dict[bytes, _Object] = {}
        self._used = 0
        self._parts: dict[bytes, list[bytes]] = {}
        self._siblings: dict[bytes, list[tuple[list[int], bytes]]] = {}
        self._closed = False

    def _open_or_raise(self) -> None:
        if self._closed:
            raise TierUnavailableError(f"the {self.name} tier is closed")

    def contains(self, addresses: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._open_or_raise()
            return [one in self._objects for one in addresses]

    def nearest_child(self, parent: bytes, tokens: Tokens) -> Child | None:
        with self._lock:
            self._open_or_raise()
            siblings = self._siblings.get(parent, [])
            at = bisect.bisect_left(siblings, (tokens.tolist(), b""))
            best = None
            for _, found in siblings[max(0, at - 1) : at + 1]:
                stored = self._objects[found].item.tokens
                assert stored is not None
                common = common_prefix(stored, tokens)
                if common and (best is None or common > best.common):
                    best = Child(found, stored.size, common)
            return best

    def open(self, address: bytes) -> AbstractContextManager[Reader]:
        with self._lock:
            self._open_or_raise()
            return nullcontext(BytesReader(self._objects[address].data))

    def write(self, items: Sequence[WriteItem], run: Run = map) -> list[bool]:
        return [self._write(item) for item in items]

    def _write(self, item: WriteItem) -> bool:
        with self._lock:
            self._open_or_raise()
            if item.address in self._objects:
                return True
            if not self._parent_there(item) or not self._make_room(item):
                return False
            self._used += item.blob.size
        data = None
        try:
            data = collect(item.blob)
        finally:
            with self._lock:
                self._used -= item.blob.size
                if data is not None and item.address not in self._objects and self._parent_there(item):
                    self._insert(item, data)
        with self._lock:
            return item.address in self._objects

    def _parent_there(self, item: WriteItem) -> bool:
        return item.parent is None or item.parent in self._objects

    def _insert(self, item: WriteItem, data: bytearray) -> None:
        now = self._clock()
        self._objects[item.address] = _Object(data, item._replace(blob=BytesBlob(data)), now, now)
        self._used += len(data)
        self._parts.setdefault(item.address[:KEY_BYTES], []).append(item.address)
        if item.parent is not None:
            self._objects[item.parent].children.add(item.address)
        if item.tokens is not None:
            siblings = self._siblings.setdefault(self._node(item), [])
            row = (item.tokens.tolist(), item.address)
            at = bisect.bisect_left(siblings, row)
            if at:
                before, old = siblings[at - 1]
                if before == row[0][: len(before)] and not self._objects[old].children:
                    self._drop(old)
            bisect.insort(siblings, row)

    @staticmethod
    def _node(item: WriteItem) -> bytes:
        if item.parent is not None:
            return item.parent
        _, group, shard = split_address(item.address)
        return address(item.root, group, shard)

    def _drop(self, one: bytes) -> int:
        """Remove an object, all parts of its key, and everything behind them."""
        gone = 0
        for part in self._parts.pop(one[:KEY_BYTES], ()):
            held = self._objects[part]
            for child in list(held.children):
                gone += self._drop(child)
            del self._objects[part]
            self._used -= len(held.data)
            gone += 1
            if held.item.parent is not None and held.item.parent in self._objects:
                self._objects[held.item.parent].children.discard(part)
            if held.item.tokens is not None:
                siblings = self._siblings[self._node(held.item)]
                siblings.remove((held.item.tokens.tolist(), part))
                if not siblings:
                    del self._siblings[self._node(held.item)]
        return gone

    def _make_room(self, item: WriteItem) -> bool:
        if item.blob.size > self._budget:
            return False
        now = self._clock()
        while self._used + item.blob.size > self._budget:
            leaves = [one for one in self._objects if one != item.parent and self._evictable(one, now)]
            if not leaves:
                return False
            sample = self._random.sample(leaves, min(_SAMPLES, len(leaves)))
            victim = min(sample, key=lambda one: self._policy(self._facts(one), now))
            metrics.evicted_objects.labels(self.name).inc(self._drop(victim))
        return True

    def _evictable(self, one: bytes, now: float) -> bool:
        for part in self._parts[one[:KEY_BYTES]]:
            held = self._objects[part]
            held.leases = [end for end in held.leases if end > monotonic()]
            if held.children or held.leases or held.pinned_until > now:
                return False
        return True

    def _facts(self, one: bytes) -> Facts:
        held = self._objects[one]
        return Facts(len(held.data), held.item.length, held.item.position, held.created, held.accessed)

    def delete(self, addresses: Sequence[bytes]) -> int:
        with self._lock:
            self._open_or_raise()
            return sum(self._drop(one) for one in addresses if one in self._objects)

    def quarantine(self, address: bytes) -> None:
        with self._lock:
            self._open_or_raise()
            if address in self._objects:
                self._drop(address)
                metrics.corrupt_objects.labels(self.name).inc()

    def touch(self, addresses: Sequence[bytes]) -> None:
        now = self._clock()
        with self._lock:
            for one in addresses:
                if one in self._objects:
                    self._objects[one].accessed = now

    def pin(self, addresses: Sequence[bytes], until: float) -> int:
        with self._lock:
            self._open_or_raise()
            there = [self._objects[one] for one in addresses if one in self._objects]
            for held in there:
                held.pinned_until = until
            return len(there)

    def lease(self, addresses: Sequence[bytes], seconds: float) -> Lease:
        end = monotonic() + seconds
        with self._lock:
            self._open_or_raise()
            held = [one for one in addresses if one in self._objects]
            for one in held:
                self._objects[one].leases.append(end)

        def release() -> None:
            with self._lock:
                for one in held:
                    if one in self._objects and end in self._objects[one].leases:
                        self._objects[one].leases.remove(end)

        return Lease(held, release)

    def scan(self) -> Iterator[Entry]:
        with self._lock:
            self._open_or_raise()
            listed = list(self._objects.items())
        for one, held in listed:
            item = held.item
            yield Entry(
                one, item.parent, item.root, item.position, item.length, len(held.data),
                held.created, held.accessed, held.pinned_until,
            )  # fmt: skip

    def usage(self) -> Usage:
        with self._lock:
            self._open_or_raise()
            return Usage(self._used, self._budget, len(self._objects))

    def maintain(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._objects.clear()
            self._siblings.clear()
            self._used = 0


class BytesBlob:
    """An object whose bytes are all there."""

    def __init__(self, data: bytes | bytearray):
        self._data = data
        self.size = len(data)

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        """All in one."""
        yield 0, [memoryview(self._data)]

"""The memory tier: objects in this process, gone with it. The reference for all other tiers."""

import bisect
import logging
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
from kvass.errors import CorruptObjectError, KvassError, TierError, TierUnavailableError
from kvass.fingerprints import Fingerprints
from kvass.keys import KEY_BYTES, address, split_address
from kvass.policy.eviction import EvictionPolicy, Facts, lru
from kvass.tiers.base import MOST_MARKS, Child, Entry, Lease, Mark, Run, Tier, Usage, WriteItem

log = logging.getLogger("kvass.tiers")

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
    """A blob's bytes in one piece. Raises TierError where they are not as many as it said."""
    data = bytearray(blob.size)
    view = memoryview(data)
    done = 0
    for offset, buffers in blob.pieces():
        at = offset
        for buffer in buffers:
            if at + len(buffer) > len(data):
                raise TierError("the object is longer than it said")
            view[at : at + len(buffer)] = buffer
            at += len(buffer)
            done += len(buffer)
    if done != len(data):
        raise TierError("the object is shorter than it said")
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
        self._marks: dict[tuple[bytes, int], list[tuple[bytes, int]]] = {}
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

    def seen(self, root: bytes, values: Sequence[int]) -> list[Mark]:
        """See `kvass.tiers.base.Marking`."""
        with self._lock:
            self._open_or_raise()
            return [Mark(value, *place) for value in values for place in self._marks.get((root, value), ())]

    def open(self, address: bytes) -> AbstractContextManager[Reader]:
        with self._lock:
            self._open_or_raise()
            return nullcontext(BytesReader(self._objects[address].data))

    def write(self, items: Sequence[WriteItem], run: Run = map) -> list[bool]:
        keep = {one[:KEY_BYTES] for item in items for one in (item.address, item.parent) if one}
        for item in items:
            self._write(item, keep)
        with self._lock:
            return [item.address in self._objects for item in items]

    def _write(self, item: WriteItem, keep: set[bytes]) -> None:
        size = item.blob.size
        with self._lock:
            self._open_or_raise()
            if item.address in self._objects:
                return
            if not self._parent_there(item) or not self._make_room(size, keep):
                reason = "full" if self._parent_there(item) else "orphan"
                metrics.dropped_stores.labels(self.name, reason).inc()
                return
            self._used += size
        data = None
        try:
            data = collect(item.blob)
        except (OSError, KvassError) as error:
            metrics.dropped_stores.labels(self.name, "error").inc()
            log.warning("kvass: %s: an object was not stored: %s", self.name, error)
        finally:
            with self._lock:
                self._used -= size
                if data is not None and not self._closed:
                    self._insert(item, data)

    def replace(self, item: WriteItem) -> bool:
        """Put an object in place of the one at its address. Parent, children and pin stay. False, and nothing
        changed, where there is none or no room."""
        data = collect(item.blob)
        with self._lock:
            self._open_or_raise()
            held = self._objects.get(item.address)
            keep = {one[:KEY_BYTES] for one in (item.address, item.parent) if one}
            if held is None or not self._make_room(len(data) - len(held.data), keep):
                return False
            self._used += len(data) - len(held.data)
            held.data = data
            return True

    def _parent_there(self, item: WriteItem) -> bool:
        return item.parent is None or item.parent in self._objects

    def _insert(self, item: WriteItem, data: bytearray) -> None:
        if item.address in self._objects or not self._parent_there(item):
            return
        now = self._clock()
        pinned = self._supersede(item)
        self._objects[item.address] = _Object(data, item._replace(blob=BytesBlob(data)), now, now, pinned)
        self._used += len(data)
        self._parts.setdefault(item.address[:KEY_BYTES], []).append(item.address)
        if item.parent is not None:
            self._objects[item.parent].children.add(item.address)
        if item.tokens is not None:
            bisect.insort(
                self._siblings.setdefault(self._node(item), []), (item.tokens.tolist(), item.address)
            )
        if item.marks is not None:
            for place, value in zip(item.marks.places.tolist(), item.marks.values.tolist(), strict=True):
                places = self._marks.setdefault((item.root, value), [])
                places.append((item.address, place))
                del places[:-MOST_MARKS]
        metrics.store_bytes.labels(self.name).inc(len(data))

    def _supersede(self, item: WriteItem) -> float:
        """Drop the childless siblings that `item` extends; until when one of them was pinned."""
        pinned = 0.0
        if item.tokens is None:
            return pinned
        tokens = item.tokens.tolist()
        for before, old in list(self._siblings.get(self._node(item), ())):
            parts = [self._objects[part] for part in self._parts[old[:KEY_BYTES]]]
            if before == tokens[: len(before)] and not any(part.children for part in parts):
                pinned = max(pinned, *(part.pinned_until for part in parts))
                self._drop(old)
        return pinned

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
            if held.item.marks is not None:
                self._unmark(held.item, held.item.marks)
        return gone

    def _unmark(self, item: WriteItem, marks: Fingerprints) -> None:
        for value in marks.values.tolist():
            row = item.root, value
            left = [place for place in self._marks.get(row, ()) if place[0] != item.address]
            if left:
                self._marks[row] = left
            else:
                self._marks.pop(row, None)

    def _make_room(self, size: int, keep: set[bytes]) -> bool:
        if size > self._budget:
            return False
        now = self._clock()
        while self._used + size > self._budget:
            leaves = [
                one for one in self._objects if one[:KEY_BYTES] not in keep and self._evictable(one, now)
            ]
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

    def delete_leaves(self, addresses: Sequence[bytes]) -> int:
        """See `kvass.tiers.base.Pruning`."""
        with self._lock:
            self._open_or_raise()
            now, gone = self._clock(), 0
            for one in addresses:
                parts = [self._objects[part] for part in self._parts.get(one[:KEY_BYTES], ())]
                if parts and not any(held.children or held.pinned_until > now for held in parts):
                    gone += self._drop(one)
            return gone

    def quarantine(self, address: bytes) -> None:
        with self._lock:
            self._open_or_raise()
            if address in self._objects:
                self._drop(address)
                metrics.corrupt_objects.labels(self.name).inc()

    def touch(self, addresses: Sequence[bytes]) -> None:
        now = self._clock()
        with self._lock:
            self._open_or_raise()
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
            listed = [
                Entry(
                    one, held.item.parent, held.item.root, held.item.position, held.item.length,
                    len(held.data), held.created, held.accessed, held.pinned_until,
                )
                for one, held in self._objects.items()
            ]  # fmt: skip
        return iter(listed)

    def usage(self) -> Usage:
        with self._lock:
            self._open_or_raise()
            return Usage(self._used, self._budget, len(self._objects))

    def maintain(self) -> None:
        with self._lock:
            self._open_or_raise()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._objects.clear()
            self._parts.clear()
            self._siblings.clear()
            self._marks.clear()
            self._used = 0


class BytesBlob:
    """An object whose bytes are all there."""

    def __init__(self, data: bytes | bytearray):
        self._data = data
        self.size = len(data)

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        """All in one."""
        yield 0, [memoryview(self._data)]

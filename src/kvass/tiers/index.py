"""The directory tier's index: LMDB rows, shared by all processes of a machine, rebuildable from the files.

Databases:  objects     address -> record
            tokens      address -> token ids, three bytes each (primary group only)
            children    node + tokens + tag -> address and count, sorted, for `nearest_child`
            leaves      address -> nothing: objects without children, from which eviction samples
            intents     address -> owner, size: room reserved for a file that is being written
            quarantined file name -> size
            meta        counters and flags
            marks, marked   see `kvass.tiers.marks`

`node` is a hash of the parent's address and of the tokens before the row's span: an LMDB key holds at
most 511 bytes, so a chunk has one row for each 148 tokens and what is left of them, be it nothing.
Siblings stand in token order, hence the longest common beginning with any text is that of a neighbour of
its place, and a sibling whose tokens another one begins with stands just before that one. Objects without
tokens (other groups than the primary) have a row too: that is how a parent knows its children.
"""

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from kvass.chunks import Tokens
from kvass.errors import InputError, TierUnavailableError
from kvass.keys import ADDRESS_BYTES, KEY_BYTES, address, split_address
from kvass.tiers.base import Child
from kvass.tiers.environment import Environment, Txn

_SPAN = 148
_TOKEN_BYTES = 3
_SPAN_BYTES = _SPAN * _TOKEN_BYTES
_TAG_BYTES = 16

_RECORD = struct.Struct(f"<QIIIddd{ADDRESS_BYTES}s{KEY_BYTES}s")
_CHILD = struct.Struct(f"<{ADDRESS_BYTES}sI")
_USAGE = struct.Struct("<QQ")
_INTENT = struct.Struct("<16sQ")
_NO_PARENT = bytes(ADDRESS_BYTES)


class Record(NamedTuple):
    """What the index holds of an object; `parent` empty for a sequence's first chunk."""

    size: int
    length: int
    position: int
    children: int
    created: float
    accessed: float
    pinned_until: float
    parent: bytes
    root: bytes

    def pack(self) -> bytes:
        """As stored. Raises InputError for a value out of range."""
        try:
            return _RECORD.pack(*self)
        except struct.error as error:
            raise InputError(f"the index cannot hold {self}: {error}") from error

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> "Record":
        """From what was stored."""
        record = cls(*_RECORD.unpack(raw))
        return record._replace(parent=b"") if record.parent == _NO_PARENT else record


def pack_tokens(tokens: Tokens) -> bytes:
    """Three big-endian bytes a token, one added, so that 'no token' (zero) sorts before every token."""
    wide = (tokens + 1).astype(">u4").view(np.uint8).reshape(-1, 4)
    return wide[:, 1:].tobytes()


def unpack_tokens(packed: bytes) -> Tokens:
    """The tokens that were packed."""
    wide = np.zeros((len(packed) // _TOKEN_BYTES, 4), np.uint8)
    wide[:, 1:] = np.frombuffer(packed, np.uint8).reshape(-1, _TOKEN_BYTES)
    return (wide.reshape(-1).view(">u4") - 1).astype("<i4")


def _node(parent: bytes, before: bytes) -> bytes:
    return blake3(parent + before).digest()


def _rows(parent: bytes, tag: bytes, packed: bytes) -> Iterator[bytes]:
    for at in range(0, len(packed) + 1, _SPAN_BYTES):
        yield _node(parent, packed[:at]) + packed[at : at + _SPAN_BYTES].ljust(_SPAN_BYTES, b"\0") + tag


def _agree(row: memoryview | bytes, packed: bytes) -> int:
    """Whole tokens in which a row's span and `packed` agree from their start."""
    span = bytes(row[KEY_BYTES : KEY_BYTES + min(len(packed), _SPAN_BYTES)])
    if packed.startswith(span):
        return len(span) // _TOKEN_BYTES
    one, other = np.frombuffer(span, np.uint8), np.frombuffer(packed, np.uint8, len(span))
    return int(np.flatnonzero(one != other)[0]) // _TOKEN_BYTES


def tree_parent(parent: bytes | None, root: bytes, group: int, shard: int) -> bytes:
    """The address under which a chunk stands in the tree: its parent's, or its root's."""
    return parent or address(root, group, shard)


class Index(Environment):
    """The rows of one directory tier, in one LMDB environment."""

    databases = (
        "objects", "tokens", "children", "leaves", "intents", "quarantined", "meta", "marks", "marked",
    )  # fmt: skip
    objects: Any
    tokens: Any
    children: Any
    leaves: Any
    intents: Any
    quarantined: Any
    meta: Any
    marks: Any
    marked: Any

    def get(self, txn: Txn, one: bytes) -> Record | None:
        """An object's record."""
        raw = txn.get(one, None, self.objects)
        return None if raw is None else Record.unpack(raw)

    def put(self, txn: Txn, one: bytes, record: Record) -> None:
        """Replace an object's record."""
        txn.put(one, record.pack(), db=self.objects)

    def parts(self, txn: Txn, key: bytes) -> list[tuple[bytes, Record]]:
        """All objects of a key."""
        found = []
        cursor = txn.cursor(self.objects)
        if cursor.set_range(key):
            for one, raw in cursor:
                if bytes(one[:KEY_BYTES]) != key:
                    break
                found.append((bytes(one), Record.unpack(raw)))
        return found

    def insert(self, txn: Txn, one: bytes, record: Record, tokens: Tokens | None) -> list[bytes]:
        """Add an object below its parent (which must be there); returns keys that it supersedes."""
        if record.parent:
            above = self.get(txn, record.parent)
            if above is None:
                raise AssertionError("a chunk is only inserted below its parent")
            self.put(txn, record.parent, above._replace(children=above.children + 1))
            if not above.children:
                txn.delete(record.parent, db=self.leaves)
        self.put(txn, one, record)
        txn.put(one, b"", db=self.leaves)
        parent = tree_parent(record.parent, record.root, *split_address(one)[1:])
        packed, superseded = b"", []
        if tokens is not None:
            packed = pack_tokens(tokens)
            superseded = self._beginnings(txn, parent, packed)
            txn.put(one, packed, db=self.tokens)
        value = _CHILD.pack(one, record.length)
        for row in _rows(parent, one[:_TAG_BYTES], packed):
            txn.put(row, value, db=self.children)
        self.add_usage(txn, 0, 1)
        return [before[:KEY_BYTES] for before in superseded]

    def _beginnings(self, txn: Txn, parent: bytes, packed: bytes) -> list[bytes]:
        """The childless siblings whose tokens are a strict beginning of `packed`.

        What sorts between such a sibling and `packed` agrees with both up to the sibling's end; so from
        each neighbour one goes on with what that has in common with `packed`.
        """
        found = []
        wanted = packed
        while wanted:
            before = self._at_or_before(txn, parent, wanted)
            if before is None:
                break
            stored = bytes(txn.get(before, b"", self.tokens))
            if packed.startswith(stored):
                record = self.get(txn, before)
                if record is not None and not record.children:
                    found.append(before)
                wanted = stored[:-_TOKEN_BYTES]
            else:
                one, other = np.frombuffer(stored, np.uint8), np.frombuffer(wanted, np.uint8)
                shorter = min(one.size, other.size)
                differs = int(np.flatnonzero(one[:shorter] != other[:shorter])[0])
                wanted = wanted[: differs // _TOKEN_BYTES * _TOKEN_BYTES]
        return found

    def _at_or_before(self, txn: Txn, parent: bytes, packed: bytes) -> bytes | None:
        """The child with these tokens or, if there is none, the one that stands just before its place."""
        tag = b"\xff"  # with these tokens, too; who shares a whole span stands in the next one's node
        for row in reversed(list(_rows(parent, b"", packed))):
            cursor = txn.cursor(self.children)
            there = cursor.set_range(row + tag * _TAG_BYTES)
            tag = b"\0"
            if (cursor.prev() if there else cursor.last()) and bytes(cursor.key()[:KEY_BYTES]) == row[
                :KEY_BYTES
            ]:
                found: bytes = _CHILD.unpack(cursor.value())[0]
                return found
        return None

    def remove(self, txn: Txn, one: bytes, record: Record) -> None:
        """Remove a childless object's rows and its charge."""
        txn.delete(one, db=self.objects)
        txn.delete(one, db=self.leaves)
        parent = tree_parent(record.parent, record.root, *split_address(one)[1:])
        packed = bytes(txn.get(one, b"", self.tokens))
        for row in _rows(parent, one[:_TAG_BYTES], packed):
            txn.delete(row, db=self.children)
        txn.delete(one, db=self.tokens)
        if record.parent:
            above = self.get(txn, record.parent)
            if above is not None:
                left = max(0, above.children - 1)
                self.put(txn, record.parent, above._replace(children=left))
                if not left:
                    txn.put(record.parent, b"", db=self.leaves)
        self.add_usage(txn, -record.size, -1)

    def nearest_child(self, txn: Txn, parent: bytes, tokens: Tokens) -> Child | None:
        """The child of `parent` with the longest common beginning with `tokens`: two reads a span."""
        packed = pack_tokens(tokens)
        best = None
        cursor = txn.cursor(self.children)
        for at in range(0, len(packed), _SPAN_BYTES):
            node = _node(parent, packed[:at])
            rest = packed[at : at + _SPAN_BYTES]
            common = 0
            there = cursor.set_range(node + rest)
            for _ in ("what sorts behind", "what sorts before"):
                if there and bytes(cursor.key()[:KEY_BYTES]) == node:
                    agree = _agree(cursor.key(), rest)
                    if agree > common:
                        common = agree
                        one, length = _CHILD.unpack(cursor.value())
                        best = Child(one, length, at // _TOKEN_BYTES + agree)
                there = cursor.prev() if there else cursor.last()
            if common < _SPAN:
                break
        return best

    def children_of(self, txn: Txn, parent: bytes) -> list[bytes]:
        """Addresses of all objects stored behind `parent`. Costs a read each."""
        node = _node(parent, b"")
        found = []
        cursor = txn.cursor(self.children)
        if cursor.set_range(node):
            for row, raw in cursor:
                if bytes(row[:KEY_BYTES]) != node:
                    break
                found.append(_CHILD.unpack(raw)[0])
        return found

    def leaves_from(self, txn: Txn, place: bytes, count: int) -> list[bytes]:
        """Up to `count` childless objects from `place` on and, past the last one, from the first on.

        Addresses are hashes: what follows a random place is a random sample.
        """
        found: list[bytes] = []
        cursor = txn.cursor(self.leaves)
        wanted = min(count, self.leaf_count(txn))
        there = cursor.set_range(place) or cursor.first()
        while there and len(found) < wanted:
            found.append(bytes(cursor.key()))
            there = cursor.next() or cursor.first()
        return found

    def leaf_count(self, txn: Txn) -> int:
        """How many objects have no children."""
        entries: int = txn.stat(self.leaves)["entries"]
        return entries

    # -- counters, intents, quarantine -----------------------------------------------------------------

    def usage(self, txn: Txn) -> tuple[int, int]:
        """Charged bytes (objects, reservations, quarantine) and objects."""
        raw = txn.get(b"usage", None, self.meta)
        return (0, 0) if raw is None else _USAGE.unpack(raw)

    def add_usage(self, txn: Txn, size: int, objects: int) -> None:
        """Move the counters."""
        used, count = self.usage(txn)
        txn.put(b"usage", _USAGE.pack(max(0, used + size), max(0, count + objects)), db=self.meta)

    def intend(self, txn: Txn, one: bytes, owner: bytes, size: int) -> None:
        """Reserve room for an object that `owner` is about to write."""
        txn.put(one, _INTENT.pack(owner, size), db=self.intents)
        self.add_usage(txn, size, 0)

    def intent(self, txn: Txn, one: bytes) -> tuple[bytes, int] | None:
        """Owner and size of the reservation for an object."""
        raw = txn.get(one, None, self.intents)
        return None if raw is None else _INTENT.unpack(raw)

    def settle(self, txn: Txn, one: bytes, *, keep: bool) -> None:
        """End a reservation; `keep` leaves its bytes charged, for the object that is now there."""
        found = self.intent(txn, one)
        if found is not None:
            txn.delete(one, db=self.intents)
            if not keep:
                self.add_usage(txn, -found[1], 0)

    def intents_of(self, txn: Txn, owner: bytes) -> list[bytes]:
        """Addresses that `owner` has reserved room for."""
        cursor = txn.cursor(self.intents)
        return [bytes(one) for one, raw in cursor if _INTENT.unpack(raw)[0] == owner]

    def in_quarantine(self, txn: Txn) -> dict[str, int]:
        """File names and charges."""
        rows = txn.cursor(self.quarantined)
        return {os.fsdecode(bytes(name)): int.from_bytes(raw, "little") for name, raw in rows}

    def charge_quarantined(self, txn: Txn, name: str, size: int) -> None:
        """Note a file in quarantine."""
        txn.put(os.fsencode(name), size.to_bytes(8, "little"), db=self.quarantined)
        self.add_usage(txn, size, 0)

    def release_quarantined(self, txn: Txn, name: str, size: int) -> None:
        """Note that a file is no longer in quarantine."""
        txn.delete(os.fsencode(name), db=self.quarantined)
        self.add_usage(txn, -size, 0)

    def writers(self, txn: Txn) -> set[bytes]:
        """Owners that have reserved room."""
        return {_INTENT.unpack(raw)[0] for _, raw in txn.cursor(self.intents)}

    def clear(self, txn: Txn) -> None:
        """Forget everything, also that it once was ready."""
        for name in self.databases:
            txn.drop(getattr(self, name), delete=False)

    def ready(self, txn: Txn) -> bool:
        """Whether the index once held all files; false until a rebuild has ended."""
        return txn.get(b"ready", None, self.meta) is not None

    def set_ready(self, txn: Txn) -> None:
        """Note that the index holds all files."""
        txn.put(b"ready", b"1", db=self.meta)


_shared: dict[Path, tuple[Index, int]] = {}
_shared_guard = threading.Lock()


def acquire(folder: Path, *, durable: bool) -> Index:
    """Open an index, or share the one this process has open already (LMDB allows one per process)."""
    folder = folder.resolve()
    with _shared_guard:
        index, users = _shared.get(folder, (None, 0))
        if index is None:
            index = Index(folder, durable=durable)
        elif index.broken:
            raise TierUnavailableError(f"the index in {folder} is being replaced")
        _shared[folder] = (index, users + 1)
        return index


def release(index: Index) -> None:
    """Give back what `acquire` gave; the last one closes."""
    with _shared_guard:
        for folder, (held, users) in list(_shared.items()):
            if held is index and users > 1:
                _shared[folder] = (held, users - 1)
                return
            if held is index:
                del _shared[folder]
    index.close()


def _before_fork() -> None:
    _shared_guard.acquire()
    for index, _ in _shared.values():
        index.hold()


def _after_fork_in_parent() -> None:
    for index, _ in _shared.values():
        index.let_go()
    _shared_guard.release()


def _after_fork_in_child() -> None:
    for index, _ in _shared.values():
        index.abandon()
    _shared.clear()
    _shared_guard.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)

"""The directory tier's index: LMDB rows, shared by all processes of a machine, rebuildable from the files.

Databases:  objects     address -> record
            tokens      address -> token ids, three bytes each (primary group only)
            children    node + tokens + tag -> address and count, sorted, for `nearest_child`
            leaves      address -> nothing: objects without children, from which eviction samples
            intents     address -> owner, size: room reserved for a file that is being written
            quarantined file name -> size
            meta        counters and flags

`node` is a hash of the parent's address and of the tokens before the row's span: an LMDB key holds at
most 511 bytes, so a chunk of more than 148 tokens has one row for each span of 148. Siblings stand in
token order, hence the longest common beginning with any text is that of a neighbour of its place.
"""

import contextlib
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
from blake3 import blake3

from kvass.chunks import Tokens
from kvass.errors import TierFullError, TierUnavailableError
from kvass.keys import ADDRESS_BYTES, KEY_BYTES, address, split_address
from kvass.tiers.base import Child

Txn = Any  # lmdb.Transaction; the library ships no types

_MAP_BYTES = 64 << 30
_MAX_READERS = 1024
_LOCK_BYTES = 128 + 64 * _MAX_READERS

_SPAN = 148
_TOKEN_BYTES = 3
_SPAN_BYTES = _SPAN * _TOKEN_BYTES
_TAG_BYTES = 16

_RECORD = struct.Struct(f"<QIIIddd{ADDRESS_BYTES}s{KEY_BYTES}s")
_CHILD = struct.Struct(f"<{ADDRESS_BYTES}sI")
_USAGE = struct.Struct("<QQ")
_INTENT = struct.Struct("<16sQ")
_NO_PARENT = bytes(ADDRESS_BYTES)
_IDENTITY_CHECK_SECONDS = 1.0
_READER_CHECK_WRITES = 256
_TAIL_PAGES = 64


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
        """As stored."""
        return _RECORD.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> "Record":
        """From what was stored."""
        record = cls(*_RECORD.unpack(raw))
        return record._replace(parent=b"") if record.parent == _NO_PARENT else record


def pack_tokens(tokens: Tokens) -> bytes:
    """Three big-endian bytes a token, one added, so that 'no token' (zero) sorts before every token."""
    wide = (tokens + 1).astype(">u4").view(np.uint8).reshape(-1, 4)
    return wide[:, 1:].tobytes()


def _node(parent: bytes, before: bytes) -> bytes:
    return blake3(parent + before).digest()


def _rows(parent: bytes, tag: bytes, packed: bytes) -> Iterator[bytes]:
    for at in range(0, len(packed), _SPAN_BYTES):
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


class Index:
    """One LMDB environment. `read` and `write` give transactions; all else happens inside one.

    Only `write` may wait, for other writers, without limit: it belongs on a background thread.
    """

    def __init__(self, folder: Path, *, durable: bool):
        """Open or create. Raises TierUnavailableError when the files are unusable; `destroy` then helps."""
        self._folder = folder
        self._data = folder / "data.mdb"
        self._guard = threading.Condition()
        self._users = 0
        self._writes = 0
        self._checked = 0.0
        self.broken = False
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_data_file(self._data)
        _preallocate(folder / "lock.mdb")
        try:
            self._env = lmdb.open(
                str(folder), map_size=_MAP_BYTES, max_dbs=8, max_readers=_MAX_READERS, mode=0o600,
                sync=durable, metasync=False, max_spare_txns=4,
            )  # fmt: skip
            self._env.reader_check()
            handles = self._databases()
            self.objects, self.tokens, self.children, self.leaves, self.intents = handles[:5]
            self.quarantined, self.meta = handles[5:]
            self._inode = self._data.stat().st_ino
        except (lmdb.Error, OSError, MemoryError) as error:
            raise TierUnavailableError(f"cannot open the index in {folder}: {error}") from error

    def _databases(self) -> list[Any]:
        names = (b"objects", b"tokens", b"children", b"leaves", b"intents", b"quarantined", b"meta")
        with self._env.begin(write=True) as txn:
            return [self._env.open_db(name, txn=txn) for name in names]

    # -- transactions ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def read(self) -> Iterator[Txn]:
        """A read transaction: never waits for writers, sees one moment."""
        with self._use(), self._translated(), self._env.begin(buffers=True) as txn:
            yield txn

    @contextlib.contextmanager
    def write(self) -> Iterator[Txn]:
        """A write transaction over all processes; committed at the end, undone on any exception."""
        with self._use(checked=True), self._translated():
            self._writes += 1
            if self._writes % _READER_CHECK_WRITES == 0:
                self._env.reader_check()
            with self._env.begin(write=True) as txn:
                yield txn

    @contextlib.contextmanager
    def _use(self, *, checked: bool = False) -> Iterator[None]:
        with self._guard:
            now = time.monotonic()
            if not self.broken and (checked or now - self._checked > _IDENTITY_CHECK_SECONDS):
                self._checked = now
                self.broken = not self._same_file()
            if self.broken:
                raise TierUnavailableError(f"the index in {self._folder} was removed or damaged")
            self._users += 1
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                self._guard.notify_all()

    def _same_file(self) -> bool:
        try:
            return self._data.stat().st_ino == self._inode
        except OSError:
            return False

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            raise TierFullError(f"no room for the index in {self._folder}: {error}") from error
        except lmdb.ReadersFullError as error:
            raise TierUnavailableError(f"too many readers of the index in {self._folder}") from error
        except lmdb.Error as error:
            # A full tmpfs shows as a plain error too; only what LMDB calls damage is damage.
            damage = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError,
                      lmdb.VersionMismatchError, lmdb.BadValsizeError)  # fmt: skip
            self.broken = self.broken or isinstance(error, damage)
            raise TierUnavailableError(f"the index in {self._folder} failed: {error}") from error

    def close(self) -> None:
        """Wait for running transactions and close."""
        with self._guard:
            self.broken = True
            self._guard.wait_for(lambda: self._users == 0, timeout=10)
        self._env.close()

    def abandon(self) -> None:
        """Close in a forked child, where no other thread lives."""
        self.broken = True
        self._env.close()

    def bytes_on_disk(self) -> int:
        """Bytes that the index itself takes."""
        try:
            return self._data.stat().st_blocks * 512 + _LOCK_BYTES
        except OSError:
            return 0

    # -- rows -----------------------------------------------------------------------------------------

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
        superseded = []
        if record.parent:
            above = self.get(txn, record.parent)
            if above is None:
                raise AssertionError("a chunk is only inserted below its parent")
            self.put(txn, record.parent, above._replace(children=above.children + 1))
            if not above.children:
                txn.delete(record.parent, db=self.leaves)
        self.put(txn, one, record)
        txn.put(one, b"", db=self.leaves)
        if tokens is not None:
            packed = pack_tokens(tokens)
            txn.put(one, packed, db=self.tokens)
            parent = tree_parent(record.parent, record.root, *split_address(one)[1:])
            before = self._strict_beginning(txn, parent, packed)
            if before is not None:
                superseded.append(before[:KEY_BYTES])
            value = _CHILD.pack(one, record.length)
            for row in _rows(parent, one[:_TAG_BYTES], packed):
                txn.put(row, value, db=self.children)
        self.add_usage(txn, 0, 1)
        return superseded

    def _strict_beginning(self, txn: Txn, parent: bytes, packed: bytes) -> bytes | None:
        """The childless sibling, if any, whose tokens are a strict beginning of `packed`.

        Whatever sorts between such a sibling and `packed` begins with it too and would have superseded
        it; so it is the row just before, in one of the spans.
        """
        for row in _rows(parent, b"\0" * _TAG_BYTES, packed):
            cursor = txn.cursor(self.children)
            there = cursor.set_range(row)
            if not (cursor.prev() if there else cursor.last()):
                continue
            if bytes(cursor.key()[:KEY_BYTES]) != row[:KEY_BYTES]:
                continue
            found = _CHILD.unpack(cursor.value())[0]
            stored = bytes(txn.get(found, b"", self.tokens))
            if stored and len(stored) < len(packed) and packed.startswith(stored):
                record = self.get(txn, found)
                if record is not None and not record.children:
                    return bytes(found)
        return None

    def remove(self, txn: Txn, one: bytes, record: Record) -> None:
        """Remove a childless object's rows and its charge."""
        txn.delete(one, db=self.objects)
        txn.delete(one, db=self.leaves)
        packed = txn.get(one, None, self.tokens)
        if packed is not None:
            parent = tree_parent(record.parent, record.root, *split_address(one)[1:])
            for row in _rows(parent, one[:_TAG_BYTES], bytes(packed)):
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
        """Addresses of all chunks stored behind `parent`. Costs a read each."""
        node = _node(parent, b"")
        found = []
        cursor = txn.cursor(self.children)
        if cursor.set_range(node):
            for row, raw in cursor:
                if bytes(row[:KEY_BYTES]) != node:
                    break
                found.append(_CHILD.unpack(raw)[0])
        return found

    def sample_leaves(self, txn: Txn, count: int, rng: random.Random) -> list[bytes]:
        """Up to `count` childless objects, chosen at random (keys are hashes, so any place is)."""
        found = set()
        cursor = txn.cursor(self.leaves)
        for _ in range(count):
            if cursor.set_range(rng.randbytes(KEY_BYTES)) or cursor.first():
                found.add(bytes(cursor.key()))
        return sorted(found)

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


def _after_fork() -> None:
    # A child must not use its parent's environment: reader slots carry the parent's process id.
    global _shared_guard  # noqa: PLW0603 - the lock may have been held in the parent by another thread
    _shared_guard = threading.Lock()
    for index, _ in _shared.values():
        index.abandon()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)


def destroy(folder: Path) -> None:
    """Remove an index's files. Processes that still have it open notice and open the new one."""
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)


def _preallocate(lock: Path) -> None:
    """Give LMDB's lock file all its blocks: mapping a hole of a full disk kills the process (SIGBUS)."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = -(-_LOCK_BYTES // 4096) * 4096
            if os.fstat(fd).st_size < size:
                os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise TierUnavailableError(f"cannot make the index's lock file {lock}: {error}") from error


def _check_data_file(data: Path) -> None:
    """Refuse a truncated data file: reading behind the end of a mapped file kills the process (SIGBUS).

    LMDB need not have written its last few pages where they were freed again: those are made up for.
    """
    try:
        with data.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(16 + 40)
            if not head and not size:
                return
            page = struct.unpack_from("<I", head, 40)[0] if len(head) == 56 else 0
            if page not in (4096, 8192, 16384, 32768, 65536):
                raise TierUnavailableError(f"{data} is no index")
            for at in (0, page):
                file.seek(at)
                meta = file.read(152)
                if len(meta) < 152 or struct.unpack_from("<I", meta, 16)[0] != 0xBEEFC0DE:
                    raise TierUnavailableError(f"{data} is damaged")
                missing = (struct.unpack_from("<Q", meta, 136)[0] + 1) * page - size
                if missing > _TAIL_PAGES * page:
                    raise TierUnavailableError(f"{data} is truncated")
                if missing > 0:
                    os.posix_fallocate(file.fileno(), size, missing)
    except FileNotFoundError:
        return
    except OSError as error:
        raise TierUnavailableError(f"cannot read {data}: {error}") from error

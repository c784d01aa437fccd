"""The directory tier: one file an object, shared by all processes of a machine; host tier and SSD tier.

On a tmpfs it is the shared host tier; elsewhere it is durable and files are fsynced. The protocol
(docs/tiers.md): reserve room in the index, write and rename, commit in the index; unlink before the row
goes. Whoever dies in between leaves an intent that names what to undo, so nothing is ever searched for.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from kvass import metrics
from kvass.chunks import Tokens, as_tokens
from kvass.clock import Clock, system_clock
from kvass.container import Buffer, Reader, read_header
from kvass.errors import CorruptObjectError, InputError, TierError, TierUnavailableError
from kvass.keys import FORMAT_VERSION, KEY_BYTES, address_text, parse_address, split_address
from kvass.policy.eviction import EvictionPolicy, Facts, lru
from kvass.tiers import index as index_module
from kvass.tiers.base import Child, Entry, Lease, Run, Tier, Usage, WriteItem
from kvass.tiers.index import Index, Record, Txn
from kvass.tiers.owners import Owner, dead_owner

log = logging.getLogger("kvass.tiers")

_BLOCK = 4096
_SUFFIX = ".safetensors"
_SAMPLES = 8
_ROUNDS = 8
_UNLINKS = 8
"""Files removed inside one write transaction: all other writers wait meanwhile."""
_INDEX_SLACK = 1 << 20
_BATCH = 32
_SETUP_SECONDS = 10.0
_RECONCILE_SECONDS = 10.0


class FileReader:
    """An open object file. Reading goes on undisturbed when the file is unlinked meanwhile."""

    def __init__(self, fd: int):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptObjectError("object is not a regular file")
        self._fd = fd
        self.size = status.st_size

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers; a short read is continued, an end of file is corruption."""
        pending = list(buffers)
        while pending:
            try:
                got = os.preadv(self._fd, pending[:1024], offset)
            except OSError as error:
                raise TierError(f"cannot read an object: {error}") from error
            if not got:
                raise CorruptObjectError(f"object ends at byte {offset}, before its header says")
            offset += got
            pending = _advance(pending, got)


def _advance(buffers: list[Buffer], done: int) -> list[Buffer]:
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[at + 1 :]]
        done -= len(buffer)
    return []


def _write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    pending = list(buffers)
    while pending:  # a full tmpfs answers with a short count before it answers with an error
        done = os.pwritev(fd, pending[:1024], offset)
        if not done:
            raise OSError(errno.ENOSPC, "nothing was written")
        offset += done
        pending = _advance(pending, done)


def _charge(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def on_tmpfs(path: Path) -> bool:
    """Whether a directory (or its nearest existing parent) lies in memory."""
    while not path.exists():
        path = path.parent
    real = os.path.realpath(path)
    best, found = "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, fields[fields.index("-") + 1]
    return found in ("tmpfs", "ramfs")


class DirectoryTier(Tier):
    """Objects as files below `path`, at most `budget` bytes of them at every moment, index included.

    Any number of processes and threads at once. Files with a second hard link (leases) and pinned
    objects are not evicted; bytes of files that are unlinked while open or leased are not in the budget.
    """

    shared = True

    def __init__(
        self,
        path: Path,
        budget: int,
        *,
        name: str,
        policy: EvictionPolicy = lru,
        clock: Clock = system_clock,
        seed: int | None = None,
    ):
        """Open or create. Raises TierUnavailableError when the directory cannot be used, with the reason."""
        self.name = name
        self.path = Path(path)
        self._budget = budget
        self._policy = policy
        self._clock = clock
        self._random = random.Random(seed)
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._touched: dict[bytes, float] = {}
        self._missing: set[bytes] = set()
        self._undo: list[bytes] = []
        self._warned: set[str] = set()
        self._reconciled = 0.0
        self._closed = False
        self._index: Index | None = None
        self._open()

    # -- opening, rebuilding, closing -----------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise TierUnavailableError(
                    f"{self.path} belongs to or may be written by somebody else; use another directory"
                )
            self.durable = not on_tmpfs(self.path)
            for folder in ("objects", "owners", "quarantine"):
                (self.path / folder).mkdir(mode=0o700, exist_ok=True)
            with self._setup_lock():
                self._check_format()
                self._index = self._open_index()
            self._owner = Owner(self.path / "owners")
            self._reconcile()
        except OSError as error:
            raise TierUnavailableError(f"cannot use {self.path} as a tier: {error}") from error

    @contextlib.contextmanager
    def _setup_lock(self) -> Iterator[None]:
        with (self.path / "setup.lock").open("a") as file:
            deadline = time.monotonic() + _SETUP_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TierUnavailableError(
                            f"the index of {self.path} is being rebuilt by another process; try again later"
                        ) from None
                    time.sleep(0.01)
            yield

    def _check_format(self) -> None:
        note = self.path / "kvass.json"
        try:
            found = json.loads(note.read_text())["format"]
        except FileNotFoundError:
            note.write_text(json.dumps({"format": FORMAT_VERSION}) + "\n")
            return
        except (ValueError, KeyError, TypeError):
            found = "unreadable"
        if found != FORMAT_VERSION:
            raise TierUnavailableError(
                f"{self.path} is of format {found}, not {FORMAT_VERSION}; use another directory or remove it"
            )

    def _open_index(self) -> Index:
        folder = self.path / "index"
        for _ in range(2):
            try:
                opened = index_module.acquire(folder, durable=self.durable)
            except TierUnavailableError as error:
                log.warning("kvass: %s: %s; rebuilding it from the files", self.name, error)
                index_module.destroy(folder)
                continue
            try:
                with opened.read() as txn:
                    ready = opened.ready(txn)
                if not ready:
                    self._rebuild(opened)
                return opened
            except BaseException:
                index_module.release(opened)
                raise
        raise TierUnavailableError(f"cannot open or make an index in {folder}")

    def _rebuild(self, index: Index) -> None:
        """Fill an empty index from the object files: two header reads and a row for each."""
        found = []
        for path in (self.path / "objects").glob(f"*/*{_SUFFIX}"):
            try:
                found.append((self._describe(path)[1].position, path))
            except (CorruptObjectError, InputError, OSError) as error:
                log.warning("kvass: %s: %s is set aside: %s", self.name, path.name, error)
                self._set_aside(path)
        found.sort()
        for start in range(0, len(found), 1000):
            with index.write() as txn:
                for _, path in found[start : start + 1000]:
                    one, record, tokens = self._describe(path)
                    if record.parent and index.get(txn, record.parent) is None:
                        path.unlink()
                        continue
                    for key in index.insert(txn, one, record, tokens):
                        self._drop_key(index, txn, key)
                    index.add_usage(txn, record.size, 0)
        with index.write() as txn:
            for path in (self.path / "quarantine").iterdir():
                self._keep_quarantined(index, txn, path)
            index.set_ready(txn)

    def _describe(self, path: Path) -> tuple[bytes, Record, Tokens | None]:
        with self._open_path(path) as reader:
            header = read_header(reader).header
        one = parse_address(path.name.removesuffix(_SUFFIX))
        key, group, shard = split_address(one)
        if (header.key, header.group, header.shard) != (key.hex(), group, shard):
            raise CorruptObjectError("object is not the one its file name says")
        status = path.stat()
        parent = parse_address(header.parent) if header.parent else b""
        record = Record(
            _charge(status.st_size), len(header.tokens), header.position, 0,
            status.st_mtime, status.st_mtime, 0.0, parent, header.namespace.root(),
        )  # fmt: skip
        return one, record, as_tokens(header.tokens) if group == 0 else None

    def _live(self) -> Index:
        if self._closed:
            raise TierUnavailableError(f"the {self.name} tier is closed")
        if self._pid != os.getpid():
            raise TierUnavailableError(f"the {self.name} tier was opened before a fork; open it again")
        if self._index is None:
            raise TierUnavailableError(f"the {self.name} tier in {self.path} cannot be used at present")
        return self._index

    def close(self) -> None:
        if self._closed:
            return
        if self._pid == os.getpid() and self._index is not None:
            with contextlib.suppress(TierError):
                self._flush_touched(self._index)
            index_module.release(self._index)
            self._owner.close()
        else:
            self._owner.abandon()
        self._closed = True

    # -- reading --------------------------------------------------------------------------------------

    def _path(self, one: bytes) -> Path:
        text = address_text(one)
        return self.path / "objects" / text[:2] / (text + _SUFFIX)

    def contains(self, addresses: Sequence[bytes]) -> list[bool]:
        index = self._live()
        with index.read() as txn:
            get, rows = txn.get, index.objects
            return [get(one, None, rows) is not None for one in addresses]

    def nearest_child(self, parent: bytes, tokens: Tokens) -> Child | None:
        index = self._live()
        with index.read() as txn:
            return index.nearest_child(txn, parent, tokens)

    def open(self, address: bytes) -> AbstractContextManager[Reader]:
        self._live()
        return self._open_object(address)

    @contextlib.contextmanager
    def _open_object(self, one: bytes) -> Iterator[Reader]:
        link = None
        try:
            with self._open_path(self._path(one)) as reader:
                yield reader
            return
        except FileNotFoundError:
            link = self._owner.leased(one)
            if link is None:
                with self._guard:
                    self._missing.add(one)
                raise KeyError(address_text(one)) from None
        with self._open_path(link) as reader:
            yield reader

    @contextlib.contextmanager
    def _open_path(self, path: Path) -> Iterator[FileReader]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise CorruptObjectError(f"object is not a regular file: {error}") from error
            raise TierError(f"cannot open an object: {error}") from error
        try:
            yield FileReader(fd)
        finally:
            os.close(fd)

    def touch(self, addresses: Sequence[bytes]) -> None:
        now = self._clock()
        with self._guard:
            self._touched.update(dict.fromkeys(addresses, now))

    def scan(self) -> Iterator[Entry]:
        index = self._live()
        after = b""
        while True:
            batch = []
            with index.read() as txn:
                cursor = txn.cursor(index.objects)
                if cursor.set_range(after + b"\0"):
                    for one, raw in cursor:
                        r = Record.unpack(raw)
                        batch.append(Entry(bytes(one), r.parent or None, r.root, r.position, r.length,
                                           r.size, r.created, r.accessed, r.pinned_until))  # fmt: skip
                        if len(batch) == 1000:
                            break
            if not batch:
                return
            yield from batch
            after = batch[-1].address

    def usage(self) -> Usage:
        index = self._live()
        with index.read() as txn:
            used, count = index.usage(txn)
        return Usage(used + index.bytes_on_disk(), self._budget, count)

    def lease(self, addresses: Sequence[bytes], seconds: float) -> Lease:
        self._live()
        try:
            return self._owner.lease([(one, self._path(one)) for one in addresses], seconds)
        except OSError as error:
            raise TierError(f"cannot lease in {self.path}: {error}") from error

    # -- writing --------------------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], run: Run = map) -> list[bool]:
        index = self._live()
        done: list[bool] = []
        for start in range(0, len(items), _BATCH):
            done += self._write_batch(index, items[start : start + _BATCH], run)
        return done

    def _write_batch(self, index: Index, items: Sequence[WriteItem], run: Run) -> list[bool]:
        there, reserved = self._reserve(index, items)
        ours = [item for item in items if item.address in reserved]
        placed: list[bool] = [False] * len(ours)
        try:
            placed = list(run(self._write_file, ours))
        finally:
            committed = self._commit(index, ours, placed)
        return [item.address in there or item.address in committed for item in items]

    def _room(self, index: Index, txn: Txn) -> int:
        slack = min(_INDEX_SLACK, self._budget // 16)
        return self._budget - slack - index.bytes_on_disk() - index.usage(txn)[0]

    def _reserve(self, index: Index, items: Sequence[WriteItem]) -> tuple[set[bytes], set[bytes]]:
        """Addresses that are there already, and those for which room is now reserved."""
        keep = {one[:KEY_BYTES] for item in items for one in (item.address, item.parent) if one}
        while True:
            there, wanted, lacking = set(), [], 0
            reserved: set[bytes] = set()
            with index.write() as txn:
                for item in items:
                    if index.get(txn, item.address) is not None:
                        there.add(item.address)
                    elif index.intent(txn, item.address) is None:
                        wanted.append(item)
                room = self._room(index, txn)
                lacking = sum(_charge(item.blob.size) for item in wanted) - room
                if lacking > 0 and self._evict(index, txn, lacking, keep):
                    continue
                for item in wanted:
                    charge = _charge(item.blob.size)
                    if charge <= room:
                        index.intend(txn, item.address, self._owner.id, charge)
                        reserved.add(item.address)
                        room -= charge
            if lacking > 0:
                metrics.dropped_stores.labels(self.name, "full").inc(len(wanted) - len(reserved))
                self._warn_once(f"no room within {self._budget} bytes")
            return there, reserved

    def _write_file(self, item: WriteItem) -> bool:
        """Write an object and rename it into place. On failure nothing is left and False returned."""
        temporary = self._owner.temporary(item.address)
        final = self._path(item.address)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for offset, buffers in item.blob.pieces():
                    _write_all(fd, buffers, offset)
                if self.durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            final.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.rename(final)
        except (OSError, TierError, CorruptObjectError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            metrics.dropped_stores.labels(self.name, "full" if full else "error").inc()
            self._warn_once(f"an object was not stored in {self.path}: {error}")
            return False
        return True

    def _commit(self, index: Index, items: Sequence[WriteItem], placed: Sequence[bool]) -> set[bytes]:
        """Make written objects visible, in order, each only if its parent is; undo the others."""
        committed = set()
        now = self._clock()
        try:
            with index.write() as txn:
                for item, whole in zip(items, placed, strict=True):
                    one, orphan = item.address, False
                    if whole and index.get(txn, one) is None:
                        orphan = item.parent is not None and index.get(txn, item.parent) is None
                        if not orphan:
                            record = Record(
                                _charge(item.blob.size), item.length, item.position, 0, now, now, 0.0,
                                item.parent or b"", item.root,
                            )  # fmt: skip
                            superseded = index.insert(txn, one, record, item.tokens)
                            index.settle(txn, one, keep=True)
                            committed.add(one)
                            for key in superseded:
                                self._drop_key(index, txn, key)
                            continue
                    if orphan:
                        self._path(one).unlink(missing_ok=True)
                        metrics.dropped_stores.labels(self.name, "orphan").inc()
                    index.settle(txn, one, keep=False)
        except (TierError, OSError):
            with self._guard:
                self._undo += [item.address for item in items]
            raise
        for item in items:
            if item.address in committed:
                metrics.store_bytes.labels(self.name).inc(item.blob.size)
        return committed

    # -- removing -------------------------------------------------------------------------------------

    def _drop_key(self, index: Index, txn: Txn, key: bytes) -> int:
        """Remove all parts of a childless key: files first, then rows. How many went."""
        parts = index.parts(txn, key)
        if any(record.children for _, record in parts):
            return 0
        for one, record in parts:
            self._path(one).unlink(missing_ok=True)
            index.remove(txn, one, record)
        return len(parts)

    def _evict(self, index: Index, txn: Txn, lacking: int, keep: set[bytes]) -> int:
        """Free up to `lacking` bytes in this transaction; how many objects went (0: nothing may go)."""
        before, gone = index.usage(txn)[0], 0
        now = self._clock()
        for name, raw in list(txn.cursor(index.quarantined))[:_UNLINKS]:
            (self.path / "quarantine" / bytes(name).decode()).unlink(missing_ok=True)
            index.add_usage(txn, -int.from_bytes(raw, "little"), 0)
            txn.delete(bytes(name), db=index.quarantined)
            gone += 1
        rounds = 0
        while before - index.usage(txn)[0] < lacking and gone < _UNLINKS and rounds < _ROUNDS:
            rounds += 1
            best: tuple[float, bytes] | None = None
            for one in index.sample_leaves(txn, _SAMPLES, self._random):
                key = one[:KEY_BYTES]
                if key in keep:
                    continue
                parts = index.parts(txn, key)
                if any(r.children or r.pinned_until > now or self._leased(part) for part, r in parts):
                    continue
                score = max(
                    self._policy(Facts(r.size, r.length, r.position, r.created, r.accessed), now)
                    for _, r in parts
                )
                if best is None or score < best[0]:
                    best = (score, key)
            if best is not None:
                went = self._drop_key(index, txn, best[1])
                metrics.evicted_objects.labels(self.name).inc(went)
                gone += went
                rounds = 0
        return gone

    def _leased(self, one: bytes) -> bool:
        try:
            return self._path(one).stat(follow_symlinks=False).st_nlink > 1
        except OSError:
            return False

    def delete(self, addresses: Sequence[bytes]) -> int:
        index = self._live()
        gone = 0
        for _ in range(3):  # somebody may store behind what is being deleted
            keys = self._subtree(index, addresses)
            for start in range(0, len(keys), _UNLINKS):
                with index.write() as txn:
                    gone += sum(self._drop_key(index, txn, key) for key in keys[start : start + _UNLINKS])
            if not any(self.contains(addresses)):
                break
        return gone

    def _subtree(self, index: Index, addresses: Sequence[bytes]) -> list[bytes]:
        """Keys of the objects and of all stored behind them, last first."""
        keys: dict[bytes, None] = {}
        level = [one[:KEY_BYTES] for one in addresses]
        with index.read() as txn:
            while level:
                following: list[bytes] = []
                for key in level:
                    if key in keys:
                        continue
                    keys[key] = None
                    for one, _ in index.parts(txn, key):
                        following += [child[:KEY_BYTES] for child in index.children_of(txn, one)]
                level = following
        return list(reversed(keys))

    def quarantine(self, address: bytes) -> None:
        index = self._live()
        path = self._path(address)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        kept = self._set_aside(path)
        with index.write() as txn:
            if kept is not None:
                self._keep_quarantined(index, txn, kept)
        metrics.corrupt_objects.labels(self.name).inc()
        self.delete([address])

    def _keep_quarantined(self, index: Index, txn: Txn, path: Path) -> None:
        size = _charge(path.stat(follow_symlinks=False).st_size)
        txn.put(path.name.encode(), size.to_bytes(8, "little"), db=index.quarantined)
        index.add_usage(txn, size, 0)

    def _set_aside(self, path: Path) -> Path | None:
        target = self.path / "quarantine" / f"{path.name}.{time.time_ns()}"
        try:
            path.rename(target)
        except OSError:
            return None
        return target

    def pin(self, addresses: Sequence[bytes], until: float) -> int:
        index = self._live()
        count = 0
        with index.write() as txn:
            for one in addresses:
                record = index.get(txn, one)
                if record is not None:
                    index.put(txn, one, record._replace(pinned_until=until))
                    count += 1
        return count

    # -- housekeeping ---------------------------------------------------------------------------------

    def maintain(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        if self._index is None or self._index.broken:
            self._reopen()
        index = self._live()
        self._owner.expire()
        self._flush_touched(index)
        self._settle_undone(index)
        with self._guard:
            missing, self._missing = self._missing, set()
        gone = [one for one in missing if not os.path.lexists(self._path(one))]
        if gone:
            self.delete(gone)
        self._shrink(index)
        if time.monotonic() - self._reconciled > _RECONCILE_SECONDS:
            self._reconcile()

    def _reopen(self) -> None:
        if self._index is not None:
            log.warning("kvass: %s: the index in %s was removed or damaged", self.name, self.path)
            index_module.release(self._index)
            self._index = None
            self._owner.close()
        self._open()

    def _flush_touched(self, index: Index) -> None:
        with self._guard:
            touched, self._touched = self._touched, {}
        if touched:
            with index.write() as txn:
                for one, when in touched.items():
                    record = index.get(txn, one)
                    if record is not None:
                        index.put(txn, one, record._replace(accessed=when))

    def _settle_undone(self, index: Index) -> None:
        with self._guard:
            undo, self._undo = self._undo, []
        if undo:
            with index.write() as txn:
                self._undo_intents(index, txn, undo)

    def _undo_intents(self, index: Index, txn: Txn, addresses: Sequence[bytes]) -> None:
        for one in addresses:
            if index.get(txn, one) is None and index.intent(txn, one) is not None:
                self._path(one).unlink(missing_ok=True)
            index.settle(txn, one, keep=False)

    def _shrink(self, index: Index) -> None:
        """Back to the budget, should it have been lowered; without looking for leaves when within it."""
        with index.read() as txn:
            over = -self._room(index, txn)
        while over > 0:
            with index.write() as txn:
                if not self._evict(index, txn, over, set()):
                    return
                over = -self._room(index, txn)

    def _reconcile(self) -> None:
        """Undo what dead owners left: looks at their intents and folders, never at the objects."""
        index = self._live()
        self._reconciled = time.monotonic()
        for folder in list((self.path / "owners").iterdir()):
            if folder == self._owner.folder:
                continue
            with dead_owner(folder) as dead:
                if not dead:
                    continue
                try:
                    owner = bytes.fromhex(folder.name)
                except ValueError:
                    continue
                with index.write() as txn:
                    self._undo_intents(index, txn, index.intents_of(txn, owner))
                shutil.rmtree(folder, ignore_errors=True)

    def _warn_once(self, message: str) -> None:
        kind = message.split(":", maxsplit=1)[0]
        with self._guard:
            if kind in self._warned:
                return
            self._warned.add(kind)
        log.warning("kvass: %s: %s; the store is given up, what was there stays", self.name, message)

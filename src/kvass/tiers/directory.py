"""The directory tier: one file an object, shared by all processes of a machine; host tier and SSD tier.

On a tmpfs it is the shared host tier; elsewhere it is durable and files are fsynced. The protocol
(docs/tiers.md): reserve room in the index, write and rename, commit in the index; unlink before the row
goes. Whoever dies in between leaves an intent that names what to undo, so nothing is ever searched for.
More than 500 lines: every verb is one transaction of that protocol, and none makes sense without the others.
"""

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from kvass import metrics
from kvass.chunks import Tokens
from kvass.clock import Clock, system_clock
from kvass.container import Reader
from kvass.errors import KvassError, TierError, TierUnavailableError
from kvass.keys import KEY_BYTES, address_text
from kvass.policy.eviction import EvictionPolicy, lru
from kvass.tiers import marks, rebuild
from kvass.tiers.base import Child, Entry, Lease, Mark, Run, Tier, Usage, WriteItem
from kvass.tiers.batches import batches, by_key, sift
from kvass.tiers.environment import Txn, destroy
from kvass.tiers.files import FileReader, charge, discard, on_tmpfs, open_object, others_may_write, write_all
from kvass.tiers.index import Index, Record, release
from kvass.tiers.owners import Owner
from kvass.tiers.reconciling import reconcile, undo_intent
from kvass.tiers.removing import Remover

__all__ = ["DirectoryTier", "on_tmpfs"]

log = logging.getLogger("kvass.tiers")

_BATCH = 32
_RECONCILE_SECONDS = 10.0
_LOOK_SECONDS = 0.1
"""How often who lacks room asks whether those who reserved it still live."""
_CLOSE_SECONDS = 10.0


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
        self._clock = clock
        self._remover = Remover(self.path, name, budget, policy, clock, seed)
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._housekeeping = threading.Lock()
        self._idle = threading.Condition()
        self._active = 0
        self._touched: dict[bytes, float] = {}
        self._undo: list[tuple[bytes, bytes]] = []
        self._warned: set[str] = set()
        self._reconciled = -_RECONCILE_SECONDS
        self._closed = False
        self._lost: Index | None = None
        try:
            self._make_folders()
            self._owner = Owner(self.path / "owners")
        except OSError as error:
            raise TierUnavailableError(f"cannot use {self.path} as a tier: {error}") from error
        try:
            self._index: Index | None = self._open_index()
        except TierError:
            self._owner.close()
            raise

    # -- opening and closing --------------------------------------------------------------------------

    def _make_folders(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if others_may_write(self.path):
            raise TierUnavailableError(
                f"{self.path} belongs to or may be written by somebody else; use another directory"
            )
        self.durable = not on_tmpfs(self.path)
        for folder in ("objects", "owners", "quarantine"):
            (self.path / folder).mkdir(mode=0o700, exist_ok=True)

    def _open_index(self) -> Index:
        try:
            with rebuild.setup_lock(self.path):
                rebuild.check_format(self.path)
                if self._lost is not None and self._lost.unsound():
                    destroy(self.path / "index")
                index = rebuild.open_index(self.path, self.name, durable=self.durable)
        except OSError as error:
            raise TierUnavailableError(f"cannot use {self.path} as a tier: {error}") from error
        self._lost = None
        return index

    def _live(self) -> Index:
        if self._pid != os.getpid():
            raise TierUnavailableError(f"the {self.name} tier was opened before a fork; open it again")
        if self._closed:
            raise TierUnavailableError(f"the {self.name} tier is closed")
        if self._index is None:
            raise TierUnavailableError(f"the {self.name} tier in {self.path} cannot be used at present")
        return self._index

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Counts who changes something: `close` waits for them."""
        if self._pid != os.getpid():
            self._live()
        with self._idle:
            if self._closed:
                self._live()
            self._active += 1
        try:
            yield
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def close(self) -> None:
        if self._pid != os.getpid():
            self._owner.abandon()
            self._closed = True
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
        # On a thread of its own: a process that stands still in a transaction would hold us up for ever.
        ending = threading.Thread(target=self._end, name="kvass-close", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            self._end()
            return
        ending.join(_CLOSE_SECONDS)
        if ending.is_alive():
            log.warning("kvass: %s: the tier in %s is still in use and stays open", self.name, self.path)

    def _end(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._active)
        index, self._index = self._index, None
        if index is not None:
            for settle in (self._settle_undone, self._flush_touched):
                with contextlib.suppress(TierError, OSError):
                    settle(index)
            release(index)
        self._owner.close()

    # -- reading --------------------------------------------------------------------------------------

    def _path(self, one: bytes) -> Path:
        return rebuild.object_path(self.path, one)

    def contains(self, addresses: Sequence[bytes]) -> list[bool]:
        index = self._live()
        with index.read() as txn:
            get, rows = txn.get, index.objects
            return [get(one, None, rows) is not None for one in addresses]

    def nearest_child(self, parent: bytes, tokens: Tokens) -> Child | None:
        index = self._live()
        with index.read() as txn:
            return index.nearest_child(txn, parent, tokens)

    def seen(self, root: bytes, values: Sequence[int]) -> list[Mark]:
        """See `kvass.tiers.base.Marking`."""
        index = self._live()
        with index.read() as txn:
            return marks.seen(index, txn, root, values)

    def open(self, address: bytes) -> AbstractContextManager[Reader]:
        self._live()
        try:
            return open_object(self._path(address))
        except FileNotFoundError:
            return self._open_leased(address)

    def _open_leased(self, one: bytes) -> FileReader:
        link = self._owner.leased(one)
        if link is not None:
            with contextlib.suppress(FileNotFoundError):
                return open_object(link)
        self._remover.note_missing([one])
        raise KeyError(address_text(one)) from None

    def touch(self, addresses: Sequence[bytes]) -> None:
        self._live()
        now = self._clock()
        with self._guard:
            self._touched.update(dict.fromkeys(addresses, now))

    def scan(self) -> Iterator[Entry]:
        self._live()
        return self._scan()

    def _scan(self) -> Iterator[Entry]:
        after = b""
        while batch := self._entries(after):
            yield from batch
            after = batch[-1].address

    def _entries(self, after: bytes) -> list[Entry]:
        """The next thousand. A transaction's variable must not outlive it: see `Environment.hold`."""
        index, found = self._live(), []
        with index.read() as txn:
            cursor = txn.cursor(index.objects)
            if cursor.set_range(after + b"\0"):
                for one, raw in itertools.islice(cursor, 1000):
                    r = Record.unpack(raw)
                    found.append(
                        Entry(
                            bytes(one), r.parent or None, r.root, r.position, r.length, r.size, r.created,
                            r.accessed, r.pinned_until,
                        )
                    )  # fmt: skip
        return found

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
        done: list[bool] = []
        keep = {one[:KEY_BYTES] for item in items for one in (item.address, item.parent) if one}
        with self._changing():
            index, owner = self._live(), self._owner
            for batch in batches(items, _BATCH):
                done += self._write_batch(index, owner, batch, keep, run)
        return done

    def _write_batch(
        self, index: Index, owner: Owner, items: Sequence[WriteItem], keep: set[bytes], run: Run
    ) -> list[bool]:
        there, reserved = self._reserve(index, owner, items, keep)
        placed: set[bytes] = set()

        def place(item: WriteItem) -> bool:
            if self._write_file(owner, item):
                placed.add(item.address)
            return item.address in placed

        try:
            for _ in run(place, reserved):
                pass
        finally:  # also when a blob raises what no blob should: what is in place counts or goes
            if reserved:
                there = self._commit(index, owner, there, reserved, placed)
        return [item.address in there for item in items]

    def _reserve(
        self, index: Index, owner: Owner, items: Sequence[WriteItem], keep: set[bytes]
    ) -> tuple[set[bytes], list[WriteItem]]:
        """Addresses that are there already, and the items for which room is now reserved."""
        while True:
            reserved: list[WriteItem] = []
            with index.write() as txn:
                found = sift(index, txn, items, self._remover.most(index))
                room = self._remover.room(index, txn)
                lacking = sum(charge(item.blob.size) for item in found.wanted) - room
                if lacking > 0 and self._remover.evict(index, txn, lacking, keep):
                    continue
                dead = (lacking > 0 or found.taken) and self._may_be_dead(index, txn, owner)
                without = set(found.large)
                for parts in by_key(found.wanted if not dead else ()):  # all or none: as what they supersede
                    needed = sum(charge(item.blob.size) for item in parts)
                    if needed > room or any(item.parent in without for item in parts):
                        without.update(item.address for item in parts)
                        continue
                    for item in parts:
                        index.intend(txn, item.address, owner.id, charge(item.blob.size))
                    reserved += parts
                    room -= needed
            if dead:
                self._reconcile(index)
                continue
            if without:
                self._dropped("full", len(without), f"no room within {self._budget} bytes")
            if found.orphans:
                self._dropped("orphan", found.orphans)
            return found.there, reserved

    def _may_be_dead(self, index: Index, txn: Txn, owner: Owner) -> bool:
        """Whether others hold reservations, and nobody has looked of late if they live."""
        looked = time.monotonic() - self._reconciled < _LOOK_SECONDS
        return not looked and bool(index.writers(txn) - {owner.id})

    def _write_file(self, owner: Owner, item: WriteItem) -> bool:
        """Write an object and rename it into place. On failure nothing is left and False returned."""
        temporary = self._write_temporary(owner, item)
        if temporary is None:
            return False
        final = self._path(item.address)
        try:
            final.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.rename(final)
        except OSError as error:
            self._not_stored(error)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return False
        return True

    def _write_temporary(self, owner: Owner, item: WriteItem) -> Path | None:
        """Write an object under the owner's `tmp/`. On failure nothing is left and None returned."""
        temporary = owner.temporary(item.address)
        written = False
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for offset, buffers in item.blob.pieces():
                    write_all(fd, buffers, offset)
                if os.fstat(fd).st_size != item.blob.size:
                    raise TierError("the object is not of the size that it said")
                if self.durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            written = True
        except (OSError, KvassError) as error:
            self._not_stored(error)
        finally:
            if not written:
                with contextlib.suppress(OSError):
                    temporary.unlink()
        return temporary if written else None

    def _not_stored(self, error: BaseException) -> None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._dropped("full" if full else "error", 1, f"an object was not stored in {self.path}: {error}")

    def _commit(
        self, index: Index, owner: Owner, there: set[bytes], items: Sequence[WriteItem], placed: set[bytes]
    ) -> set[bytes]:
        """Make placed objects visible, in order, each only if its parent is, and undo the others.

        Returns those of `there` and of the items that are there now.
        """
        stored = 0
        try:
            with index.write() as txn:
                there = set(there)
                for item in items:
                    one = item.address
                    reservation = index.intent(txn, one)
                    if index.get(txn, one) is not None:  # the index was rebuilt, with this file
                        there.add(one)
                    elif reservation is None or reservation[0] != owner.id:
                        # Somebody took us for dead. Unless another one writes the same, the file goes.
                        if reservation is None:
                            discard(self._path(one))
                        continue
                    elif one not in placed:
                        discard(self._path(one))
                    elif item.parent is not None and index.get(txn, item.parent) is None:
                        discard(self._path(one))
                        self._dropped("orphan", 1)
                    else:
                        there.difference_update(self._enter(index, txn, item))
                        there.add(one)
                        stored += item.blob.size
                        index.settle(txn, one, keep=True)
                        continue
                    if reservation is not None and reservation[0] == owner.id:
                        index.settle(txn, one, keep=False)
        except (TierError, OSError):
            with self._guard:
                self._undo += [(item.address, owner.id) for item in items]
            raise
        metrics.store_bytes.labels(self.name).inc(stored)
        return there

    def _enter(self, index: Index, txn: Txn, item: WriteItem) -> list[bytes]:
        """Insert a record; addresses that it superseded. A pin on one of those passes on to it."""
        now = self._clock()
        size, parent = charge(item.blob.size), item.parent or b""
        record = Record(size, item.length, item.position, 0, now, now, 0.0, parent, item.root)
        gone: list[bytes] = []
        for key in index.insert(txn, item.address, record, item.tokens):
            parts = index.parts(txn, key)
            if self._remover.drop_key(index, txn, key):
                gone += [part for part, _ in parts]
                pinned = max(old.pinned_until for _, old in parts)
                if pinned:
                    index.put(txn, item.address, record._replace(pinned_until=pinned))
        if item.marks is not None:
            marks.insert(index, txn, item.address, item.root, item.marks)
        return gone

    def replace(self, item: WriteItem) -> bool:
        """Write an object in place of the one at its address, at once: whoever opens it gets one of both.
        Parent, children and pin stay. False, and nothing changed, where there is none or no room."""
        with self._changing():
            index, owner = self._live(), self._owner
            size = charge(item.blob.size)
            if not self._reserve_beside(index, owner, item, size):
                return False
            temporary = self._write_temporary(owner, item)
            try:
                return self._put_in_place(index, owner, item.address, size, temporary)
            except (TierError, OSError):
                with self._guard:
                    self._undo.append((item.address, owner.id))
                raise
            finally:
                if temporary is not None:
                    with contextlib.suppress(OSError):
                        temporary.unlink(missing_ok=True)

    def _reserve_beside(self, index: Index, owner: Owner, item: WriteItem, size: int) -> bool:
        """Reserve room for an object that will take the place of the one at its address."""
        keep = {one[:KEY_BYTES] for one in (item.address, item.parent) if one}
        while True:
            with index.write() as txn:
                if index.get(txn, item.address) is None or index.intent(txn, item.address) is not None:
                    return False
                lacking = size - self._remover.room(index, txn)
                if lacking <= 0:
                    index.intend(txn, item.address, owner.id, size)
                    return True
                if not self._remover.evict(index, txn, lacking, keep):
                    return False

    def _put_in_place(
        self, index: Index, owner: Owner, one: bytes, size: int, temporary: Path | None
    ) -> bool:
        """Rename a new file over an object's. Whoever dies in between leaves an intent: see `undo_intent`."""
        with index.write() as txn:
            record, reservation = index.get(txn, one), index.intent(txn, one)
            if reservation is None or reservation[0] != owner.id:  # somebody took us for dead
                return False
            if temporary is not None and record is not None:
                temporary.rename(self._path(one))
                index.put(txn, one, record._replace(size=size))
                index.add_usage(txn, size - record.size, 0)
            index.settle(txn, one, keep=False)
            return temporary is not None and record is not None

    # -- removing -------------------------------------------------------------------------------------

    def delete(self, addresses: Sequence[bytes]) -> int:
        with self._changing():
            return self._remover.delete(self._live(), addresses)

    def delete_leaves(self, addresses: Sequence[bytes]) -> int:
        """See `kvass.tiers.base.Pruning`."""
        with self._changing():
            return self._remover.delete_leaves(self._live(), addresses)

    def quarantine(self, address: bytes) -> None:
        with self._changing():
            self._remover.quarantine(self._live(), address)

    def pin(self, addresses: Sequence[bytes], until: float) -> int:
        count = 0
        with self._changing():
            index = self._live()
            with index.write() as txn:
                for one in addresses:
                    record = index.get(txn, one)
                    if record is not None:
                        index.put(txn, one, record._replace(pinned_until=until))
                        count += 1
        return count

    # -- housekeeping ---------------------------------------------------------------------------------

    def maintain(self) -> None:
        with self._changing(), self._housekeeping:
            if self._index is None or self._index.broken:
                self._reopen()
            index = self._live()
            if not self._owner.intact():
                self._owner.abandon()
                self._owner = Owner(self.path / "owners")
            self._owner.expire()
            self._flush_touched(index)
            self._settle_undone(index)
            self._remover.mend(index)
            self._remover.shrink(index)
            if time.monotonic() - self._reconciled > _RECONCILE_SECONDS:
                self._reconcile(index)

    def _reconcile(self, index: Index) -> None:
        self._reconciled = time.monotonic()
        reconcile(self.path, index, self._owner)

    def _reopen(self) -> None:
        if self._index is not None:
            log.warning("kvass: %s: the index in %s was removed or damaged", self.name, self.path)
            self._lost, self._index = self._index, None
            release(self._lost)
        try:
            self._make_folders()
        except OSError as error:
            raise TierUnavailableError(f"cannot use {self.path} as a tier: {error}") from error
        self._index = self._open_index()

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
            undo = list(self._undo)
        if undo:
            with index.write() as txn:
                for one, owner in undo:
                    undo_intent(self.path, index, txn, one, owner)
            with self._guard:
                del self._undo[: len(undo)]

    def _dropped(self, reason: str, count: int, message: str = "") -> None:
        metrics.dropped_stores.labels(self.name, reason).inc(count)
        kind = message.split(":", maxsplit=1)[0]
        with self._guard:
            if not message or kind in self._warned:
                return
            self._warned.add(kind)
        log.warning("kvass: %s: %s; nothing of it is stored, what was there stays", self.name, message)

"""One LMDB environment, and the ways in which LMDB kills a process or waits for ever kept away from it.

LMDB maps its files: what was truncated or never allocated is a SIGBUS, not an error. A writer's lock has
no timeout. One process may open a file once. A forked child must not use what its parent opened.
"""

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb

from kvass.errors import TierFullError, TierUnavailableError

Txn = Any  # lmdb.Transaction; the library ships no types

_MAP_BYTES = 64 << 30
_MAX_READERS = 1024
_PAGE = 4096
_LOCK_BYTES = -(-(128 + 64 * _MAX_READERS) // _PAGE) * _PAGE
_READER_CHECK_WRITES = 16
"""How often one looks for readers that were killed: until then no page that they might see is used again."""
_TAIL_PAGES = 64
_OPEN_SECONDS = 10.0
_CLOSE_SECONDS = 10.0
_FORK_SECONDS = 1.0
_META_MAGIC = 0xBEEFC0DE
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)

_DAMAGE = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError,
    lmdb.VersionMismatchError, lmdb.IncompatibleError, lmdb.BadTxnError, struct.error,
)  # fmt: skip
"""What LMDB calls damage (a bad transaction, where a database's own record is damaged), and a row that
cannot be unpacked. A full tmpfs shows as a plain lmdb.Error."""


_STANDS_STILL = "a process that stands still holds the lock of the index in {}"

_late: dict[Path, threading.Thread] = {}
"""Openings that were given up, by folder, and still wait for the lock."""


class IndexDamagedError(TierUnavailableError):
    """The index's files are no sound LMDB database: `destroy` them and rebuild."""


class Environment:
    """`read` and `write` give transactions; all else happens inside one.

    Only `write` may wait, for other writers, without limit: it belongs on a background thread.
    `broken`: was closed, removed or damaged, and answers no more; `damaged`: its files are unsound.
    """

    databases: tuple[str, ...] = ()
    """Names of the databases; each becomes an attribute."""

    def __init__(self, folder: Path, *, durable: bool):
        """Open or create. Raises IndexDamagedError when only `destroy` helps, else TierUnavailableError."""
        self._folder = folder
        self._data = folder / "data.mdb"
        self._guard = threading.Condition()
        self._users = 0
        self._writes = 0
        self._size = self._inode = self._lock_inode = 0
        self._opened = False
        self._failure: Exception | None = None
        self.broken = False
        self.damaged = False
        late = _late.get(folder)
        if late is not None:  # it has the environment open until it has the lock, and a process only once
            late.join(_OPEN_SECONDS)
            if late.is_alive():
                raise TierUnavailableError(_STANDS_STILL.format(folder))
            del _late[folder]
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_data_file(self._data)
            _preallocate(folder / "lock.mdb")
            self._env = lmdb.open(
                str(folder), map_size=_MAP_BYTES, max_dbs=len(self.databases) + 1, max_readers=_MAX_READERS,
                mode=0o600, sync=durable, metasync=False, max_spare_txns=0,
            )  # fmt: skip
        except _DAMAGE as error:
            raise IndexDamagedError(f"the index in {folder} is damaged: {error}") from error
        except (lmdb.Error, OSError, MemoryError) as error:
            raise TierUnavailableError(f"cannot open the index in {folder}: {error}") from error
        opening = threading.Thread(target=self._open_databases, name="kvass-index", daemon=True)
        opening.start()
        opening.join(_OPEN_SECONDS)
        with self._guard:
            self.broken = not self._opened
            if isinstance(self._failure, _DAMAGE):
                raise IndexDamagedError(
                    f"the index in {folder} is damaged: {self._failure}"
                ) from self._failure
            if self._failure is not None:
                raise TierUnavailableError(
                    f"cannot open the index in {folder}: {self._failure}"
                ) from self._failure
            if self.broken:
                _late[folder] = opening
                raise TierUnavailableError(_STANDS_STILL.format(folder))

    def _open_databases(self) -> None:
        """On a thread of its own, since naming databases takes the writers' lock. Closes when too late."""
        try:
            self._env.reader_check()
            with self._env.begin(write=True) as txn:
                for name in self.databases:
                    setattr(self, name, self._env.open_db(name.encode(), txn=txn))
            self._inode = self._data.stat().st_ino
            self._lock_inode = (self._folder / "lock.mdb").stat().st_ino
        except (*_DAMAGE, lmdb.Error, OSError) as error:
            self._failure = error
        with self._guard:
            self._opened = self._failure is None and not self.broken
            if not self._opened:
                self._env.close()

    @contextlib.contextmanager
    def read(self) -> Iterator[Txn]:
        """A read transaction: never waits for writers, sees one moment."""
        with self._use(), self._translated(), self._env.begin(buffers=True) as txn:
            yield txn

    @contextlib.contextmanager
    def write(self) -> Iterator[Txn]:
        """A write transaction over all processes; committed at the end, undone on any exception."""
        with self._use(writing=True), self._translated():
            self._writes += 1
            if self._writes % _READER_CHECK_WRITES == 0:
                self._env.reader_check()
            with self._env.begin(write=True) as txn:
                with self._guard:
                    self._check_files(writing=True)  # again: the lock may have been long in coming
                yield txn

    @contextlib.contextmanager
    def _use(self, *, writing: bool = False) -> Iterator[None]:
        with self._guard:
            self._check_files(writing=writing)
            self._users += 1
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                self._guard.notify_all()

    def _check_files(self, *, writing: bool) -> None:
        """Go no further with files that were removed or truncated behind our back."""
        if not self.broken:
            try:
                status = self._data.stat()
                self.broken = status.st_ino != self._inode
                if writing and not self.broken:
                    self.broken = (self._folder / "lock.mdb").stat().st_ino != self._lock_inode
            except OSError:
                self.broken = True
            else:
                if not self.broken and status.st_size < self._size:
                    self.broken = self.damaged = True
                self._size = max(self._size, status.st_size)
        if self.broken:
            raise TierUnavailableError(f"the index in {self._folder} was closed, removed or damaged")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            raise TierFullError(f"no room for the index in {self._folder}: {error}") from error
        except lmdb.ReadersFullError as error:
            raise TierUnavailableError(f"too many readers of the index in {self._folder}") from error
        except _DAMAGE as error:
            self.broken = self.damaged = True
            raise IndexDamagedError(f"the index in {self._folder} is damaged: {error}") from error
        except lmdb.Error as error:
            raise TierUnavailableError(f"the index in {self._folder} failed: {error}") from error

    def close(self) -> None:
        """Wait for running transactions and close. One that never ends keeps the files open: closing
        them under it would take the process down."""
        with self._guard:
            self.broken = True
            idle = self._guard.wait_for(lambda: self._users == 0, timeout=_CLOSE_SECONDS)
        if idle:
            self._env.close()

    def hold(self) -> None:
        """Before a fork: let running transactions end and none begin, for a child must not take part in one.
        Closing the environment there would end it for the parent too, in the table that they share."""
        self._guard.acquire()
        self._guard.wait_for(lambda: self._users == 0, timeout=_FORK_SECONDS)

    def let_go(self) -> None:
        """After a fork, in the parent."""
        self._guard.release()

    def abandon(self) -> None:
        """After a fork, in the child: close, or else keep for ever what may not be closed."""
        self.broken = True
        if self._users:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._env))
        else:
            self._env.close()
        self._guard.release()

    def bytes_on_disk(self) -> int:
        """Bytes that the index itself takes."""
        try:
            return self._data.stat().st_blocks * 512 + _LOCK_BYTES
        except OSError:
            return 0

    def unsound(self) -> bool:
        """Whether the files that are there now are those that proved damaged."""
        try:
            return self.damaged and self._data.stat().st_ino == self._inode
        except OSError:
            return False


def destroy(folder: Path) -> None:
    """Remove an index's files. Processes that still have it open notice and open the new one."""
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)


def _preallocate(lock: Path) -> None:
    """Give LMDB's lock file all its blocks: mapping a hole of a full disk kills the process (SIGBUS)."""
    with contextlib.suppress(FileNotFoundError):
        if lock.stat().st_size >= _LOCK_BYTES:
            return  # not even opened: closing it would give up the locks that this process holds on it
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_BYTES)
    finally:
        os.close(fd)


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
            if page not in _PAGE_SIZES:
                raise IndexDamagedError(f"{data} is no index")
            for at in (0, page):
                file.seek(at)
                meta = file.read(152)
                if len(meta) < 152 or struct.unpack_from("<I", meta, 16)[0] != _META_MAGIC:
                    raise IndexDamagedError(f"{data} is damaged")
                missing = (struct.unpack_from("<Q", meta, 136)[0] + 1) * page - size
                if missing > _TAIL_PAGES * page:
                    raise IndexDamagedError(f"{data} is truncated")
                if missing > 0:
                    os.posix_fallocate(file.fileno(), size, missing)
    except FileNotFoundError:
        return

"""One SQLite file that processes share: nothing here raises, waits for long, or trusts a damaged file.

A forked child must not use what its parent had open, nor open it again beside that: SQLite takes locks for
held that a fork does not pass on. So nothing is open across a fork.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from kvass import metrics
from kvass.errors import TierError, TierUnavailableError
from kvass.tiers.files import others_may_write
from kvass.workers import Workers

log = logging.getLogger("kvass.jobs")

T = TypeVar("T")

_BUSY_SECONDS: Final = 1.0
"""How long a transaction waits for one of another process."""

_LOCK_SECONDS: Final = 1.0
_FORK_SECONDS: Final = 1.0
_WAL_BYTES: Final = 16 << 20
_PRIMARY: Final = 0xFF
"""SQLite's extended error codes have the plain one in their last byte."""

_ERRORS: Final = (sqlite3.Error, UnicodeError)
"""The module's own, and about text that is no UTF-8, such as in a message about a damaged schema."""

_DAMAGE: Final = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_MISMATCH,
)
"""SQLITE_ERROR: a table or column that our statements name is not there."""

_databases: "weakref.WeakSet[Database]" = weakref.WeakSet()
_inherited: set[Path] = set()
"""Files that could not be closed before a fork: out of use in this child."""


class OtherSchemaError(TierError):
    """The file is sound, and none of ours."""


class Database:
    """All work is done by one thread of its own, so that whoever asks can stop waiting for it."""

    def __init__(self, path: Path, schema: Sequence[str]):
        """`schema`: one CREATE statement each. The file is opened when it is first asked for."""
        self.path = path
        self._schema = schema
        self._guard = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._late: Future[Any] | None = None
        self._said: set[str] = set()
        self._held = False
        self._thread = Workers(1, "kvass-jobs")
        _databases.add(self)

    def ask(self, operation: str, work: Callable[[sqlite3.Connection], T], default: T, seconds: float) -> T:
        """What `work` says; `default`, counted as an error of `operation`, where it does not within so many
        seconds, or the file cannot be used."""
        try:
            return self._answer(work, seconds)
        except (*_ERRORS, OSError, TierError, MemoryError) as error:
            metrics.errors.labels("jobs", operation).inc()
            kind = f"{operation} {type(error).__name__}"
            if kind not in self._said:
                self._said.add(kind)
                log.warning("kvass: the queue of jobs in %s, %s: %s", self.path.parent, operation, error)
            return default

    def _answer(self, work: Callable[[sqlite3.Connection], T], seconds: float) -> T:
        if self._late is not None and not self._late.done():
            raise TierUnavailableError("an earlier call stands still")
        future = self._thread.submit(partial(self._call, work))
        try:
            return future.result(seconds)
        except TimeoutError:
            if not future.cancel():
                self._late = future
            raise TierUnavailableError(f"no answer within {seconds:.2g} s") from None

    def check(self) -> None:
        """Raises OSError, sqlite3.Error or TierError, saying why the file cannot be used."""
        self._answer(lambda db: db.execute("SELECT 1").fetchone(), _LOCK_SECONDS + _BUSY_SECONDS)

    # -- on the thread --------------------------------------------------------------------------------

    def _call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._guard:
            db = self._connected()
            try:
                return work(db)
            except _ERRORS as error:
                if _damaged(error):
                    self._close()
                    with self._alone():
                        self._put_aside(error)
                raise

    def _connected(self) -> sqlite3.Connection:
        """The file that has the name now; another process may have put ours aside."""
        if self._db is not None and _inode(self.path) == self._inode:
            return self._db
        self._close()
        if self.path in _inherited:
            raise TierUnavailableError("it was in use while this process was forked")
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if others_may_write(self.path.parent):
            raise TierUnavailableError(
                "it belongs to or may be written by somebody else; use another directory"
            )
        with self._alone():
            try:
                self._db = self._open()
            except (*_ERRORS, OtherSchemaError) as error:
                if not _damaged(error):
                    raise
                self._put_aside(error)
                self._db = self._open()
        return self._db

    def _open(self) -> sqlite3.Connection:
        self.path.touch(mode=0o600)  # opens it only to make it: closing would give up locks on it
        status = self.path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise TierUnavailableError(f"{self.path} is no regular file; remove it")
        self._inode = status.st_ino
        db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA trusted_schema = OFF")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            with writing(db):
                if not _schema(db):
                    for statement in self._schema:
                        db.execute(statement)
                if _schema(db) != sorted(self._schema):
                    raise OtherSchemaError("its tables are none of this kvass'")
        except BaseException:
            db.close()
            raise
        return db

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process opens the file or puts it aside meanwhile: the files beside it go by its name."""
        fd = os.open(
            self.path.with_name("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            end = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise TierUnavailableError("another process stands still opening it") from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(fd)

    def _put_aside(self, why: Exception) -> None:
        """Once over all processes: who comes second finds another file there."""
        if _inode(self.path) != self._inode:
            return
        aside = self.path.with_suffix(".damaged")
        self.path.replace(aside)
        for more in ("-wal", "-shm"):
            self.path.with_name(self.path.name + more).unlink(missing_ok=True)
        metrics.corrupt_objects.labels("jobs").inc()
        log.warning("kvass: the queue of jobs is begun anew, the old one is %s: %s", aside, why)

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    # -- ends and forks -------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what was asked for, and close the file."""
        if self._thread.close(_BUSY_SECONDS + _LOCK_SECONDS):
            with self._guard:
                self._close()

    def hold(self) -> None:
        """Before a fork."""
        self._held = self._guard.acquire(timeout=_FORK_SECONDS)
        if self._held:
            self._close()

    def let_go(self, *, child: bool) -> None:
        """After a fork."""
        if self._held:
            self._guard.release()
        elif child:
            _inherited.add(self.path)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))  # closing it is as bad as using it


def _before_fork() -> None:
    for one in list(_databases):
        one.hold()


def _after_fork(*, child: bool) -> None:
    for one in list(_databases):
        one.let_go(child=child)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=partial(_after_fork, child=False),
    after_in_child=partial(_after_fork, child=True),
)


@contextlib.contextmanager
def writing(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction over all processes; undone on any exception."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")


def _schema(db: sqlite3.Connection) -> list[str]:
    return sorted(sql for (sql,) in db.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"))


def _damaged(error: Exception) -> bool:
    """Errors without a code are not SQLite's, but about what it gave back."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & _PRIMARY in _DAMAGE


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0

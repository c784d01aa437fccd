"""Who writes and leases in a directory tier: one folder a tier object, held by a file lock while it lives.

Process ids are no identity: containers that share a tmpfs have the same ones. A lock that the kernel
drops with its holder is.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvass.keys import address_text
from kvass.tiers.base import Lease

_UNNAMED = ".new-"
_ATTEMPTS = 8

_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()


class Owner:
    """This process's folder in a directory tier: its temporary files and its leases (hard links)."""

    def __init__(self, parent: Path):
        """Make the folder under a temporary name and lock it first: nobody ever sees it unlocked.

        Raises OSError.
        """
        self._parent = parent
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._leases: dict[int, tuple[float, list[Path]]] = {}
        self._count = 0
        # Whoever cleans up may take our folder for a dead one's before it is locked.
        for _ in range(_ATTEMPTS):
            self.id = uuid.uuid4().bytes
            self.folder = parent / self.id.hex()
            fresh = parent / (_UNNAMED + self.id.hex())
            self._lock = -1
            try:
                self._make(fresh)
                break
            except (FileNotFoundError, BlockingIOError):
                self.abandon()
            except OSError:
                self.abandon()
                shutil.rmtree(fresh, ignore_errors=True)
                raise
        else:
            raise FileNotFoundError(errno.ENOENT, "is removed as soon as it is made", str(parent))
        _owners.add(self)

    def _make(self, fresh: Path) -> None:
        fresh.mkdir(mode=0o700)
        self._lock = os.open(fresh / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in ("tmp", "leases"):
            (fresh / name).mkdir(mode=0o700)
        fresh.rename(self.folder)

    def intact(self) -> bool:
        """Whether the folder is still there, with the lock that we hold."""
        try:
            return (self.folder / "lock").stat().st_ino == os.fstat(self._lock).st_ino
        except OSError:
            return False

    def temporary(self, one: bytes) -> Path:
        """Where an object is written before it is renamed into place; unlike for two threads."""
        return self.folder / "tmp" / f"{address_text(one)}.{self._next()}"

    def _next(self) -> int:
        with self._guard:
            self._count += 1
            return self._count

    def lease(self, objects: Sequence[tuple[bytes, Path]], seconds: float) -> Lease:
        """Hard-link what is there. Eviction passes over files with a second link. Raises OSError."""
        number = self._next()
        held: list[bytes] = []
        links: list[Path] = []
        with self._guard:
            self._leases[number] = (time.monotonic() + seconds, links)
        try:
            for one, path in objects:
                link = self.folder / "leases" / f"{address_text(one)}.{number}"
                with contextlib.suppress(FileNotFoundError):
                    os.link(path, link, follow_symlinks=False)
                    held.append(one)
                    links.append(link)
        except OSError:
            self._release(number)
            raise
        return Lease(held, lambda: self._release(number))

    def leased(self, one: bytes) -> Path | None:
        """The link of a lease on this object, if this owner holds one."""
        name = address_text(one) + "."
        with self._guard:
            for _, links in self._leases.values():
                for link in links:
                    if link.name.startswith(name):
                        return link
        return None

    def _release(self, number: int) -> None:
        if self._pid != os.getpid():  # a forked child leaves its parent's leases alone
            return
        with self._guard:
            _, links = self._leases.pop(number, (0.0, []))
        for link in links:
            with contextlib.suppress(OSError):
                link.unlink()

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = time.monotonic()
        with self._guard:
            over = [number for number, (end, _) in self._leases.items() if end <= now]
        for number in over:
            self._release(number)

    def close(self) -> None:
        """Remove the folder, leases and all; what cannot be removed is left to whoever cleans up."""
        with contextlib.suppress(OSError):  # raised even so, where a folder's own descriptor fails
            shutil.rmtree(self.folder, ignore_errors=True)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the lock without touching the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _after_fork() -> None:
    # The lock belongs to the open file, which a child shares: it would outlive the parent.
    for owner in list(_owners):
        owner.abandon()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def dead_owner(folder: Path) -> Iterator[bytes | None]:
    """The id of a folder's owner if it is gone (empty: it never had a name), else None.

    While the block runs, the folder is locked against others who would clean up after it.
    """
    unnamed = folder.name.startswith(_UNNAMED)
    try:
        name = b"" if unnamed else bytes.fromhex(folder.name)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except (ValueError, NotADirectoryError):
        yield None
        return
    except FileNotFoundError:
        if unnamed:  # just being made, perhaps: then it is not empty any more, or will be made again
            with contextlib.suppress(OSError):
                folder.rmdir()
        yield None if unnamed else name
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dead = True
    except BlockingIOError:
        dead = False
    try:
        yield name if dead else None
    finally:
        os.close(fd)

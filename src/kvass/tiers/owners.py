"""Who writes and leases in a directory tier: one folder a tier object, held by a file lock while it lives.

Process ids are no identity: containers that share a tmpfs have the same ones. A lock that the kernel
drops with its holder is.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvass.keys import address_text
from kvass.tiers.base import Lease

_UNNAMED = ".new-"


class Owner:
    """This process's folder in a directory tier: its temporary files and its leases (hard links)."""

    def __init__(self, parent: Path):
        """Make the folder under a temporary name and lock it first: nobody ever sees it unlocked."""
        self.id = uuid.uuid4().bytes
        self.folder = parent / self.id.hex()
        fresh = parent / (_UNNAMED + self.id.hex())
        fresh.mkdir(mode=0o700)
        self._lock = os.open(fresh / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for name in ("tmp", "leases"):
            (fresh / name).mkdir(mode=0o700)
        fresh.rename(self.folder)
        self._guard = threading.Lock()
        self._leases: dict[int, tuple[float, list[Path]]] = {}
        self._count = 0

    def temporary(self, one: bytes) -> Path:
        """Where an object is written before it is renamed into place; unlike for two threads."""
        with self._guard:
            self._count += 1
            return self.folder / "tmp" / f"{address_text(one)}.{self._count}"

    def lease(self, objects: Sequence[tuple[bytes, Path]], seconds: float) -> Lease:
        """Hard-link what is there. Eviction passes over files with a second link."""
        with self._guard:
            self._count += 1
            number = self._count
        held, links = [], []
        for one, path in objects:
            link = self.folder / "leases" / f"{address_text(one)}.{number}"
            with contextlib.suppress(FileNotFoundError):
                os.link(path, link, follow_symlinks=False)
                held.append(one)
                links.append(link)
        with self._guard:
            self._leases[number] = (time.monotonic() + seconds, links)
        return Lease(held, lambda: self._release(number))

    def leased(self, one: bytes) -> Path | None:
        """The link of a lease on this object, if this owner holds one."""
        name = address_text(one)
        with self._guard:
            for _, links in self._leases.values():
                for link in links:
                    if link.name.startswith(name):
                        return link
        return None

    def _release(self, number: int) -> None:
        with self._guard:
            _, links = self._leases.pop(number, (0.0, []))
        for link in links:
            link.unlink(missing_ok=True)

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = time.monotonic()
        with self._guard:
            over = [number for number, (end, _) in self._leases.items() if end <= now]
        for number in over:
            self._release(number)

    def close(self) -> None:
        """Remove the folder, leases and all."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the lock without touching the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def dead_owner(folder: Path) -> Iterator[bool]:
    """Whether a folder's owner is gone; if so, it is locked against others while the block runs."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield not folder.name.startswith(_UNNAMED)
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield not folder.name.startswith(_UNNAMED)
    finally:
        os.close(fd)

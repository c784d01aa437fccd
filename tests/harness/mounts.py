"""File systems of a test's own."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK = 4096


@contextmanager
def tmpfs(size: int) -> Iterator[Path]:
    """An empty tmpfs of `size` bytes. Needs the right to mount: fails without, rather than test nothing."""
    point = Path(tempfile.mkdtemp(prefix="kvass-tmpfs-"))
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700,huge=never", "kvass-test", str(point)],
            check=True,
        )
        try:
            yield point
        finally:
            subprocess.run(["umount", "--lazy", str(point)], check=True)
    finally:
        point.rmdir()


def used(point: Path) -> int:
    """Bytes of all blocks that a file system has given out, of unlinked but open files too."""
    status = os.statvfs(point)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def free(point: Path) -> int:
    """Bytes that are left."""
    status = os.statvfs(point)
    return status.f_bavail * status.f_frsize


def fill(point: Path, leave: int = 0, name: str = "ballast") -> Path:
    """Take all room but `leave` bytes with one file, to be unlinked."""
    ballast = point / name
    with ballast.open("wb") as file:
        room = free(point) - leave
        if room > 0:
            os.posix_fallocate(file.fileno(), 0, room)
    return ballast

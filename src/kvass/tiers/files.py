"""Object files: how they are opened, read, written and removed, whatever somebody put in their place."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from kvass.container import Buffer
from kvass.errors import CorruptObjectError, TierError

_BLOCK = 4096
_MAX_BUFFERS = 1024
"""What one system call takes."""

_NO_OBJECT = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENODEV)
"""What opening answers for a link, a socket or a file that is not ours: this is no object of ours."""


class FileReader(contextlib.AbstractContextManager["FileReader"]):
    """An open object file. Reading goes on undisturbed when the file is unlinked meanwhile."""

    def __init__(self, fd: int):
        """Takes the descriptor over. Raises CorruptObjectError for anything but a regular file."""
        self._fd = fd
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptObjectError("object is not a regular file")
        except BaseException:
            os.close(fd)
            raise
        self.size = status.st_size

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers; a short read is continued, an end of file is corruption."""
        pending = list(buffers)
        while pending:
            try:
                got = os.preadv(self._fd, pending[:_MAX_BUFFERS], offset)
            except OSError as error:
                raise TierError(f"cannot read an object: {error}") from error
            if not got:
                raise CorruptObjectError(f"object ends at byte {offset}, before its header says")
            offset += got
            pending = _advance(pending, got)


def open_object(path: Path) -> FileReader:
    """Open an object file without ever waiting; to be used as a context manager. Raises FileNotFoundError,
    CorruptObjectError for what is no regular file of ours, TierError for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, "a file stands in place of its folder", str(path)) from error
    except OSError as error:
        if error.errno in _NO_OBJECT:
            raise CorruptObjectError(f"object is no file that may be read: {error}") from error
        raise TierError(f"cannot open an object: {error}") from error
    return FileReader(fd)


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all buffers at `offset`. Raises OSError."""
    pending = list(buffers)
    while pending:  # a full tmpfs answers with a short count before it answers with an error
        done = os.pwritev(fd, pending[:_MAX_BUFFERS], offset)
        if not done:
            raise OSError(errno.ENOSPC, "nothing was written")
        offset += done
        pending = _advance(pending, done)


def _advance(buffers: list[Buffer], done: int) -> list[Buffer]:
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[at + 1 :]]
        done -= len(buffer)
    return []


def discard(path: Path) -> None:
    """Remove whatever stands there, if anything. Raises OSError where that is impossible."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)
    except NotADirectoryError:  # a file stands in place of its folder: it is not there
        return


def charge(size: int) -> int:
    """Bytes that a file of `size` bytes takes: whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


def others_may_write(folder: Path) -> bool:
    """Whether a directory is somebody else's, or open to others' writing. Raises OSError."""
    status = folder.stat()
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)


def on_tmpfs(path: Path) -> bool:
    """Whether a directory (or its nearest existing parent) lies in memory; False where nobody can tell."""
    while not _exists(path):
        path = path.parent
    real = os.path.realpath(path)
    best, found = "", ""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    for line in mounts.splitlines():
        fields = line.split(" ")
        point = os.fsdecode(os.fsencode(fields[4]).decode("unicode_escape").encode("latin-1"))
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, fields[fields.index("-") + 1]
    return found in ("tmpfs", "ramfs")


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return path == path.parent
    return True

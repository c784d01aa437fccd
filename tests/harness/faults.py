"""Counts the I/O calls that a tier makes below a directory, and does something instead of the n-th."""

import errno
import functools
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OF_OS = (
    "open", "pwritev", "preadv", "fsync", "link", "rename", "unlink", "mkdir", "rmdir", "stat", "lstat",
    "fstat", "scandir", "listdir", "posix_fallocate",
)  # fmt: skip
"""What `pathlib` and `shutil` call too. Not `close`: it gives the descriptor back even where it fails."""

_readlink = os.readlink


class Faults:
    """`act(n, call)` is asked before the n-th call below `base` (from 1 on), and may raise."""

    def __init__(self, base: Path, act: Callable[[int, str], None]):
        self._base = str(base)
        self._act = act
        self._guard = threading.Lock()
        self.calls: list[str] = []

    def _inside(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        if not arguments:
            return False
        where = arguments[0]
        if not isinstance(where, int):
            where = os.fsdecode(where)
            if not os.path.isabs(where):
                where = keywords.get("dir_fd")
        if isinstance(where, int):
            try:
                where = _readlink(f"/proc/self/fd/{where}")
            except OSError:
                return False
        return where is not None and (where == self._base or where.startswith(self._base + "/"))

    def note(self, call: str) -> None:
        """Count a call that is not one of the operating system's."""
        with self._guard:
            self.calls.append(call)
            number = len(self.calls)
        self._act(number, call)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(*arguments: Any, **keywords: Any) -> Any:
            if self._inside(arguments, keywords):
                self.note(name)
            return call(*arguments, **keywords)

        return called

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For as long as the block runs, in all threads."""
        saved = {name: getattr(os, name) for name in OF_OS}
        opening = io.open
        # `shutil` asks whether these can take a directory's descriptor by looking the functions up.
        supported = {name: set(getattr(os, name)) for name in ("supports_dir_fd", "supports_fd")}
        try:
            for name, call in saved.items():
                wrapped = self._wrapped(name, call)
                setattr(os, name, wrapped)
                for collection in supported:
                    if call in getattr(os, collection):
                        getattr(os, collection).add(wrapped)
            io.open = self._wrapped("io.open", opening)  # type: ignore[assignment]
            yield
        finally:
            for name, call in saved.items():
                setattr(os, name, call)
            for name, functions in supported.items():
                getattr(os, name).intersection_update(functions)
            io.open = opening


def failing(n: int, code: int, *, for_ever: bool = False) -> Callable[[int, str], None]:
    """The n-th call fails, or all from the n-th on."""

    def act(number: int, call: str) -> None:
        if number == n or (for_ever and number > n):
            raise OSError(code, f"{errno.errorcode[code]} at call {number}, {call}")

    return act


def dying(n: int) -> Callable[[int, str], None]:
    """The process is killed just before the n-th call."""

    def act(number: int, call: str) -> None:
        if number == n:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def nothing(number: int, call: str) -> None:
    """Only counts."""

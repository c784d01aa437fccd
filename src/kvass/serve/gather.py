"""Gathers files as texts, in an order that depends on their paths alone; and tells when they change."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvass.errors import InputError

MAX_BYTES: Final = 1_000_000
"""Larger files are skipped."""

CONTEXT_NAME: Final = re.compile(r"context-(\d{3,})\.txt")
"""What is written to `--out`; never read as a source."""

_LOOKED_AT = 8192
"""Bytes in which a NUL makes a file binary."""

_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
"""Which a chat's encoder needs for itself."""

Signature = frozenset[tuple[str, int, int, int]]
"""Path, size, modification time (ns) and inode of each file."""


class File(NamedTuple):
    """A file's path below the common root, and its text, whose lines end in a line feed alone."""

    name: str
    text: str


class Skipped(NamedTuple):
    """What was not read, and why."""

    name: str
    reason: str


class Sources:
    """Files, and directories with all below them but hidden names, `__pycache__` and linked directories."""

    def __init__(self, paths: Sequence[Path], out: Path | None = None):
        """`out`: where contexts are written, which are left out."""
        self._paths = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100 - links stay as given
        self._out = os.path.realpath(out) if out is not None else None

    def gather(self) -> tuple[list[File], list[Skipped]]:
        """The texts, sorted by the bytes of their names. Raises InputError where there is none."""
        found, skipped = self._walk()
        files = []
        for name in sorted(found, key=os.fsencode):
            read = _read(name, found[name])
            if isinstance(read, File):
                files.append(read)
            else:
                skipped.append(read)
        if not files:
            why = f" ({skipped[0].name} is skipped: {skipped[0].reason})" if skipped else ""
            raise InputError(f"there is no text to read in {', '.join(map(str, self._paths))}{why}")
        return files, sorted(skipped)

    def signature(self, also: Iterable[Path] = ()) -> Signature:
        """Of the files in their present state, and of others; equal where nothing was written since."""
        try:
            found, _ = self._walk()
        except InputError:  # what was named is gone, for now
            found = {}
        seen = set()
        for path in (*found.values(), *also):
            try:
                state = path.stat()
            except OSError:
                continue
            seen.add((str(path), state.st_size, state.st_mtime_ns, state.st_ino))
        return frozenset(seen)

    def _walk(self) -> tuple[dict[str, Path], list[Skipped]]:
        """Candidates by name, and what is passed by. Raises InputError where what was named is not there."""
        for path in self._paths:
            try:
                path.stat()
            except OSError as error:
                raise InputError(f"cannot read {path}: {error.strerror}") from error
        root = os.path.commonpath([path if path.is_dir() else path.parent for path in self._paths])
        found: dict[str, Path] = {}
        skipped: dict[str, Skipped] = {}

        def skip(path: str, reason: str) -> None:
            skipped[path] = Skipped(_printable(os.path.relpath(path, root)), reason)

        def unreadable(error: OSError) -> None:
            skip(str(error.filename), error.strerror or "unreadable")

        for path in self._paths:
            if not path.is_dir():
                found[os.path.relpath(path, root)] = path
                continue
            for folder, folders, files in os.walk(path, onerror=unreadable):
                shown = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
                # Path.is_symlink raises in a folder that may be listed but not entered
                linked = [name for name in shown if os.path.islink(f"{folder}/{name}")]  # noqa: PTH114
                for name in linked:
                    skip(f"{folder}/{name}", "a link to a directory")
                folders[:] = set(shown) - set(linked)
                for name in files:
                    if not name.startswith("."):
                        found[os.path.relpath(f"{folder}/{name}", root)] = Path(folder, name)
        found = {name: path for name, path in found.items() if not self._is_context(path)}
        return found, list(skipped.values())

    def _is_context(self, path: Path) -> bool:
        return (
            self._out is not None
            and CONTEXT_NAME.fullmatch(path.name) is not None
            and os.path.realpath(path.parent) == self._out
        )


def with_line_feeds(text: str) -> str:
    """The text as a program reads it in text mode: it will send the same tokens, then."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read(name: str, path: Path) -> File | Skipped:
    if not name.isprintable():  # it would break the line that names the file, or is no text at all
        return Skipped(_printable(name), "a name that cannot be printed")
    try:
        if not path.is_file():  # a pipe would block
            return Skipped(name, "not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        return Skipped(name, error.strerror or "unreadable")
    if len(raw) > MAX_BYTES:
        return Skipped(name, f"larger than {MAX_BYTES:,} bytes")
    if b"\0" in raw[:_LOOKED_AT]:
        return Skipped(name, "binary")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")
    if _NONCHARACTERS.search(text):
        return Skipped(name, "Unicode noncharacters")
    return File(name, with_line_feeds(text))


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()

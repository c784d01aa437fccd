"""Directories for a benchmark: one on a tmpfs, one on a disk, both gone afterwards."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvass.errors import ConfigError
from kvass.tiers.directory import on_tmpfs


@contextlib.contextmanager
def scratch(disk: Path) -> Iterator[tuple[Path, Path]]:
    """A folder on a tmpfs and one below `disk`. Raises ConfigError where there is no such thing."""
    shared = Path("/dev/shm")  # noqa: S108 - private folders are made below it
    if not (shared.is_dir() and os.access(shared, os.W_OK) and on_tmpfs(shared)):
        raise ConfigError(f"{shared} is no writable tmpfs; the benchmarks compare a host tier that needs one")
    disk.mkdir(parents=True, exist_ok=True)
    if on_tmpfs(disk):
        raise ConfigError(f"{disk} is on a tmpfs; give --disk a directory on a disk")
    made = (
        Path(tempfile.mkdtemp(prefix="kvass-bench-", dir=shared)),
        Path(tempfile.mkdtemp(prefix="bench-", dir=disk)),
    )
    try:
        yield made
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)

"""A model's files: where the bundled models are, what digests name them, and how new files appear whole."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from kvass.errors import ModelFilesError


def build_once(target: Path, fill: Callable[[Path], object], *, ready: Callable[[Path], bool]) -> None:
    """Make `target`, a file or a directory, with `fill(draft)`, unless `ready(target)` already holds.

    Whoever is killed at whatever moment, `target` is there whole or not at all. One process builds at a
    time; the others wait and then find it ready. Raises ModelFilesError where the folder cannot be written,
    and what `fill` raises.
    """
    if ready(target):
        return
    draft = target.with_name(f".{target.name}.draft")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if ready(target):
                return
            _remove(draft)  # under the lock, a draft can only be a dead builder's
            try:
                fill(draft)
                _sync(draft)
                draft.replace(target)
            finally:
                _remove(draft)
    except OSError as error:
        raise ModelFilesError(
            f"cannot make {target}: {error}; the setting models_path says where models are kept"
        ) from error


def _sync(path: Path) -> None:
    # A rename may reach the disk before the bytes do, and a power cut between them would leave zeros.
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

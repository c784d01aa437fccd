"""Folders in memory for the crash suites."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import script


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on a tmpfs."""
    folder = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def prepared(shm: Path) -> Path:
    """A tier with one pinned sequence, closed; to be copied."""
    path = shm / "prepared"
    script.prepare(path)
    return path

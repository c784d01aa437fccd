"""Folders and processes for the concurrency suites."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.forkserver import ForkServer


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on a tmpfs."""
    folder = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Starts other processes."""
    with ForkServer() as running:
        yield running

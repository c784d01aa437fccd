"""A cache in shared memory, and an engine that is asked and waited for."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fixtures.threads import one_thread  # noqa: F401 - for every test here
from kvass.cache import KVCache
from kvass.tiers.directory import DirectoryTier

_SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory, where there is such a thing."""
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def open_cache(folder: Path) -> Iterator[Callable[..., KVCache]]:
    """Opens caches over directory tiers of these names, fastest first; all are closed in the end."""
    with ExitStack() as stack:

        def opened(*names: str, chunk_tokens: int = 32) -> KVCache:
            tiers = [DirectoryTier(folder / name, 256 << 20, name=name) for name in names or ("host",)]
            return stack.enter_context(KVCache(tiers, chunk_tokens=chunk_tokens))

        yield opened


@pytest.fixture
def cache(open_cache: Callable[..., KVCache]) -> KVCache:
    """One cache with chunks of 32 tokens."""
    return open_cache()

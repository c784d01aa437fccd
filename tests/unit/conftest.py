"""Folders in memory, and caches over tiers in them."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fixtures.world import CHUNK
from kvass.cache import KVCache
from kvass.tiers.directory import DirectoryTier

MakeCache = Callable[..., KVCache]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on a tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_cache(shm: Path) -> Iterator[MakeCache]:
    """Caches over directory tiers `host`, `disk`, ... below one folder; closed at the end."""
    made: list[KVCache] = []

    def make(
        *budgets: int, chunk_tokens: int = CHUNK, names=("host", "disk", "third"), **settings
    ) -> KVCache:
        tiers = [
            DirectoryTier(shm / name, budget, name=name)
            for name, budget in zip(names, budgets or (16 << 20,), strict=False)
        ]
        made.append(KVCache(tiers, chunk_tokens=chunk_tokens, **settings))
        return made[-1]

    yield make
    for cache in made:
        cache.close()

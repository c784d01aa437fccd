"""One run through everything that a cache over a directory tier does, the same each time."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb

from kvass.cache import KVCache
from kvass.errors import TierError
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.environment import Environment, Txn

from .consistency import assert_consistent
from .faults import Faults, dying
from .kv import CHUNK, borrow, load, namespace, store, text

_open, _fstat = os.open, os.fstat

BUDGET = 320 << 10
HEADS = 4
SPACE = namespace(HEADS)
OLD = text(0, 0, 24)
LONG = text(4, 0, 80)
"""Fingerprints lead to it."""


def prepare(path: Path) -> None:
    """A tier with one sequence, pinned: whatever happens later, it must stay, and load right."""
    cache = KVCache([DirectoryTier(path, BUDGET, name="prepared")], chunk_tokens=CHUNK)
    store(cache, OLD, SPACE)
    assert cache.pin(OLD, SPACE, 1e6) == OLD.size
    cache.close()


def run(path: Path) -> None:
    """Store, load, supersede, evict, lease, forget, quarantine, close. Only opening may raise."""
    tier = DirectoryTier(path, BUDGET, name="scripted", seed=1)
    cache = KVCache([tier], chunk_tokens=CHUNK)
    try:
        tried(cache, tier)
    finally:
        cache.close()


def tried(cache: KVCache, tier: DirectoryTier) -> None:
    """The run itself."""
    store(cache, text(1, 0, 36), SPACE)
    load(cache, text(1, 1, 36, fork=20), SPACE)
    store(cache, text(1, 0, 40), SPACE)
    cache._keep_house()
    store(cache, text(2, 0, 20), SPACE)
    store(cache, text(3, 0, 20), SPACE)
    with contextlib.suppress(TierError), tier.lease([entry.address for entry in tier.scan()][:1], 10):
        cache.forget(text(1, 0, 40), SPACE, keep=20)
    load(cache, OLD, SPACE)
    spoil(cache, tier)
    cache.verify()
    cache.forget(text(2, 0, 20), SPACE)
    store(cache, LONG, SPACE)
    borrow(cache, LONG[3:], SPACE)
    cache.forget(LONG, SPACE, keep=48)
    borrow(cache, LONG[3:], SPACE)
    list(cache.entries())
    cache.stats()
    cache._keep_house()


def assert_all_is_well(path: Path) -> None:
    """A clean reopen finds everything in order, and what was there before the run loads right."""
    with KVCache([DirectoryTier(path, BUDGET, name="later")], chunk_tokens=CHUNK) as cache:
        cache.verify()  # takes what the run spoiled out of the way, where that did not come to it
        assert load(cache, OLD, SPACE) == OLD.size
        borrow(cache, LONG[3:], SPACE)
    assert_consistent(path, BUDGET)


def spoil(cache: KVCache, tier: DirectoryTier) -> None:
    """Change a byte of a stored sequence's first object, so that it ends up in quarantine."""
    for piece in cache.lookup(text(3, 0, 20), SPACE).pieces()[:1]:
        with contextlib.suppress(FileNotFoundError):
            fd = _open(tier._path(piece.address), os.O_RDWR)
            os.pwrite(fd, b"\x55", _fstat(fd).st_size - 3)
            os.close(fd)


def run_and_die(path: str, n: int) -> None:
    """In a process of its own: the run, killed just before its n-th call."""
    faults = Faults(Path(path), dying(n))
    with faults.installed(), committing(faults):
        run(Path(path))


@contextlib.contextmanager
def committing(faults: Faults) -> Iterator[None]:
    """Commits count as calls. One that fails does so as LMDB's do on a full disk."""
    original = Environment.write

    @contextlib.contextmanager
    def write(index: Environment) -> Iterator[Txn]:
        with original(index) as txn:
            yield txn
            try:
                faults.note("commit")
            except OSError as error:
                raise lmdb.DiskError(str(error)) from error

    Environment.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        Environment.write = original  # type: ignore[method-assign]

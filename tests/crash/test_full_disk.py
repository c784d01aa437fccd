"""A file system that is full: stores are given up, what was there stays and loads, and nothing dies of it.

On a tmpfs of its own; a page of a mapped file that cannot be had is a SIGBUS, which would end the run.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.consistency import assert_consistent
from harness.kv import CHUNK, load, namespace, store, text
from harness.mounts import fill, tmpfs
from kvass import metrics
from kvass.cache import KVCache
from kvass.errors import TierError
from kvass.tiers.directory import DirectoryTier

SIZE = 4 << 20
BUDGET = 64 << 20
SPACE = namespace(heads=16)
OLD = text(0, 0, 100)


@pytest.fixture
def disk() -> Iterator[Path]:
    with tmpfs(SIZE) as point:
        yield point


def _cache(path: Path) -> KVCache:
    return KVCache([DirectoryTier(path, BUDGET, name="full")], chunk_tokens=CHUNK)


def _dropped() -> float:
    """Stores given up and errors counted, so far."""
    return sum(
        sample.value
        for counter in (metrics.dropped_stores, metrics.errors)
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["tier"] == "full"
    )


def test_objects_do_not_fit(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path = disk / "tier"
    with _cache(path) as cache:
        store(cache, OLD, SPACE)
        before = _dropped()
        lengths = []
        for family in range(1, 60):
            tokens = text(family, 0, 90)
            store(cache, tokens, SPACE)
            lengths.append(load(cache, tokens, SPACE))
            assert load(cache, OLD, SPACE) == OLD.size
        cache._keep_house()
        assert lengths[0] == 90
        assert lengths[-1] < 90, "the disk was not full"
        assert _dropped() > before
        for family, length in enumerate(lengths, 1):
            assert load(cache, text(family, 0, 90), SPACE) == length
        assert len([record for record in caplog.records if "not stored" in record.message]) == 1
        assert len(caplog.records) <= 3, [record.message for record in caplog.records]
    assert_consistent(path, BUDGET)
    with _cache(path) as cache:
        assert load(cache, OLD, SPACE) == OLD.size
        assert cache.verify()[1] == []
        cache.forget(text(1, 0, 90), SPACE)  # even on a full disk, room can be made
        assert load(cache, text(1, 0, 90), SPACE) == 0
        store(cache, text(1, 0, 60), SPACE)
        assert load(cache, text(1, 0, 60), SPACE) == 60


@pytest.mark.parametrize("leave", [0, 4096, 16384, 65536, 262144])
def test_nothing_at_all_fits(disk: Path, leave: int) -> None:
    """The room is taken by somebody else: not even the index has any."""
    path = disk / "tier"
    with _cache(path) as cache:
        store(cache, OLD, SPACE)
        ballast = fill(disk, leave)
        for family in range(1, 30):
            tokens = text(family, 0, 40)
            store(cache, tokens, SPACE)
            load(cache, tokens, SPACE)
            assert load(cache, OLD, SPACE) == OLD.size
            if family % 10 == 0:
                cache._keep_house()
        cache.pin(OLD, SPACE, 1000)
        cache.prefetch(OLD, SPACE)
        cache.explain(text(1, 0, 40), SPACE)
        list(cache.entries())
        assert cache.verify()[1] == []
        assert load(cache, OLD, SPACE) == OLD.size
        ballast.unlink()
        cache._keep_house()
        store(cache, text(1, 0, 40), SPACE)
        assert load(cache, text(1, 0, 40), SPACE) == 40
    assert_consistent(path, BUDGET)


def test_forgetting_on_a_full_disk(disk: Path) -> None:
    """Rows cannot be removed: the files are gone, the rows go later, and what is left loads right."""
    path = disk / "tier"
    with _cache(path) as cache:
        for family in range(8):
            store(cache, text(family, 0, 90), SPACE)
        ballast = fill(disk)
        for family in range(1, 8):
            cache.forget(text(family, 0, 90), SPACE)
            assert load(cache, text(family, 0, 90), SPACE) == 0
            fill(disk, name=f"more-{family}")  # what was freed is taken at once
        assert load(cache, OLD, SPACE) == 90
        cache._keep_house()
        for more in disk.glob("more-*"):
            more.unlink()
        ballast.unlink()
        cache._keep_house()
    assert_consistent(path, BUDGET)


@pytest.mark.parametrize("leave", [*range(0, 40 * 4096, 3 * 4096)])
def test_opening_on_a_full_disk(disk: Path, leave: int) -> None:
    """A new tier and an old one: TierError, or a tier that works."""
    old, new = disk / "old", disk / "new"
    with _cache(old) as cache:
        store(cache, OLD, SPACE)
    ballast = fill(disk, leave)
    for path in (old, new):
        with contextlib.suppress(TierError), _cache(path) as cache:
            if path == old:
                assert load(cache, OLD, SPACE) == OLD.size
            store(cache, text(1, 0, 40), SPACE)
            load(cache, text(1, 0, 40), SPACE)
    with contextlib.suppress(OSError):
        shutil.rmtree(old / "index")
    with contextlib.suppress(TierError), _cache(old) as cache:
        assert load(cache, OLD, SPACE) in (0, OLD.size)
    ballast.unlink()
    for path in (old, new):
        with _cache(path) as cache:
            if path == old:
                assert load(cache, OLD, SPACE) == OLD.size
            cache._keep_house()  # undoes what could not even be undone
            store(cache, text(1, 0, 40), SPACE)
            assert load(cache, text(1, 0, 40), SPACE) == 40
        assert_consistent(path, BUDGET)

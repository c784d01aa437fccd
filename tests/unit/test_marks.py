"""Fingerprints in a directory tier's index: opened again, rebuilt, of an older version, of two processes."""

import shutil
from pathlib import Path

import lmdb
import pytest

from harness.consistency import assert_consistent, opened, read_objects
from harness.forkserver import ForkServer
from harness.jobs import cache_over
from harness.kv import borrow, namespace, store, text
from kvass.cache import KVCache
from kvass.chunks import as_tokens
from kvass.keys import lossy_namespace
from kvass.tiers import marks
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.index import Index, pack_tokens, unpack_tokens

BUDGET = 16 << 20
SPACE = namespace()
TEXT = text(1, 0, 150)


@pytest.fixture
def path(shm: Path) -> Path:
    """A tier that holds a text."""
    with cache_over(shm / "tier", BUDGET) as cache:
        store(cache, TEXT, SPACE)
        store(cache, text(1, 1, 150), SPACE)
        store(cache, text(8, 0, 150), SPACE)
        store(cache, text(2, 0, 150), namespace(tenant="another"))
    return shm / "tier"


def found(path: Path, tokens=TEXT) -> int:
    """How many tokens of a text that stands elsewhere are found, and load right."""
    with cache_over(path, BUDGET) as cache:
        return borrow(cache, as_tokens([5, *tokens.tolist()]), SPACE)


def test_a_tier_that_is_opened_again_finds_the_same(path: Path) -> None:
    assert [found(path), found(path, text(1, 1, 150)), found(path, text(2, 0, 150))] == [150, 150, 0]


@pytest.mark.parametrize("times", [1, 2])
def test_an_index_that_is_rebuilt_finds_the_same(path: Path, times: int) -> None:
    """Chunks of 16 tokens: what leads to one depends on the tokens of several before it."""
    for _ in range(times):
        shutil.rmtree(path / "index")
        assert [found(path), found(path, text(1, 1, 150)), found(path, text(2, 0, 150))] == [150, 150, 0]
    assert_consistent(path, BUDGET)


def test_a_rebuild_where_a_parent_is_gone_finds_what_is_left(path: Path) -> None:
    with opened(path, BUDGET) as tier:
        middle = [entry.address for entry in tier.scan() if entry.position == 96]
        for one in middle:
            tier._path(one).unlink()
    shutil.rmtree(path / "index")
    assert found(path) == 96
    assert_consistent(path, BUDGET)


def test_an_index_of_an_older_version_is_opened_and_used(path: Path) -> None:
    """One without these tables has nothing to find until it is rebuilt; what is stored now is found."""
    environment = lmdb.open(str(path / "index"), max_dbs=20, map_size=1 << 30)
    with environment.begin(write=True) as txn:
        for name in (b"marks", b"marked"):
            txn.drop(environment.open_db(name, txn=txn), delete=True)
    environment.close()
    assert found(path) == 0
    with cache_over(path, BUDGET) as cache:
        new = text(3, 0, 100)
        store(cache, new, SPACE)
        assert borrow(cache, new[2:], SPACE) == 98
        cache.forget(TEXT, SPACE)  # what has no rows goes all the same
        store(cache, TEXT, SPACE)
    assert [found(path), found(path, text(8, 0, 150))] == [150, 0]
    shutil.rmtree(path / "index")
    assert [found(path), found(path, text(8, 0, 150))] == [150, 150]
    assert_consistent(path, BUDGET)


def test_a_row_that_cannot_be_read_is_damage_and_then_a_miss(path: Path) -> None:
    with cache_over(path, BUDGET) as cache:
        index = cache.tiers[0]._live()
        with index.write() as txn:
            rows = [bytes(row) for row, _ in txn.cursor(index.marks)]
            for row in rows:
                txn.put(row, b"short", db=index.marks)
        assert borrow(cache, TEXT[1:], SPACE) == 0
        cache._keep_house()
        assert borrow(cache, TEXT[1:], SPACE) == 149
    assert_consistent(path, BUDGET)


def test_nothing_but_exact_state_of_the_main_part_is_led_to(path: Path) -> None:
    main = [name for name in read_objects(path) if name.endswith("-0-0")]
    with opened(path, BUDGET) as tier:
        index: Index = tier._live()
        with index.read() as txn:
            marked = [bytes(one) for one, _ in txn.cursor(index.marked)]
        assert 0 < len(marked) <= len(main)
        assert all(marks.is_marked(SPACE, one) for one in marked)
    assert not marks.is_marked(lossy_namespace(SPACE, "q2"), marked[0])
    assert not marks.is_marked(SPACE, marked[0][:-1] + b"\1")


def test_tokens_are_packed_and_unpacked() -> None:
    for tokens in ([], [0], [1, (1 << 24) - 2, 255, 256, 65_535]):
        assert unpack_tokens(pack_tokens(as_tokens(tokens))).tolist() == tokens


def test_two_processes_find_what_the_other_stores_and_miss_what_it_deletes(path: Path) -> None:
    with ForkServer() as server, cache_over(path, BUDGET) as cache:
        assert server.wait(server.start("unit.test_marks:_other", str(path))) == 0
        assert borrow(cache, text(7, 0, 120)[1:], SPACE) == 119
        assert borrow(cache, TEXT, SPACE) < 64
    assert_consistent(path, BUDGET)


def _other(path: str) -> None:
    with KVCache([DirectoryTier(Path(path), BUDGET, name="other")], chunk_tokens=16) as cache:
        assert borrow(cache, TEXT[1:], SPACE) == 149
        store(cache, text(7, 0, 120), SPACE)
        cache.forget(TEXT, SPACE)

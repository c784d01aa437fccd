"""Index and objects deleted, cut, overwritten and replaced behind the tier's back: a miss, then healed."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import damage
from harness.consistency import Rows, assert_consistent, assert_same, opened
from harness.damage import ALL, BUDGET, HARMS, SPACE, TEXTS, cache_over, found, rows_at
from harness.forkserver import ForkServer
from harness.kv import load, store, text
from kvass.cache import KVCache

DEATHS = (-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT)
"""What LMDB does to a process whose mapped file is cut or overwritten; nothing can guard against it."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "tier"


@pytest.fixture
def rows(path: Path) -> Rows:
    """A filled tier, and what its index holds."""
    return damage.fill(path)


def _data(path: Path) -> Path:
    return path / "index" / "data.mdb"


# -- the index while nobody has it open ---------------------------------------------------------------


@pytest.mark.parametrize("harm", HARMS)
def test_closed_index_is_damaged(path: Path, rows: Rows, server: ForkServer, harm: str) -> None:
    with opened(path, BUDGET) as tier:
        answers = damage.answers(tier)
    HARMS[harm](_data(path))
    assert server.wait(server.start("harness.damage:use", str(path), "heals")) == 0
    with cache_over(path) as cache:
        cache.forget(text(30, 0, 40), SPACE)
    with opened(path, BUDGET) as tier:
        assert damage.answers(tier) == answers
    assert_same(rows_at(path), rows)
    assert_consistent(path, BUDGET)


def test_any_page_of_a_closed_index_is_overwritten(
    shm: Path, path: Path, rows: Rows, server: ForkServer
) -> None:
    """A page has no digest: LMDB may follow it out of the file (SIGBUS, SIGSEGV) or abort over it (SIGABRT),
    seldom. Never a wrong answer; and with the index removed, everything is there again."""
    pages = _data(path).stat().st_size // 4096
    codes = []
    for page in range(2, pages, 3):  # zeros and noise by turns
        harmed = shm / "harmed"
        shutil.copytree(path, harmed)
        damage.garbage(page, page, zeros=page % 2 == 0)(_data(harmed))
        codes.append(server.wait(server.start("harness.damage:use", str(harmed), "is right")))
        assert codes[-1] in (0, *DEATHS), f"page {page}"
        shutil.rmtree(harmed / "index")
        with cache_over(harmed) as cache:
            assert max(found(cache)) > 0
        assert_consistent(harmed, BUDGET)
        shutil.rmtree(harmed)
    print(
        f"{len(codes)} of {pages} pages: "
        + ", ".join(f"{codes.count(code)} x {code}" for code in sorted(set(codes)))
    )
    assert codes.count(0) > 0.8 * len(codes)


def test_rebuilding_is_the_same_twice(path: Path, rows: Rows) -> None:
    for _ in range(2):
        shutil.rmtree(path / "index")
        assert_same(rows_at(path), rows)


# -- the index while it is open -----------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["data file deleted", "lock file deleted", "both deleted", "folder deleted"])
def test_open_index_is_deleted(path: Path, rows: Rows, harm: str) -> None:
    with cache_over(path) as cache:
        assert found(cache) == ALL
        HARMS[harm](_data(path))
        assert all(length in (0, whole) for length, whole in zip(found(cache), ALL, strict=True))
        store(cache, text(30, 0, 40), SPACE)
        cache._keep_house()
        assert found(cache) == ALL
        store(cache, text(31, 0, 40), SPACE)
        assert load(cache, text(31, 0, 40), SPACE) == 40
        for family in (30, 31):
            cache.forget(text(family, 0, 40), SPACE)
    assert_same(rows_at(path), rows)
    assert_consistent(path, BUDGET)


def test_another_process_notices_the_deletion(path: Path, rows: Rows, server: ForkServer) -> None:
    with cache_over(path) as cache:
        shutil.rmtree(path / "index")
        assert server.wait(server.start("harness.damage:use", str(path), "heals")) == 0
        assert set(found(cache)) <= {0, *ALL}  # the old index, until the housekeeping
        cache._keep_house()
        assert found(cache) == ALL
        assert load(cache, text(30, 0, 40), SPACE) == 40
    assert_consistent(path, BUDGET)


OPEN_HARMS = [
    "emptied", "cut to one page", "cut by half", "cut by one page", "cut by ten pages", "cut by one byte",
    "both meta pages garbage", "all garbage",
]  # fmt: skip


@pytest.mark.parametrize("harm", OPEN_HARMS)
def test_open_index_is_cut_or_overwritten(path: Path, rows: Rows, server: ForkServer, harm: str) -> None:
    """Nothing guards a mapping: the process may die of it (SIGBUS, SIGSEGV), but gives no wrong answer, and
    the next one finds everything or removes the index and rebuilds it."""
    code = server.wait(server.start("harness.damage:use", str(path), "is right", harm))
    print(f"{harm}: {code}")
    assert code in (0, *DEATHS)
    assert server.wait(server.start("harness.damage:use", str(path), "heals")) == 0
    with cache_over(path) as cache:
        cache.forget(text(30, 0, 40), SPACE)
    assert_same(rows_at(path), rows)
    assert_consistent(path, BUDGET)


# -- objects ------------------------------------------------------------------------------------------


def _flip(at: Callable[[int], int]) -> Callable[[Path, Path], None]:
    def harm(file: Path, other: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at(len(data))] ^= 1
        file.write_bytes(data)

    return harm


def _instead(make: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    def harm(file: Path, other: Path) -> None:
        file.unlink()
        make(file, other)

    return harm


OBJECT_HARMS: dict[str, Callable[[Path, Path], None]] = {
    "deleted": lambda file, other: file.unlink(),
    "emptied": lambda file, other: os.truncate(file, 0),
    "cut in its header": lambda file, other: os.truncate(file, 1000),
    "cut behind its header": lambda file, other: os.truncate(file, 4096),
    "cut by a byte": lambda file, other: os.truncate(file, file.stat().st_size - 1),
    "longer by a byte": lambda file, other: os.truncate(file, file.stat().st_size + 1),
    "bit in the length": _flip(lambda size: 2),
    "bit in the header": _flip(lambda size: 700),
    "bit in the padding": _flip(lambda size: 4095),
    "bit in the first array": _flip(lambda size: 4096),
    "bit in the middle": _flip(lambda size: (4096 + size) // 2),
    "last bit": _flip(lambda size: size - 1),
    "another object": lambda file, other: file.write_bytes(other.read_bytes()) and None,
    "a link to another": _instead(lambda file, other: file.symlink_to(other)),
    "a dangling link": _instead(lambda file, other: file.symlink_to("/nonexistent")),
    "a folder": _instead(lambda file, other: file.mkdir()),
    "a full folder": _instead(lambda file, other: (file / "more").mkdir(parents=True)),
    "a pipe": _instead(lambda file, other: os.mkfifo(file)),
}


def _files(cache: KVCache, number: int) -> list[Path]:
    tier = cache.tiers[0]
    return [tier._path(piece.address) for piece in cache.lookup(TEXTS[number], SPACE).pieces(unseen=True)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rebuilt", [False, True], ids=["", "and_the_index_deleted"])
@pytest.mark.parametrize("harm", OBJECT_HARMS)
def test_object_is_harmed(path: Path, rows: Rows, harm: str, rebuilt: bool) -> None:
    victim = len(TEXTS) - 1
    with cache_over(path) as cache:
        files = _files(cache, victim)
        other = _files(cache, 0)[0]
        copy = path.parent / "copy"
        shutil.copy(other, copy)
    for number in (2,) if rebuilt else (0, len(files) // 2, len(files) - 1):
        with cache_over(path) as cache:
            assert found(cache) == ALL
            OBJECT_HARMS[harm](files[number], copy)
            if rebuilt:
                shutil.rmtree(path / "index")
                cache._keep_house()
            for _ in range(2):
                lengths = found(cache)  # whatever it is, it is right
                assert lengths[victim] <= ALL[victim]
                cache.flush()
                cache._keep_house()
            match = cache.lookup(TEXTS[victim], SPACE)
            assert load(cache, TEXTS[victim], SPACE) == match.length, "a hole is still promised"
            for tokens in TEXTS:
                store(cache, tokens, SPACE)
            assert found(cache) == ALL
    with cache_over(path) as cache:
        assert cache.verify()[1] == []
    assert_consistent(path, BUDGET)

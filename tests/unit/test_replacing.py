"""Objects are replaced where they are: whole at every moment, within the budget, whoever dies."""

import os
from pathlib import Path

import pytest

from fixtures.coders import LOSSLESS, install
from fixtures.world import CHUNK, WINDOWED, hit, namespace, prompt, store
from harness import consistency
from harness.consistency import assert_consistent
from kvass.cache import KVCache
from kvass.tiers.base import WriteItem
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.index import Index
from kvass.tiers.memory import BytesBlob, MemoryTier

MB = 1 << 20
SPACE = namespace(WINDOWED)


@pytest.fixture(autouse=True)
def coders(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    # contents are checked by loading them: here they are another model's, and coded
    monkeypatch.setattr(consistency, "_check_contents", lambda *_: None)


def opened(path: Path, kind: str = "directory") -> KVCache:
    tier = DirectoryTier(path, 16 * MB, name="host") if kind == "directory" else MemoryTier(16 * MB)
    return KVCache([tier], chunk_tokens=CHUNK)


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_recoding_keeps_parents_children_and_pins(shm: Path, kind: str) -> None:
    with opened(shm / "host", kind) as cache:
        store(cache, prompt(1, 100), SPACE)
        cache.pin(prompt(1, 100), SPACE, 1000.0)
        before = {one.address: one.entry._replace(size=0, accessed=0.0) for one in cache.entries()}
        assert cache.recode(LOSSLESS, "host").recoded == len(before)
        after = {one.address: one.entry._replace(size=0, accessed=0.0) for one in cache.entries()}
        assert after == before
        assert hit(cache, prompt(1, 100), SPACE) == 100
        assert {one.header().codec[0].name for one in cache.entries()} == {LOSSLESS}
        assert cache.recode("raw", "host").recoded == len(before)
        assert hit(cache, prompt(1, 100), SPACE) == 100
    if kind == "directory":
        assert_consistent(shm / "host", 16 * MB)


def test_an_object_that_is_open_or_leased_stays_readable(shm: Path) -> None:
    with opened(shm / "host") as cache:
        store(cache, prompt(1, CHUNK), SPACE)
        tier, one = cache.tiers[0], next(iter(cache.entries())).entry.address
        with tier.open(one) as reader:
            before = bytearray(reader.size)
            cache.recode(LOSSLESS, "host")
            reader.read_into(0, [memoryview(before)])
        assert rb"\"name\":\"raw\"" in before


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_what_is_not_there_or_has_no_room_changes_nothing(shm: Path, kind: str) -> None:
    with opened(shm / "host", kind) as cache:
        store(cache, prompt(1, 40), SPACE)
        tier, usage = cache.tiers[0], cache.stats()["host"]
        one = next(iter(cache.entries())).entry
        item = WriteItem(one.address, one.parent, one.root, one.position, one.length, None, BytesBlob(b"x"))
        assert not tier.replace(item._replace(address=bytes(35)))
        assert not tier.replace(item._replace(blob=BytesBlob(bytes(17 * MB))))
        assert cache.stats()["host"] == usage
        assert hit(cache, prompt(1, 40), SPACE) == 40


@pytest.mark.parametrize("moment", ["intend", "put", "settle"])
@pytest.mark.parametrize("count", [1, 4])
def test_who_dies_while_replacing_leaves_whole_objects(shm: Path, moment: str, count: int) -> None:
    with opened(shm / "host") as cache:
        store(cache, prompt(1, 100), SPACE)
    child = os.fork()
    if not child:
        left = [count]
        real = getattr(Index, moment)

        def dying(self, *arguments, **options):
            found = real(self, *arguments, **options)
            left[0] -= 1
            if not left[0]:
                os._exit(0)
            return found

        try:
            with opened(shm / "host") as cache:
                setattr(Index, moment, dying)
                cache.recode(LOSSLESS, "host")
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert_consistent(shm / "host", 16 * MB)
    with opened(shm / "host") as cache:
        assert hit(cache, prompt(1, 100), SPACE) == 100
        cache.recode(LOSSLESS, "host")
        assert {one.header().codec[0].name for one in cache.entries()} == {LOSSLESS}
        assert hit(cache, prompt(1, 100), SPACE) == 100
    assert_consistent(shm / "host", 16 * MB)

"""Several tiers: what goes down, what comes up, and what happens when one of them is lost or damaged."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fixtures.world import CHUNK, WINDOWED, blank, group, hit, kv, namespace, prompt, same, store
from kvass import metrics
from kvass.cache import KVCache, tiered
from kvass.cache.blobs import TierBlob
from kvass.cache.moving import copy
from kvass.codecs import registry
from kvass.codecs.raw import Raw
from kvass.config import Settings
from kvass.container import Encoded
from kvass.errors import ConfigError, InputError, TierError, TierUnavailableError
from kvass.keys import address, address_text, chain
from kvass.spec import KVSpec, numpy_dtype
from kvass.testing.clock import ManualClock
from kvass.testing.tiers import Sequencer
from kvass.testing.tiers import text as ids
from kvass.tiers.base import Tier
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.memory import BytesBlob, MemoryTier, collect

SPACE = namespace()
BOTH = namespace(WINDOWED)
MB = 1 << 20


def counted(metric, *labels: str) -> float:
    return metric.labels(*labels)._value.get()


def spoil(tier: DirectoryTier, one: bytes, at: int = -1) -> None:
    """Change a byte of an object behind the tier's back."""
    path = tier._path(one)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


# -- down and up ----------------------------------------------------------------------------------


def test_a_store_cascades_to_every_tier(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB, 16 * MB)
    store(cache, prompt(1, 100), BOTH)
    for usage in cache.stats().values():
        assert usage.objects == 14
    for tier in cache.tiers:
        alone = KVCache([tier], chunk_tokens=CHUNK)
        assert hit(alone, prompt(1, 100), BOTH) == 100
        alone._executor.close(5)
    names = {chunk.tier for chunk in cache.entries(BOTH)}
    assert names == {"host", "disk", "third"}


def test_a_longer_tail_replaces_the_shorter_one_in_every_tier(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    for size in (90, 93, 95):
        store(cache, prompt(1, size), BOTH)
    assert [usage.objects for usage in cache.stats().values()] == [12, 12]


def test_a_hit_in_a_slower_tier_is_promoted_whole(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 200)
    store(cache, tokens, BOTH)
    first = [address(chain(BOTH.root(), tokens, CHUNK)[0], 0)]
    cache.tiers[0].delete(first)
    match = cache.lookup(tokens, BOTH)
    assert match.runs == ((1, 12),)
    result = cache.load(match, blank(BOTH, 200))
    assert result.tiers.keys() == {"disk"}
    cache.flush()
    assert cache.stats()["host"].objects == 26  # parts that no window sees any more, too
    again = cache.load(cache.lookup(tokens, BOTH), blank(BOTH, 200))
    assert again.tiers.keys() == {"host"}
    cache.tiers[1].delete(first)
    for size in (1, 40, 170, 200):
        assert hit(cache, tokens[:size], BOTH) == size


def test_a_part_of_a_longer_tail_is_promoted_whole(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 3 * CHUNK + 10)
    store(cache, tokens)
    cache.tiers[0].delete([address(chain(SPACE.root(), tokens, CHUNK)[0], 0)])
    assert hit(cache, np.concatenate([tokens[:-4], prompt(8, 9)])) == tokens.size - 4
    cache.flush()
    assert cache.lookup(tokens, SPACE).child[0] == 0
    assert hit(cache, tokens) == tokens.size


def test_a_match_may_begin_in_one_tier_and_go_on_in_the_next(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    store(cache, tokens, BOTH)
    cache.tiers[0].delete([address(chain(BOTH.root(), tokens, CHUNK)[3], 0)])
    match = cache.lookup(tokens, BOTH)
    assert match.runs == ((0, 3), (1, 3))
    assert hit(cache, tokens, BOTH) == 100
    cache.flush()
    assert cache.stats()["host"].objects == 14


def test_prefetch_brings_up_what_a_load_will_need(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    store(cache, tokens, BOTH)
    cache.tiers[0].delete([address(chain(BOTH.root(), tokens, CHUNK)[0], 0)])
    assert cache.prefetch(tokens, BOTH).length == 100
    cache.flush()
    assert cache.stats()["host"].objects == 14
    assert cache.prefetch(tokens, BOTH).length == 100
    assert cache.prefetch(prompt(2, 100), BOTH).length == 0


def test_a_host_smaller_than_the_text_leaves_the_rest_to_the_disk(make_cache) -> None:
    cache = make_cache(700 << 10, 32 * MB)
    tokens = prompt(1, 4000)
    ticket = store(cache, tokens)
    assert 0 < ticket.objects < 250
    assert cache.stats()["disk"].objects == 250
    match = cache.lookup(tokens, SPACE)
    assert [number for number, _ in match.runs] == [0, 1]
    assert hit(cache, tokens) == 4000
    assert cache.stats()["host"].bytes <= 700 << 10


def test_an_object_larger_than_the_host_goes_to_the_disk(make_cache) -> None:
    cache = make_cache(200 << 10, 32 * MB, chunk_tokens=4096)
    tokens = prompt(1, 4096)
    assert store(cache, tokens).objects == 0
    assert cache.stats()["disk"].objects == 1
    assert hit(cache, tokens) == 4096


def test_copies_of_other_bits_in_two_tiers_do_not_matter(make_cache) -> None:
    """Two engines computed the same text, and their last bits differ: each object is whole in itself."""
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    pool = kv(tokens)
    pool.arrays(0, 0, 100)["k"].view(np.uint16)[:] ^= 1
    lower = KVCache([cache.tiers[1]], chunk_tokens=CHUNK)
    lower.store(tokens, SPACE, pool).wait()
    store(cache, tokens)
    assert hit(cache, tokens) == 100
    cache.tiers[0].delete([address(chain(SPACE.root(), tokens, CHUNK)[0], 0)])
    found = blank(SPACE, 100)
    assert cache.load(cache.lookup(tokens, SPACE), found).tokens == 100
    for name, array in found.arrays(0, 0, 100).items():
        assert array.tobytes() == pool.arrays(0, 0, 100)[name].tobytes()
    lower._executor.close(5)


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [-1, 4096, 100, 3], ids=["data's end", "data", "header", "length"])
def test_a_corrupt_copy_is_replaced_by_the_one_below(make_cache, at: int) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    store(cache, tokens)
    before = counted(metrics.corrupt_objects, "host"), counted(metrics.errors, "host", "load")
    spoil(cache.tiers[0], address(chain(SPACE.root(), tokens, CHUNK)[2], 0), at)
    pool = blank(SPACE, 100)
    result = cache.load(cache.lookup(tokens, SPACE), pool)
    assert result.tokens == 100
    assert set(result.tiers) == {"host", "disk"}
    assert same(pool, tokens, SPACE, 100)
    cache.flush()
    assert counted(metrics.corrupt_objects, "host") == before[0] + 1
    assert counted(metrics.errors, "host", "load") == before[1] + 1
    assert len(list((cache.tiers[0].path / "quarantine").iterdir())) == 1
    assert hit(cache, tokens) == 100
    cache.flush()
    assert cache.load(cache.lookup(tokens, SPACE), pool).tiers.keys() == {"host"}  # promoted again


def test_a_chunk_corrupt_in_all_tiers_ends_the_hit_and_is_stored_anew(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    store(cache, tokens, BOTH)
    bad = address(chain(BOTH.root(), tokens, CHUNK)[2], 0)
    for tier in cache.tiers:
        spoil(tier, bad)
    told: list[int] = []
    pool = blank(BOTH, 100)
    assert cache.load(cache.lookup(tokens, BOTH), pool, ready=told.append).tokens == 32
    assert told == [32]
    assert same(pool, tokens, BOTH, 32)
    cache.flush()
    assert cache.lookup(tokens, BOTH).length == 32
    assert [usage.objects for usage in cache.stats().values()] == [4, 4]
    store(cache, tokens, BOTH)
    assert hit(cache, tokens, BOTH) == 100


def test_corrupt_parts_here_and_there_leave_what_is_before_the_first(make_cache) -> None:
    cache = make_cache()
    tokens = prompt(1, 320)
    store(cache, tokens, BOTH)
    keys = chain(BOTH.root(), tokens, CHUNK)
    spoil(cache.tiers[0], address(keys[19], 1))  # seen by the window of the whole
    spoil(cache.tiers[0], address(keys[17], 1))  # seen by the window of what is left then
    spoil(cache.tiers[0], address(keys[12], 0))
    told: list[int] = []
    pool = blank(BOTH, 320)
    assert cache.load(cache.lookup(tokens, BOTH), pool, ready=told.append).tokens == 12 * CHUNK
    assert told == [12 * CHUNK]
    assert same(pool, tokens, BOTH, 12 * CHUNK)


def test_an_index_that_lies_about_a_text_loads_nothing_wrong(make_cache) -> None:
    """A child's row is moved below another parent, as damage might: its tokens fit there, its KV does not."""
    cache = make_cache()
    stem, other, tail = prompt(1, CHUNK), prompt(2, CHUNK), prompt(3, 10)
    store(cache, np.concatenate([stem, tail]))
    store(cache, other)
    index = cache.tiers[0]._live()
    match = cache.lookup(np.concatenate([stem, tail]), SPACE)
    with index.write() as txn:
        record = index.get(txn, match.child[1].address)
        index.remove(txn, match.child[1].address, record)
        parent = address(chain(SPACE.root(), other, CHUNK)[0], 0)
        index.insert(txn, match.child[1].address, record._replace(parent=parent), tail)
    wrong = cache.lookup(np.concatenate([other, tail]), SPACE)
    assert wrong.length == CHUNK + 10
    pool = blank(SPACE, CHUNK + 10)
    assert cache.load(wrong, pool).tokens == CHUNK
    assert same(pool, other, SPACE, CHUNK)


def test_verify_reads_everything_and_quarantines_what_fails(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    store(cache, tokens, BOTH)
    bad = address(chain(BOTH.root(), tokens, CHUNK)[5], 1)
    spoil(cache.tiers[1], bad)
    seen: list[str] = []
    count, found = cache.verify(lambda chunk: seen.append(chunk.tier))
    assert found == [address_text(bad)]
    assert 25 <= count <= 28  # what was behind it goes with it, read already or not
    assert len(seen) == 28
    assert cache.verify() == (14 + 14 - 4, [])
    cache.tiers[1]._path(address(chain(BOTH.root(), tokens, CHUNK)[0], 0)).unlink()
    assert cache.verify() == (23, [])


def test_entries_show_what_is_stored(make_cache) -> None:
    cache = make_cache()
    tokens = prompt(1, 40)
    store(cache, tokens)
    store(cache, tokens, namespace(tenant="other"))
    mine = sorted(cache.entries(SPACE), key=lambda chunk: chunk.entry.position)
    assert [chunk.entry.position for chunk in mine] == [0, 16, 32]
    assert len(list(cache.entries())) == 6
    for chunk in mine:
        start, stop = chunk.entry.position, chunk.entry.position + chunk.entry.length
        assert chunk.header().tokens == tokens[start:stop].tolist()
    assert [cache.remove(chunk.address) for chunk in reversed(mine)] == [1, 1, 1]
    with pytest.raises(KeyError):
        mine[0].arrays()
    assert list(cache.entries(SPACE)) == []
    with pytest.raises(InputError):
        cache.remove("nonsense")


def test_an_entrys_arrays_are_the_stored_ones(make_cache) -> None:
    cache = make_cache()
    tokens = prompt(1, 40)
    store(cache, tokens, BOTH)
    for chunk in cache.entries():
        header = chunk.header()
        wanted = kv(tokens, BOTH).arrays(header.group, header.position, header.position + len(header.tokens))
        for name, array in chunk.arrays().items():
            assert array.tobytes() == wanted[name].tobytes()


# -- context, explain, forget, pin ----------------------------------------------------------------


def test_context_gives_what_is_stored_as_arrays(make_cache) -> None:
    cache = make_cache()
    store(cache, prompt(1, 50), BOTH)
    count, pool = cache.context(prompt(1, 70), BOTH)
    assert count == 50
    assert same(pool, prompt(1, 50), BOTH, 50)
    assert cache.context(prompt(2, 70), BOTH)[0] == 0


def test_explain_says_why_and_where(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 100)
    store(cache, tokens)
    whole = cache.explain(tokens, SPACE)
    assert (whole.tokens, whole.hit, whole.difference) == (100, 100, None)
    longer = cache.explain(prompt(1, 130), SPACE)
    assert (longer.hit, longer.difference) == (100, None)
    assert "goes on" in longer.reason
    nothing = cache.explain(prompt(2, 100), SPACE)
    assert (nothing.hit, nothing.difference) == (0, None)
    assert "nothing is stored" in nothing.reason
    other = tokens.copy()
    other[58] += 1
    part = cache.explain(other, SPACE, context=4)
    assert part.hit == 58
    assert "token 58" in part.reason
    assert part.difference.position == 58
    assert part.difference.prompt == other[58:62].tolist()
    assert part.difference.stored == tokens[58:62].tolist()
    at_a_cut = tokens.copy()
    at_a_cut[48] += 1
    assert cache.explain(at_a_cut, SPACE).hit == 48


def test_forget_leaves_nothing_of_a_text_and_all_of_others(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    text, other = prompt(1, 100), np.concatenate([prompt(1, 40), prompt(2, 60)])
    for one in (text, other):
        store(cache, one, BOTH)
    assert cache.forget(text, BOTH, keep=40) == 2 * 2 * 5  # from chunk 2 on, in both tiers
    assert cache.lookup(text, BOTH).length == 40  # what the other text has in common with it
    assert hit(cache, other, BOTH) == 100
    assert cache.forget(text, BOTH, keep=0) > 0
    assert cache.lookup(other, BOTH).length == 0
    assert [usage.objects for usage in cache.stats().values()] == [0, 0]


@pytest.mark.parametrize("size", [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK, 50])
@pytest.mark.parametrize("asked", [0, 1, 7])
def test_forget_takes_tails_shorter_and_longer_than_the_text(make_cache, size: int, asked: int) -> None:
    cache = make_cache()
    store(cache, prompt(1, size))
    cache.forget(prompt(1, size + asked), SPACE)
    assert cache.stats()["host"].objects == 0
    store(cache, prompt(1, size + asked))
    cache.forget(prompt(1, size), SPACE)
    assert cache.lookup(prompt(1, size), SPACE).length == 0


@pytest.mark.parametrize(
    ("keep", "left"), [(-5, 0), (0, 0), (15, 0), (16, 16), (31, 16), (99, 96), (100, 96), (10**6, 96)]
)
def test_forget_keeps_whole_chunks_before_a_token(make_cache, keep: int, left: int) -> None:
    cache = make_cache()
    store(cache, prompt(1, 100))
    cache.forget(prompt(1, 100), SPACE, keep=keep)
    assert cache.lookup(prompt(1, 100), SPACE).length == left


def test_forget_of_nothing_is_nothing(make_cache) -> None:
    cache = make_cache()
    store(cache, prompt(1, 100))
    assert cache.forget([], SPACE) == 0
    assert cache.forget(prompt(2, 50), SPACE) == 0
    assert cache.forget(prompt(1, 100), namespace(tenant="x")) == 0
    assert hit(cache, prompt(1, 100)) == 100


def test_pins_hold_in_all_tiers_and_end(shm: Path) -> None:
    clock = ManualClock()
    tiers: list[Tier] = [
        DirectoryTier(shm / "host", MB, name="host", clock=clock),
        MemoryTier(MB, name="memory", clock=clock),
    ]
    with KVCache(tiers, chunk_tokens=CHUNK, clock=clock) as cache:
        store(cache, prompt(1, 100), BOTH)
        assert cache.pin(prompt(1, 100), BOTH, 100.0) == 100
        assert cache.pin(prompt(2, 100), BOTH, 100.0) == 0
        for seed in range(10, 60):
            store(cache, prompt(seed, 100), BOTH)
        for tier in tiers:
            alone = KVCache([tier], chunk_tokens=CHUNK)
            assert hit(alone, prompt(1, 100), BOTH) == 100
            alone._executor.close(5)
        assert cache.pin(prompt(1, 100), BOTH, 0) == 100
        for seed in range(60, 110):
            clock.advance(1)
            store(cache, prompt(seed, 100), BOTH)
        assert cache.lookup(prompt(1, 100), BOTH).length < 100


def test_a_clock_that_jumps_does_no_harm(shm: Path) -> None:
    clock = ManualClock()
    tier = DirectoryTier(shm / "host", 2 * MB, name="host", clock=clock)
    with KVCache([tier], chunk_tokens=CHUNK, clock=clock) as cache:
        for number, jump in enumerate((0.0, 1e9, -2e9, 5.0, -5.0, 1e9) * 20):
            clock.advance(jump)
            store(cache, prompt(number, 100), BOTH)
            assert hit(cache, prompt(number, 100), BOTH) == 100
            cache._keep_house()
        assert tier.usage().bytes <= 2 * MB
        assert cache.verify()[1] == []


# -- tiers that fail ------------------------------------------------------------------------------


class Failing(MemoryTier):
    """Every verb fails in its turn."""

    def __init__(self, error: Exception) -> None:
        super().__init__(MB, name="failing")
        self._error = error

    def _open_or_raise(self) -> None:
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [TierError("no"), TierUnavailableError("gone"), OSError(5, "no")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_tier_that_fails_is_a_miss_and_the_others_go_on(error: Exception, place: int) -> None:
    tiers: list[Tier] = [MemoryTier(MB, name="sound")]
    tiers.insert(place, Failing(error))
    before = counted(metrics.errors, "failing", "lookup")
    with KVCache(tiers, chunk_tokens=CHUNK) as cache:
        for space in (SPACE, BOTH):
            store(cache, prompt(1, 100), space)
            assert hit(cache, prompt(1, 100), space) == 100
            assert cache.pin(prompt(1, 100), space, 10) == 100
            assert cache.prefetch(prompt(1, 100), space).length == 100
            assert cache.explain(prompt(1, 100), space).hit == 100
            assert cache.forget(prompt(1, 100), space) == 7 * len(space.spec.groups)
            assert cache.remove(address_text(address(bytes(32), 0))) == 0
        assert cache.verify() == (0, [])
        assert list(cache.stats()) == ["sound"]
        cache._keep_house()
    assert counted(metrics.errors, "failing", "lookup") > before


def test_a_tier_that_fails_while_reading_is_a_miss(make_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    store(cache, prompt(1, 100))
    real = os.preadv
    host = str(cache.tiers[0].path)

    def failing(fd: int, *rest: object) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(host):
            raise OSError(5, "Input/output error")
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    pool = blank(SPACE, 100)
    assert cache.load(cache.lookup(prompt(1, 100), SPACE), pool).tiers.keys() == {"disk"}
    assert same(pool, prompt(1, 100), SPACE, 100)
    monkeypatch.setattr(os, "preadv", real)
    cache.flush()
    assert hit(cache, prompt(1, 100)) == 100
    assert cache.tiers[0].usage().objects == 7  # an error of the disk's is no corruption


# -- opening --------------------------------------------------------------------------------------


def settings(shm: Path, **changes) -> Settings:
    fields = {
        "host_path": shm / "host", "disk_path": shm / "disk", "models_path": shm / "models",
        "host_bytes": 16 * MB, "disk_bytes": 16 * MB, "chunk_tokens": CHUNK,
    }  # fmt: skip
    return Settings.load(**(fields | changes))


def test_open_makes_both_tiers(shm: Path) -> None:
    with KVCache.open(settings(shm)) as cache:
        assert [tier.name for tier in cache.tiers] == ["host", "disk"]
        assert cache.unavailable == {}
        store(cache, prompt(1, 100))
    with KVCache.open(settings(shm)) as cache:
        assert hit(cache, prompt(1, 100)) == 100


def test_a_budget_of_nothing_turns_a_tier_off(shm: Path) -> None:
    with KVCache.open(settings(shm, host_bytes=0)) as cache:
        assert [tier.name for tier in cache.tiers] == ["disk"]
    with KVCache.open(settings(shm, disk_bytes=0)) as cache:
        assert [tier.name for tier in cache.tiers] == ["host"]
    with KVCache.open(settings(shm, host_bytes=0, disk_bytes=0)) as cache:
        assert cache.tiers == []


def test_two_tiers_in_one_place_are_a_contradiction(shm: Path) -> None:
    with pytest.raises(ConfigError, match="same directory"):
        KVCache.open(settings(shm, disk_path=shm / "host"))


def test_a_host_path_that_is_not_in_memory_leaves_this_process_memory(shm: Path, tmp_path: Path) -> None:
    with KVCache.open(settings(shm, host_path=tmp_path / "x", disk_bytes=0)) as cache:
        assert isinstance(cache.tiers[0], MemoryTier)
        assert "tmpfs" in cache.unavailable["host"]
        store(cache, prompt(1, 100))
        assert hit(cache, prompt(1, 100)) == 100


@pytest.mark.parametrize("harm", ["file", "writable", "format", "garbled", "read-only", "owner"])
def test_a_tier_that_cannot_be_used_is_left_out_with_a_reason(
    shm: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    with KVCache.open(settings(shm)) as cache:
        store(cache, prompt(1, 100))
    path = shm / "disk"
    match harm:
        case "file":
            subprocess.run(["rm", "-r", path], check=True)
            path.write_text("a file")
        case "writable":
            path.chmod(0o777)
        case "format":
            (path / "kvass.json").write_text('{"format": 2}')
        case "garbled":
            (path / "kvass.json").write_text("[[[[")
        case "read-only":
            subprocess.run(["mount", "--bind", path, path], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        case "owner":
            os.chown(path, 12345, -1)
    try:
        with KVCache.open(settings(shm)) as cache:
            assert [tier.name for tier in cache.tiers] == ["host"]
            assert str(path) in cache.unavailable["disk"]
            assert any("no SSD tier" in record.message for record in caplog.records)
            assert hit(cache, prompt(1, 100)) == 100
            store(cache, prompt(2, 100))
    finally:
        if harm == "read-only":
            subprocess.run(["umount", path], check=True)


def test_an_empty_note_of_the_format_is_a_new_one(shm: Path) -> None:
    with KVCache.open(settings(shm)) as cache:
        store(cache, prompt(1, 100))
    (shm / "host" / "kvass.json").write_text("")
    with KVCache.open(settings(shm, disk_bytes=0)) as cache:
        assert hit(cache, prompt(1, 100)) == 100
    assert '"format": 1' in (shm / "host" / "kvass.json").read_text()


def test_a_host_that_somebody_else_owns_leaves_this_process_memory(shm: Path) -> None:
    (shm / "host").mkdir()
    os.chown(shm / "host", 12345, -1)
    with KVCache.open(settings(shm, disk_bytes=0)) as cache:
        assert isinstance(cache.tiers[0], MemoryTier)
        assert "somebody else" in cache.unavailable["host"]


def test_another_user_may_not_look_into_a_tier(shm: Path) -> None:
    with KVCache.open(settings(shm)) as cache:
        store(cache, prompt(1, 100))
        shm.chmod(0o755)
        script = (
            "import os, sys\n"
            "os.setgid(12345); os.setuid(12345)\n"
            "for path in sys.argv[1:]:\n"
            "    try: os.listdir(path)\n"
            "    except PermissionError: continue\n"
            "    sys.exit(path)\n"
        )
        paths = [str(tier.path) for tier in cache.tiers]
        subprocess.run([sys.executable, "-c", script, *paths], check=True)


# -- races and plugins ----------------------------------------------------------------------------


def test_an_object_that_changes_before_it_is_copied_is_not_copied() -> None:
    source, target = MemoryTier(MB, name="source"), MemoryTier(MB, name="target")
    items = Sequencer(size=9000).items([ids(1), ids(2)])
    source.write(items)
    gone, changed = (TierBlob(source, item.address) for item in items)
    source.delete([items[0].address])
    source.write([items[0], items[1]._replace(blob=BytesBlob(bytes(5000)))])
    assert target.write([items[0]._replace(blob=gone)]) == [True]
    assert target.write([items[1]._replace(blob=changed)]) == [False]
    source.delete([items[0].address])
    with pytest.raises(TierError, match="evicted"):
        next(gone.pieces())
    assert TierBlob(source, items[0].address).size == 0


def test_a_cascade_leaves_out_what_follows_a_gap() -> None:
    source, target = MemoryTier(MB, name="source"), MemoryTier(MB, name="target")
    items = Sequencer(groups=2, size=9000).items([ids(1), ids(2), ids(3)])
    source.write([item for item in items if item.address[32] == 0])
    source.write([items[1]])
    copy(source, target, items, map)
    assert target.contains([item.address for item in items]) == [True, True, True, False, True, False]


def test_a_tail_that_cannot_be_read_is_not_promoted(make_cache) -> None:
    cache = make_cache(16 * MB, 16 * MB)
    tokens = prompt(1, 3 * CHUNK + 10)
    store(cache, tokens)
    cache.tiers[0].delete([address(chain(SPACE.root(), tokens, CHUNK)[0], 0)])
    asked = np.concatenate([tokens[:-4], prompt(8, 9)])
    match = cache.lookup(asked, SPACE)
    spoil(cache.tiers[1], match.child[1].address, 200)
    cache._copy_up(match, match.length)
    assert cache.stats()["host"].objects == 3


def test_forget_does_not_go_on_for_ever() -> None:
    class Stubborn(MemoryTier):
        def delete(self, addresses) -> int:
            return 0

    with KVCache([Stubborn(MB)], chunk_tokens=CHUNK) as cache:
        store(cache, prompt(1, 10))
        assert cache.forget(prompt(1, 10), SPACE) == 0


def test_a_use_that_cannot_be_noted_is_no_failure() -> None:
    class Forgetful(MemoryTier):
        def touch(self, addresses) -> None:
            raise TierError("no")

    with KVCache([Forgetful(MB)], chunk_tokens=CHUNK) as cache:
        store(cache, prompt(1, 40))
        assert hit(cache, prompt(1, 40)) == 40


def test_a_quarantine_that_fails_is_no_failure(make_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    store(cache, prompt(1, 40))
    spoil(cache.tiers[0], cache.lookup(prompt(1, 40), SPACE).pieces()[1].address)

    def failing(one: bytes) -> None:
        raise TierError("no")

    monkeypatch.setattr(cache.tiers[0], "quarantine", failing)
    before = counted(metrics.errors, "host", "quarantine")
    assert hit(cache, prompt(1, 40)) == CHUNK
    cache.flush()
    assert counted(metrics.errors, "host", "quarantine") == before + 1


def test_a_load_while_the_cache_closes_loads_nothing(make_cache) -> None:
    cache = make_cache()
    store(cache, prompt(1, 40))
    match = cache.lookup(prompt(1, 40), SPACE)
    cache._executor._io.close(5)
    assert cache.load(match, blank(SPACE, 40)).tokens == 0
    assert cache.load(match, blank(SPACE, 40), ready=lambda count: None).tokens == 0


def test_what_an_interpreter_leaves_open_is_closed(make_cache) -> None:
    cache = make_cache()
    store(cache, prompt(1, 40))
    tiered._close_all()
    assert cache.stats() == {}


@pytest.mark.parametrize("harm", ["another", "dtype"])
def test_verify_finds_what_only_its_address_gives_away(make_cache, harm: str) -> None:
    cache = make_cache()
    store(cache, prompt(1, 40))
    one, other, _ = sorted(cache.entries(), key=lambda chunk: chunk.entry.position)
    path = cache.tiers[0]._path(one.entry.address)
    if harm == "another":
        path.write_bytes(cache.tiers[0]._path(other.entry.address).read_bytes())
    else:
        header = one.header()
        strange = msgspec.structs.replace(
            header, namespace=namespace(KVSpec(groups=(group(dtype="int3"),))), digests={}
        )
        path.write_bytes(collect(Encoded(strange, one.arrays())))
    assert cache.verify()[1] == [one.address]
    assert cache.lookup(prompt(1, 40), SPACE).length == 0


def test_codecs_of_other_packages_are_found(make_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flipped(Raw):
        name = "flipped"
        in_place = False

        def encode(self, arrays, chunk):
            return {name: (array.view(np.uint16) ^ 0xFFFF).view(np.float16) for name, array in arrays.items()}

        def decode(self, stored, chunk):
            dtype = numpy_dtype(chunk.group.dtype)
            return {name: (array.view(np.uint16) ^ 0xFFFF).view(dtype) for name, array in stored.items()}

    class Short(Flipped):
        name = "short"

        def decode(self, stored, chunk):
            return {name: array[:, 1:] for name, array in super().decode(stored, chunk).items()}

    points = [
        EntryPoint("flipped", "x:Flipped", "kvass.codecs"),
        EntryPoint("short", "x:Short", "kvass.codecs"),
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda self: {"flipped": Flipped, "short": Short}[self.name])
    monkeypatch.setattr(registry, "entry_points", lambda **_: points)
    for name, seed, wanted in (("flipped", 1, 40), ("short", 3, 0)):
        writer = make_cache(codecs={"host": name})
        tokens = prompt(seed, 40)
        store(writer, tokens)
        assert {one.header().codec[0].name for one in writer.entries()} >= {name}
        writer.close()
        reader = make_cache()  # stores raw arrays itself
        assert hit(reader, tokens) == wanted
        assert hit(reader, tokens[:20]) == min(20, wanted)
        reader.close()

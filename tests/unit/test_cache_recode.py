"""`KVCache.recode`: what a tier holds comes to another codec, whole at every moment; a next run goes on."""

import contextlib

import numpy as np
import pytest

from fixtures.coders import LOSSLESS, LOSSY, calibrate, finite, install, measured, rounded
from fixtures.world import CHUNK, WINDOWED, blank, kv, namespace, prompt, same
from kvass.cache import KVCache
from kvass.errors import ConfigError, CorruptObjectError
from kvass.keys import Namespace, lossy_namespace
from kvass.quality import Gate
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.memory import MemoryTier, collect

MB = 1 << 20
SPACES = [namespace(), namespace(WINDOWED)]
IDS = ["full", "full and window"]


class Replacing(MemoryTier):
    """Memory whose objects may be replaced where they are."""

    def replace(self, item) -> bool:
        data = collect(item.blob)
        with self._lock:
            held = self._objects.get(item.address)
            if held is None:
                return False
            self._used += len(data) - len(held.data)
            held.data = data
        return True


@pytest.fixture(autouse=True)
def coders(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture
def gate(tmp_path) -> Gate:
    for space in SPACES:
        calibrate(tmp_path, space)
    return Gate(tmp_path)


def store(cache: KVCache, tokens, space: Namespace) -> None:
    cache.store(tokens, space, finite(tokens, space)).wait(30)
    cache.flush(30)


def loaded(cache: KVCache, tokens, space: Namespace) -> tuple[int, int]:
    """How many tokens of a text load, and how many of them exact; every value is checked."""
    match = cache.lookup(tokens, space, approximate=[lossy_namespace(space, LOSSY)])
    pool, wanted = blank(space, match.length), finite(tokens, space)
    result = cache.load(match, pool)
    for number, group in enumerate(space.spec.groups):
        first = group.first_needed(result.tokens)
        cut = max(first, result.exact_tokens)
        for name, array in pool.arrays(number, first, result.tokens).items():
            want = wanted.arrays(number, first, result.tokens)[name].copy()
            want[:, cut - first :] = rounded(want[:, cut - first :])
            assert array.tobytes() == want.tobytes()
    return result.tokens, result.exact_tokens


TEXTS = [
    prompt(1, 4 * CHUNK + 5),
    np.concatenate([prompt(1, 2 * CHUNK), prompt(7, 2 * CHUNK)]),
    prompt(2, CHUNK - 3),
]


@pytest.mark.parametrize("space", SPACES, ids=IDS)
def test_a_lossless_codec_replaces_objects_where_they_are(space, gate: Gate) -> None:
    with KVCache([Replacing(16 * MB)], chunk_tokens=CHUNK, gate=gate) as cache:
        for text in TEXTS:
            cache.store(text, space, kv(text, space)).wait(30)
        cache.pin(TEXTS[2], space, 1000.0)
        before = {one.address: one.entry._replace(size=0) for one in cache.entries()}
        seen = []
        counts = cache.recode(LOSSLESS, "host", progress=seen.append)
        assert (counts.objects, counts.recoded) == (len(before), len(before)) == (len(seen), len(seen))
        assert counts.bytes_before and counts.bytes_after
        assert {one.header().codec[0].name for one in cache.entries()} == {LOSSLESS}
        after = {one.address: one.entry._replace(size=0) for one in cache.entries()}
        assert after == before
        for text in TEXTS:
            match = cache.lookup(text, space)
            pool = blank(space, match.length)
            assert cache.load(match, pool).tokens == text.size
            assert same(pool, text, space, text.size)
        again = cache.recode(LOSSLESS, "host")
        assert (again.already, again.recoded) == (len(before), 0)
        assert cache.recode("raw", "host").recoded == len(before)
        assert cache.verify() == (len(before), [])


@pytest.mark.parametrize("space", SPACES, ids=IDS)
def test_a_lossy_codec_moves_objects_into_its_class(make_cache, space, gate: Gate) -> None:
    cache = make_cache(gate=gate)
    for text in TEXTS:
        store(cache, text, space)
    count = cache.stats()["host"].objects
    counts = cache.recode(LOSSY, "host")
    assert (counts.objects, counts.recoded, counts.failed, counts.left) == (count, count, 0, 0)
    assert cache.stats()["host"].objects == count
    for text in TEXTS:
        assert cache.lookup(text, space).length == 0
        assert loaded(cache, text, space) == (text.size, 0)
    again = cache.recode(LOSSY, "host")
    assert (again.recoded, again.already) == (0, count)
    assert cache.verify() == (count, [])


def test_only_what_matches_goes_and_what_it_stands_on_stays(make_cache, gate: Gate) -> None:
    space = SPACES[0]
    cache = make_cache(gate=gate)
    for text in TEXTS:
        store(cache, text, space)
    count = cache.stats()["host"].objects
    counts = cache.recode(LOSSY, "host", match=lambda one: one.entry.position == 3 * CHUNK)
    assert (counts.recoded, counts.left) == (2, count - 2)
    # behind one of them a tail is stored that stays, and so it stays as well
    assert loaded(cache, TEXTS[0], space) == (TEXTS[0].size, TEXTS[0].size)
    assert loaded(cache, TEXTS[1], space) == (4 * CHUNK, 3 * CHUNK)
    assert cache.lookup(TEXTS[1], space).length == 3 * CHUNK


@pytest.mark.parametrize("to", [LOSSLESS, LOSSY])
@pytest.mark.parametrize("space", SPACES, ids=IDS)
def test_killed_at_any_point_all_is_whole_and_the_next_run_goes_on(shm, space, gate: Gate, to: str) -> None:
    class Killed(BaseException):
        pass

    class Mortal(Replacing if to == LOSSLESS else MemoryTier):
        left = -1

        def step(self) -> None:
            self.left -= 1
            if self.left == 0:
                raise Killed

        def write(self, items, run=map):
            done = []
            for item in items:
                self.step()
                done += super().write([item], run)
            return done

        def delete_leaves(self, addresses):
            self.step()
            return super().delete_leaves(addresses)

        def replace(self, item) -> bool:
            self.step()
            return super().replace(item)

    if to == LOSSY:
        del Mortal.replace
    for moment in (1, 2, 3, 5, 8, 11, 14, 17):
        tier = Mortal(16 * MB)
        with KVCache([tier], chunk_tokens=CHUNK, gate=gate) as cache:
            for text in TEXTS:
                store(cache, text, space)
            count = cache.stats()["host"].objects
            tier.left = moment
            with contextlib.suppress(Killed):
                cache.recode(to, "host")
            tier.left = -1
            for text in TEXTS:
                assert loaded(cache, text, space)[0] == text.size
            cache.recode(to, "host")
            assert cache.stats()["host"].objects == count
            for text in TEXTS:
                assert loaded(cache, text, space) == (text.size, 0 if to == LOSSY else text.size)


def test_what_fails_its_digests_is_quarantined_and_the_rest_goes(make_cache, gate: Gate) -> None:
    space = SPACES[0]
    cache = make_cache(gate=gate)
    for text in TEXTS:
        store(cache, text, space)
    victim = next(one for one in cache.entries() if one.entry.length == CHUNK - 3)
    path = next((cache.tiers[0].path / "objects").glob(f"*/{victim.address}*"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptObjectError):
        victim.arrays()
    counts = cache.recode(LOSSY, "host")
    assert counts.failed == 1
    assert loaded(cache, TEXTS[2], space) == (0, 0)
    assert loaded(cache, TEXTS[0], space) == (TEXTS[0].size, 0)


def test_what_is_not_certified_stays_as_it_is(make_cache, tmp_path) -> None:
    space = SPACES[0]
    calibrate(tmp_path, space, [measured(kl_mean=0.5)])
    cache = make_cache(gate=Gate(tmp_path))
    store(cache, TEXTS[0], space)
    counts = cache.recode(LOSSY, "host")
    assert (counts.recoded, counts.left) == (0, 5)
    assert loaded(cache, TEXTS[0], space) == (TEXTS[0].size, TEXTS[0].size)


def test_unusable_arguments_are_errors(make_cache, gate: Gate) -> None:
    cache = make_cache(gate=gate)
    with pytest.raises(ConfigError, match="host"):
        cache.recode("raw", "nowhere")
    with pytest.raises(ConfigError, match="raw"):
        cache.recode("nonsense", "host")
    assert isinstance(cache.tiers[0], DirectoryTier)
    assert cache.recode(LOSSY, "host").objects == 0

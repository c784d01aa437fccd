"""Recoding takes nothing out of a tier that nothing stands in for."""

import numpy as np
import pytest

from fixtures import coders as doubles
from fixtures.coders import ENDING, LOSSY, Halved, calibrate, finite, install, measured
from fixtures.world import CHUNK, blank, namespace, prompt
from kvass.cache import KVCache
from kvass.codecs import registry
from kvass.codecs.tables import Tables, rope_arrays, write_tables
from kvass.keys import lossy_namespace
from kvass.provenance import GUARD_TOKENS, Lossy
from kvass.quality import Gate, certify, keep_calibrated
from kvass.tiers.directory import DirectoryTier

MB = 1 << 20
SPACE = namespace()


@pytest.fixture(autouse=True)
def coders(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def opened(path, models) -> KVCache:
    return KVCache([DirectoryTier(path, 16 * MB, name="disk")], chunk_tokens=CHUNK, gate=Gate(models))


def store(cache: KVCache, tokens) -> None:
    cache.store(tokens, SPACE, finite(tokens, SPACE)).wait(30)
    cache.flush(30)


def tokens_of(cache: KVCache, tokens, codec: str = LOSSY) -> int:
    match = cache.lookup(tokens, SPACE, approximate=[lossy_namespace(SPACE, codec)])
    return cache.load(match, blank(SPACE, match.length)).tokens


def lossy(cache: KVCache) -> list:
    return [one for one in cache.entries() if isinstance(one.header().provenance, Lossy)]


@pytest.mark.parametrize("seed", range(4))
def test_what_was_made_with_other_tables_is_made_anew(shm, tmp_path, seed: int) -> None:
    text = prompt(seed, 4 * CHUNK)
    calibrate(tmp_path, SPACE, mask=1)
    with opened(shm, tmp_path) as cache:
        store(cache, text)
        assert cache.recode(LOSSY, "disk").recoded == 4
    calibrate(tmp_path, SPACE, mask=2)
    with opened(shm, tmp_path) as cache:
        store(cache, text)
        cache.recode(LOSSY, "disk")
        assert tokens_of(cache, text) == text.size


def test_what_is_damaged_stands_in_for_nothing(shm, tmp_path) -> None:
    text = prompt(1, 4 * CHUNK)
    calibrate(tmp_path, SPACE)
    with opened(shm, tmp_path) as cache:
        store(cache, text)
        cache.recode(LOSSY, "disk")
        for one in lossy(cache):
            path = cache.tiers[0]._path(one.entry.address)
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
        store(cache, text)
        assert cache.recode(LOSSY, "disk").failed == 0
        assert tokens_of(cache, text) == text.size
        assert len(lossy(cache)) == 4


@pytest.mark.parametrize("way", ["cascade", "recode"])
def test_tables_that_do_not_fit_are_no_fault_of_the_source(shm, tmp_path, way: str) -> None:
    wrong = {name: array.astype("f8") for name, array in rope_arrays(0, [1.0, 0.5, 0.25, 0.1], 4096).items()}
    raw = write_tables(wrong)
    keep_calibrated(tmp_path, SPACE, raw, certify(SPACE, Tables.parse(raw).digest, [measured("int8")]))
    text = prompt(1, 4 * CHUNK)
    tiers = [DirectoryTier(shm / name, 16 * MB, name=name) for name in ("host", "disk")]
    codecs = {"disk": "int8"} if way == "cascade" else {}
    with KVCache(tiers, chunk_tokens=CHUNK, codecs=codecs, gate=Gate(tmp_path)) as cache:
        store(cache, text)
        if way == "recode":
            assert cache.recode("int8", "host").failed == 4
        assert cache.lookup(text, SPACE).length == text.size
        assert tokens_of(cache, text, "int8") == text.size


def test_what_somebody_stores_meanwhile_stays(shm, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate(tmp_path, SPACE)
    text, longer, done = prompt(1, 2 * CHUNK), prompt(1, 5 * CHUNK), []
    with opened(shm, tmp_path) as cache, opened(shm, tmp_path) as other:
        store(cache, text)

        class Slow(Halved):
            def encode(self, arrays, chunk):
                if not done:
                    done.append(1)
                    store(other, longer)
                return super().encode(arrays, chunk)

        monkeypatch.setattr(registry, "entry_points", lambda **_: [doubles._Point(LOSSY, Slow)])
        cache.recode(LOSSY, "disk")
        assert done
        assert tokens_of(other, longer) == longer.size


def test_pinned_objects_stay(shm, tmp_path) -> None:
    calibrate(tmp_path, SPACE)
    text, free = prompt(1, 4 * CHUNK), prompt(2, 2 * CHUNK)
    with opened(shm, tmp_path) as cache:
        store(cache, text)
        store(cache, free)
        cache.pin(text, SPACE, 1e6)
        cache.recode(LOSSY, "disk")
        assert cache.lookup(text, SPACE).length == text.size
        assert cache.lookup(free, SPACE).length == 0
        assert tokens_of(cache, free) == free.size


def test_what_was_coded_for_an_end_further_on_is_coded_anew(shm, tmp_path) -> None:
    calibrate(tmp_path, SPACE, [measured(ENDING)])
    long = prompt(1, GUARD_TOKENS + 20 * CHUNK)
    short = long[: GUARD_TOKENS + 5 * CHUNK]
    with opened(shm, tmp_path) as cache:
        store(cache, long)
        cache.recode(ENDING, "disk")
        assert tokens_of(cache, short, ENDING) == short.size - GUARD_TOKENS
        store(cache, short)
        cache.recode(ENDING, "disk")
        assert tokens_of(cache, short, ENDING) == short.size
        assert tokens_of(cache, long, ENDING) == long.size
        assert cache.lookup(short, SPACE).length == 0
    assert np.all(short == long[: short.size])

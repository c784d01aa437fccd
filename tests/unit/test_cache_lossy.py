"""Lossy state: kept apart from exact state, used only where allowed and certified, exact chunks first."""

import logging
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fixtures.coders import (
    LOSSLESS,
    LOSSY,
    OTHER,
    Halved,
    Stream,
    calibrate,
    finite,
    install,
    measured,
    rounded,
    tables,
)
from fixtures.world import BIG, CHUNK, SLIDING, WINDOWED, blank, kv, namespace, prompt
from harness.stores import FaultyStore
from kvass import metrics
from kvass.cache import KVCache, Pool
from kvass.codecs.base import Chunk
from kvass.codecs.raw import Raw
from kvass.codecs.tables import Tables
from kvass.config import Settings
from kvass.container import CodecStep, Encoded, read_header
from kvass.errors import ConfigError, InputError
from kvass.keys import Namespace, address, chain, lossy_namespace
from kvass.provenance import EXACT, Lossy
from kvass.quality import Budget, Gate, calibrated_folder
from kvass.tiers.base import WriteItem
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.memory import MemoryTier
from kvass.tiers.remote import RemoteTier

MB = 1 << 20
SPACE = namespace()
HALF = lossy_namespace(SPACE, LOSSY)
SPACES = [SPACE, namespace(BIG), namespace(WINDOWED), namespace(SLIDING)]
IDS = ["full", "big", "full and window", "window"]
DOWN = {"disk": LOSSY}


@pytest.fixture(autouse=True)
def coders(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture
def models(tmp_path):
    for space in SPACES:
        calibrate(tmp_path, space)
    return tmp_path


def store(cache: KVCache, tokens, space: Namespace = SPACE, under: Namespace | None = None, source=None):
    ticket = cache.store(tokens, under or space, source or finite(tokens, space)).wait(30)
    cache.flush(30)
    return ticket


def load(cache: KVCache, tokens, space: Namespace = SPACE, **options):
    """Look up with the lossy class allowed, load, and check every value: exact ones first, then rounded."""
    match = cache.lookup(tokens, space, approximate=[lossy_namespace(space, LOSSY)], **options)
    pool = blank(space, match.length)
    told: list[int] = []
    result = cache.load(match, pool, ready=told.append)
    assert told == sorted(set(told))
    assert told[-1:] == ([result.tokens] if result.tokens else [])
    check(pool, tokens, space, result.tokens, result.exact_tokens)
    return match, result


def check(pool: Pool, tokens, space: Namespace, length: int, exact: int) -> None:
    wanted = finite(np.asarray(tokens)[:length], space)
    for number, group in enumerate(space.spec.groups):
        first = group.first_needed(length)
        have, want = pool.arrays(number, first, length), wanted.arrays(number, first, length)
        at = max(0, exact - first)
        for name in have:
            assert have[name][:, :at].tobytes() == want[name][:, :at].tobytes(), f"{name} is not exact"
            assert have[name][:, at:].tobytes() == rounded(want[name][:, at:]).tobytes(), f"{name} is wrong"


def headers(cache: KVCache, tier: str):
    return [one.header() for one in cache.entries() if one.tier == tier]


def refused(operation: str, kind: str) -> float:
    labels = {"operation": operation, "reason": kind}
    return metrics.registry.get_sample_value("kvass_refused_total", labels) or 0.0


# -- the way down and up again ------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES, ids=IDS)
@pytest.mark.parametrize("size", [CHUNK - 3, 4 * CHUNK, 6 * CHUNK + 5])
def test_a_lossy_disk_serves_a_new_host_that_allows_it(make_cache, models, space, size: int) -> None:
    tokens = prompt(1, size)
    first = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models))
    store(first, tokens, space)
    assert {(one.namespace.state, one.codec[0].name) for one in headers(first, "host")} == {("exact", "raw")}
    for header in headers(first, "disk"):
        assert header.namespace.state == "lossy-tiny-lossy"
        assert header.provenance == Lossy(codec=LOSSY, tables=Gate(models).tables(space).digest)
        assert header.codec == [CodecStep(LOSSY, {"tables": header.provenance.tables})]
        assert all(group.rope is None for group in header.namespace.spec.groups)
    second = make_cache(16 * MB, 16 * MB, names=("new", "disk"), codecs=DOWN, gate=Gate(models))
    assert second.lookup(tokens, space).length == 0
    match, result = load(second, tokens, space)
    assert (match.length, result.tokens, result.exact_tokens) == (size, size, 0)
    assert match.namespace == lossy_namespace(space, LOSSY)
    assert match.upon(result.tokens, result.exact_tokens) == match.namespace
    second.flush(30)
    raised = headers(second, "new")  # promoted: decoded once, and still what it is
    assert {one.codec[0].name for one in raised} == {"raw"}
    assert {one.provenance for one in raised} == {header.provenance}
    assert load(second, tokens, space)[1].tiers.keys() == {"new"}
    assert second.lookup(tokens, space).length == 0
    assert second.verify()[1] == []


@pytest.mark.parametrize("space", SPACES, ids=IDS)
def test_exact_chunks_are_taken_first(make_cache, models, space) -> None:
    tokens = prompt(1, 6 * CHUNK + 5)
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models))
    store(cache, tokens, space)
    for keep in (5 * CHUNK, 3 * CHUNK, CHUNK):
        cache.tiers[0].delete([address(chain(space.root(), tokens, CHUNK)[keep // CHUNK], 0)])
        match, result = load(cache, tokens, space)
        assert (match.length, result.tokens, result.exact_tokens) == (tokens.size, tokens.size, keep)
        assert cache.lookup(tokens, space).length == keep
        for limit in (keep - 3, keep, keep + 3):
            match, result = load(cache, tokens, space, limit=limit)
            assert (result.tokens, result.exact_tokens) == (limit, min(limit, keep))
            assert match.upon(result.tokens, result.exact_tokens).state == (
                "exact" if limit <= keep else "lossy-tiny-lossy"
            )
        cache.flush(30)


@pytest.mark.parametrize("space", SPACES[:3], ids=IDS[:3])
def test_where_lossy_objects_fail_what_is_exact_stays(make_cache, models, space) -> None:
    tokens = prompt(1, 6 * CHUNK)
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models))
    store(cache, tokens, space)
    cache.tiers[0].delete([address(chain(space.root(), tokens, CHUNK)[2], 0)])
    match = cache.lookup(tokens, space, approximate=[lossy_namespace(space, LOSSY)])
    assert (match.length, match.exact) == (6 * CHUNK, 2 * CHUNK)
    for lost, left in ((4, 4 * CHUNK), (2, 2 * CHUNK)):
        one = address(chain(match.namespace.root(), tokens, CHUNK)[lost], 0)
        path = next((cache.tiers[1].path / "objects").glob(f"*/{one.hex()[:64]}-0-0*"))
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        pool, told = blank(space, match.length), []
        result = cache.load(match, pool, ready=told.append)
        assert result.tokens in (left, 2 * CHUNK)  # with windows, a shorter hit may need what is gone too
        assert result.exact_tokens == 2 * CHUNK
        assert told[-1] == result.tokens
        check(pool, tokens, space, result.tokens, 2 * CHUNK)
        cache.flush(30)
    assert match.upon(result.tokens, result.exact_tokens) == space


def test_of_what_is_exact_a_lost_chunk_is_taken_from_the_lossy_ones(make_cache, models) -> None:
    tokens = prompt(1, 4 * CHUNK)
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models))
    store(cache, tokens)
    cache.tiers[0].delete([address(chain(SPACE.root(), tokens, CHUNK)[3], 0)])
    match = cache.lookup(tokens, SPACE, approximate=[HALF])
    cache.tiers[0].delete([address(chain(SPACE.root(), tokens, CHUNK)[1], 0)])
    pool = blank(SPACE, match.length)
    result = cache.load(match, pool)
    assert (result.tokens, result.exact_tokens) == (4 * CHUNK, CHUNK)
    check(pool, tokens, SPACE, 4 * CHUNK, CHUNK)


@pytest.mark.parametrize("codec", [LOSSY, LOSSLESS])
@pytest.mark.parametrize("space", SPACES, ids=IDS)
def test_a_remote_tier_may_store_by_a_codec(shm, make_cache, models, space, codec: str) -> None:
    far = FaultyStore()
    codecs, tokens = {"far": codec}, prompt(1, 5 * CHUNK)

    def machine(name: str) -> KVCache:
        tiers = [DirectoryTier(shm / name, 16 * MB, name="host"), RemoteTier("far", far)]
        return KVCache(tiers, chunk_tokens=CHUNK, codecs=codecs, gate=Gate(models), exists_seconds=5.0)

    with machine("one") as one:
        store(one, tokens, space)
        assert {header.codec[0].name for header in headers(one, "far")} == {codec}
    with machine("two") as two:
        assert two.lookup(tokens, space).length == (0 if codec == LOSSY else tokens.size)
        match, result = load(two, tokens, space)
        assert (match.length, result.tokens) == (tokens.size, tokens.size)
        assert result.exact_tokens == (0 if codec == LOSSY else tokens.size)
        assert {header.codec[0].name for header in headers(two, "host")} == {"raw"}
    with machine("three") as three:
        allowed = three.approximations(space)
        held = three.stage(tokens, space, seconds=lambda _: 30.0, approximate=allowed).result(60)
        assert held.length == tokens.size
        assert len(three.hold(held, 60).addresses) == len(held.pieces())
        assert three.check(held).length == tokens.size
        assert three.forget(tokens, space) > 0
        assert headers(three, "far") == headers(three, "host") == []


# -- who may use what ---------------------------------------------------------------------------------


def test_a_chat_continued_on_lossy_state_is_lossy(make_cache, models) -> None:
    """Provenance is contagious: what was computed upon it is never found by a request for exact state."""
    tokens = prompt(1, 7 * CHUNK)
    store(make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models)), tokens[: 4 * CHUNK])
    cache = make_cache(16 * MB, 16 * MB, names=("new", "disk"), codecs=DOWN, gate=Gate(models))
    match = cache.lookup(tokens, SPACE, approximate=[HALF])
    result = cache.load(match, blank(SPACE, match.length))
    under = match.upon(result.tokens, result.exact_tokens)
    assert (result.tokens, under) == (4 * CHUNK, HALF)
    cache.flush(30)  # while the load's chunks are still being promoted, a store has no parents for what is new
    source = finite(tokens, SPACE)
    for array in source.arrays(0, 0, 4 * CHUNK).values():
        array[:] = rounded(array)
    store(cache, tokens, under=under, source=source)
    assert cache.lookup(tokens, SPACE).length == 0
    assert {one.provenance.codec for one in headers(cache, "new")} == {LOSSY}
    assert cache.lookup(tokens, HALF).length == tokens.size
    pool = blank(SPACE, tokens.size)
    assert cache.load(cache.lookup(tokens, SPACE, approximate=[HALF]), pool).tokens == tokens.size
    late = pool.arrays(0, 4 * CHUNK, tokens.size)
    assert late["v"].tobytes() == source.arrays(0, 4 * CHUNK, tokens.size)["v"].tobytes()


def test_an_exact_request_sees_nothing_lossy_whatever_lies_at_its_address(models) -> None:
    tokens, tier = prompt(1, CHUNK), MemoryTier(16 * MB)
    with KVCache([tier], chunk_tokens=CHUNK, gate=Gate(models)) as cache:
        store(cache, tokens)
        (held,) = cache.entries()
        parsed, arrays = held._open(True)
        header = parsed.header
        digest = Gate(models).tables(SPACE).digest
        half = [CodecStep(LOSSY, {"tables": digest})]
        chunk = Chunk(SPACE.spec.groups[0], 0, 0, CHUNK)
        halves = Halved(Tables.parse(tables())).encode(arrays, chunk)
        lossy = Lossy(codec=LOSSY, tables=digest)
        for changes, stored, wanted in (
            ({"provenance": lossy}, arrays, 0),
            ({"provenance": lossy, "codec": half}, halves, 0),
            ({"codec": half}, halves, 0),
            ({"codec": [CodecStep("no-such-codec")]}, arrays, 0),
            ({"codec": [Stream().step()]}, Stream().encode(arrays, chunk), CHUNK),
        ):
            tier.delete([held.entry.address])
            changed = msgspec.structs.replace(header, digest="", digests={}, **changes)
            blob = Encoded(changed, stored)
            item = WriteItem(held.entry.address, None, SPACE.root(), 0, CHUNK, tokens, blob)
            assert tier.write([item]) == [True]
            assert cache.load(cache.lookup(tokens, SPACE), blank(SPACE, CHUNK)).tokens == wanted
            cache.flush(30)


@pytest.mark.parametrize("kind", ["exact", "other codec", "other tables", "other chain"])
def test_a_lossy_request_takes_only_its_own_class(models, kind: str) -> None:
    tokens, tier = prompt(1, CHUNK), MemoryTier(16 * MB)
    digest = Gate(models).tables(SPACE).digest
    with KVCache([tier], chunk_tokens=CHUNK, gate=Gate(models)) as cache:
        store(cache, tokens, under=HALF)
        (held,) = cache.entries()
        parsed, arrays = held._open(True)
        assert parsed.header.provenance == Lossy(codec=LOSSY, tables=digest)
        assert cache.load(cache.lookup(tokens, HALF), blank(SPACE, CHUNK)).tokens == CHUNK
        changes = {
            "exact": {"provenance": EXACT},
            "other codec": {"provenance": Lossy(codec=OTHER, tables=digest)},
            "other tables": {"provenance": Lossy(codec=LOSSY, tables="0" * 64)},
            "other chain": {"codec": [CodecStep(OTHER, {"tables": digest})]},
        }[kind]
        tier.delete([held.entry.address])
        if kind == "other chain":
            chunk = Chunk(SPACE.spec.groups[0], 0, 0, CHUNK)
            arrays = Halved(Tables.parse(tables())).encode(arrays, chunk)
        blob = Encoded(msgspec.structs.replace(parsed.header, digest="", digests={}, **changes), arrays)
        item = WriteItem(held.entry.address, None, HALF.root(), 0, CHUNK, tokens, blob)
        assert tier.write([item]) == [True]
        assert cache.load(cache.lookup(tokens, HALF), blank(SPACE, CHUNK)).tokens == 0


def test_an_engines_own_layout_is_never_lossy(make_cache, models) -> None:
    packed = namespace(layout="vec")
    tokens = prompt(1, 2 * CHUNK)

    class Packed:
        def arrays(self, group: int, start: int, stop: int):
            shape = packed.spec.groups[group].shape("kv", tokens.size)
            whole = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
            return {"kv": whole.view(SPACE_DTYPE)[:, start:stop]}

    calibrate(models, packed)
    cache = make_cache(
        16 * MB, 16 * MB, 16 * MB, codecs={"disk": LOSSY, "third": LOSSLESS}, gate=Gate(models)
    )
    store(cache, tokens, packed, source=Packed())
    assert headers(cache, "disk") == []
    assert {one.codec[0].name for one in headers(cache, "third")} == {LOSSLESS}
    for one in cache.entries():
        assert (
            one.arrays()["kv"].tobytes()
            == Packed().arrays(0, one.entry.position, one.entry.position + CHUNK)["kv"].tobytes()
        )


SPACE_DTYPE = kv(prompt(1, 1), SPACE).arrays(0, 0, 1)["k"].dtype


# -- the gate -----------------------------------------------------------------------------------------


def _nothing(path) -> None:
    pass


def _foreign(path) -> None:
    calibrate(path, namespace(weights="x" * 64)).rename(calibrate(path, SPACE).with_name("aside"))
    target = calibrated_folder(path, SPACE)
    for name in ("tables.safetensors", "certificate.json"):
        (path / "calibrated" / "aside" / name).replace(target / name)


REFUSALS = {
    "no certificate": _nothing,
    "kl": lambda path: calibrate(path, SPACE, [measured(kl_mean=0.02)]),
    "facts": lambda path: calibrate(path, SPACE, [measured(facts_lost_high=0.03)]),
    "not measured": lambda path: calibrate(path, SPACE, [measured("q2")]),
    "other model": _foreign,
    "other tables": lambda path: (calibrate(path, SPACE) / "tables.safetensors").write_bytes(tables(mask=1)),
    "unreadable": lambda path: (calibrate(path, SPACE) / "certificate.json").write_text("{}"),
}


@pytest.mark.parametrize("kind", list(REFUSALS))
def test_what_no_certificate_covers_is_not_written_and_not_read(
    make_cache, models, tmp_path_factory, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, bad = prompt(1, 4 * CHUNK), tmp_path_factory.mktemp("bad")
    REFUSALS[kind](bad)
    before = refused("store", kind), refused("lookup", kind), refused("load", kind)
    with caplog.at_level(logging.WARNING, "kvass.cache"):
        cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(bad))
        store(cache, tokens)
        store(cache, prompt(2, 4 * CHUNK))
    assert refused("store", kind) == before[0] + 2
    assert len([one for one in caplog.records if "is not used" in one.message]) == 1
    assert cache.stats()["disk"].objects == 0
    assert cache.lookup(tokens, SPACE).length == 4 * CHUNK
    assert store(cache, tokens, under=HALF).objects == 0

    store(make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models)), prompt(1, 4 * CHUNK))
    reader = make_cache(16 * MB, 16 * MB, names=("new", "disk"), codecs=DOWN, gate=Gate(bad))
    assert HALF not in reader.approximations(SPACE)
    assert reader.lookup(tokens, SPACE, approximate=[HALF]).length == 0
    assert refused("lookup", kind) == before[1] + 1
    found = reader.lookup(tokens, HALF)  # asked for by its own name: found, and not loaded
    assert reader.load(found, blank(SPACE, found.length)).tokens == 0
    assert refused("load", kind) == before[2] + 1
    verdict = reader.explain(tokens, SPACE, approximate=[HALF]).verdicts[LOSSY]
    assert (verdict.allowed, verdict.kind) == (False, kind)


def test_without_a_gate_nothing_lossy_is_used(make_cache, models) -> None:
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN)
    store(cache, prompt(1, 40))
    assert cache.stats()["disk"].objects == 0
    assert cache.lookup(prompt(1, 40), SPACE, approximate=[HALF]).length == 40
    assert cache.explain(prompt(1, 40), SPACE).verdicts[LOSSY].kind == "no gate"
    assert make_cache().explain(prompt(1, 40), SPACE).verdicts == {}


def test_a_request_may_set_another_budget(make_cache, tmp_path) -> None:
    calibrate(tmp_path, SPACE, [measured(kl_mean=0.005)])
    tokens = prompt(1, 4 * CHUNK)
    store(make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(tmp_path)), tokens)
    strict = make_cache(
        16 * MB, 16 * MB, names=("new", "disk"), codecs=DOWN, gate=Gate(tmp_path), budget=Budget(kl=0.001)
    )
    wide = Budget(kl=0.1)
    assert strict.lookup(tokens, SPACE, approximate=[HALF]).length == 0
    assert strict.approximations(SPACE, wide) == [HALF]
    match = strict.lookup(tokens, SPACE, approximate=[HALF], budget=wide)
    assert strict.load(match, blank(SPACE, match.length)).tokens == 4 * CHUNK
    pool = blank(SPACE, match.length)
    assert strict.load(replace(match, budget=None), pool).tokens == 0
    assert strict.store(tokens, HALF, finite(tokens, SPACE), budget=wide).wait(30).objects
    assert not strict.store(prompt(2, 40), HALF, finite(prompt(2, 40), SPACE)).wait(30).objects


def test_a_model_calibrated_anew_does_not_read_what_other_tables_wrote(make_cache, models) -> None:
    tokens = prompt(1, 4 * CHUNK)
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models))
    store(cache, tokens)
    calibrate(models, SPACE, mask=0x33)
    later = make_cache(16 * MB, 16 * MB, names=("new", "disk"), codecs=DOWN, gate=Gate(models))
    match = later.lookup(tokens, SPACE, approximate=[HALF])
    assert later.load(match, blank(SPACE, match.length)).tokens == 0
    later.flush(30)
    store(later, tokens)  # what cannot be read any more has made room
    third = make_cache(16 * MB, 16 * MB, names=("third", "disk"), codecs=DOWN, gate=Gate(models))
    assert load(third, tokens)[1].tokens == tokens.size


def test_objects_whose_tables_are_not_here_are_left_alone(make_cache, models, tmp_path_factory) -> None:
    store(make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models)), prompt(1, 4 * CHUNK))
    other = make_cache(16 * MB, 16 * MB, gate=Gate(tmp_path_factory.mktemp("none")))
    assert other.verify() == (8, [])
    assert other.stats()["disk"].objects == 4


def test_an_exact_namespace_is_no_approximation(make_cache, models) -> None:
    with pytest.raises(InputError, match="approximation"):
        make_cache(gate=Gate(models)).lookup(prompt(1, 5), SPACE, approximate=[SPACE])


# -- settings -----------------------------------------------------------------------------------------


def test_codecs_that_there_are_not_are_errors(shm) -> None:
    with pytest.raises(ConfigError, match=LOSSY):
        KVCache([MemoryTier(MB)], codecs={"host": "nonsense"})
    with pytest.raises(ConfigError, match="disk"):
        KVCache([MemoryTier(MB), MemoryTier(MB, name="disk")], codecs={"host": LOSSY})


def test_tiers_store_by_the_settings(shm, models) -> None:
    where = {"host_path": shm / "host", "disk_path": shm / "disk", "models_path": models}
    chosen = {"disk_codec": LOSSY, "host_codec": LOSSLESS, "chunk_tokens": CHUNK, "lossy_max_kl": 0.001}
    with KVCache.open(Settings.load(**where, **chosen)) as cache:
        store(cache, prompt(1, 40))
        assert {one.codec[0].name for one in headers(cache, "host")} == {LOSSLESS}
        assert headers(cache, "disk") == []  # certified for a KL of 0.002 only
        assert cache.lookup(prompt(1, 40), SPACE).length == 40
    with KVCache.open(Settings.load(**where, **(chosen | {"lossy_max_kl": 0.01}))) as cache:
        store(cache, prompt(1, 40))
        assert {one.codec[0].name for one in headers(cache, "disk")} == {LOSSY}
        assert load(cache, prompt(1, 40))[1].exact_tokens == 40
    for wrong in ({"disk_codec": "nonsense"}, {"host_codec": LOSSY}):
        with pytest.raises(ConfigError):
            KVCache.open(Settings.load(**where, **wrong))
    with pytest.raises(ConfigError, match="remote_codec"):
        Settings.load(remote_codec="Not a name")
    assert Settings.load().allow_lossy is False


def test_a_host_may_be_lossy_where_all_below_it_is(make_cache, models) -> None:
    tokens = prompt(1, 4 * CHUNK + 3)
    cache = make_cache(16 * MB, 16 * MB, codecs={"host": LOSSY, "disk": LOSSY}, gate=Gate(models))
    assert store(cache, tokens).objects == 5
    assert cache.lookup(tokens, SPACE).length == 0
    assert load(cache, tokens)[1].tokens == tokens.size
    assert {one.namespace.state for name in ("host", "disk") for one in headers(cache, name)} == {HALF.state}


def test_forgetting_takes_what_lossy_codecs_made_of_a_text_too(make_cache, models) -> None:
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models))
    store(cache, prompt(1, 3 * CHUNK + 5))
    store(cache, prompt(2, 40))
    assert cache.forget(prompt(1, 3 * CHUNK + 5), SPACE) == 8
    assert cache.lookup(prompt(1, 3 * CHUNK + 5), HALF).length == 0
    assert cache.lookup(prompt(2, 40), HALF).length == 40


def test_values_that_a_codec_refuses_are_not_stored_by_it(make_cache, models) -> None:
    tokens = prompt(1, 4 * CHUNK)
    source = finite(tokens, SPACE)
    source.arrays(0, 2 * CHUNK, 3 * CHUNK)["k"][0, 3, 0, 0] = np.nan
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=Gate(models))
    store(cache, tokens, source=source)
    assert cache.lookup(tokens, SPACE).length == 4 * CHUNK
    assert cache.lookup(tokens, HALF).length == 2 * CHUNK


def test_raw_is_what_it_was(make_cache, models) -> None:
    """With raw tiers, objects below are the very files of the host, and no codec is asked."""
    cache = make_cache(16 * MB, 16 * MB, gate=Gate(models))
    store(cache, prompt(1, 50))
    host, disk = (
        {file.name: file.read_bytes() for file in (tier.path / "objects").glob("*/*")} for tier in cache.tiers
    )
    assert host == disk
    assert isinstance(cache._coding.target("disk", SPACE).coder, Raw)
    with cache.tiers[0].open(next(iter(cache.entries())).entry.address) as reader:
        assert read_header(reader).header.provenance == EXACT

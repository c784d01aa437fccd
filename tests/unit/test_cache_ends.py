"""State coded for where its sequence ends: said in its provenance, and respected where a prompt leaves it."""

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from fixtures.coders import ENDING, LOSSLESS, LOSSY, OTHER, calibrate, finite, install, measured, rounded
from fixtures.world import CHUNK, SLIDING, WINDOWED, blank, namespace, prompt
from harness.stores import FaultyStore
from kvass.cache import KVCache
from kvass.cache.converting import _nearest_ends
from kvass.cli import app
from kvass.keys import KEY_BYTES, address, chain, lossy_namespace
from kvass.provenance import EXACT, GUARD_TOKENS, Lossy
from kvass.quality import Gate
from kvass.tiers.base import Entry
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.remote import RemoteTier

MB = 1 << 20
SPACE = namespace()
ENDED = lossy_namespace(SPACE, ENDING)
SPACES = [SPACE, namespace(WINDOWED), namespace(SLIDING)]
IDS = ["full", "full and window", "window"]
DOWN = {"disk": ENDING}
LONG = GUARD_TOKENS + 5 * CHUNK + 5
"""Tokens of a text of which something is left when a load gives up its end; the last chunk is not full."""


@pytest.fixture(autouse=True)
def coders(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture
def gate(tmp_path) -> Gate:
    for space in SPACES:
        calibrate(tmp_path, space, [measured(name) for name in (ENDING, LOSSY, OTHER)])
    return Gate(tmp_path)


def store(cache: KVCache, tokens, space=SPACE, under=None) -> None:
    cache.store(tokens, under or space, finite(tokens, space)).wait(30)
    cache.flush(30)


def said(cache: KVCache, tier: str) -> dict[int, int]:
    """By position, what is behind the objects of a tier as their provenance has it; of groups with a window,
    where each chunk is an end, nothing."""
    found: dict[int, int] = {}
    for one in cache.entries():
        header = one.header()
        done = header.provenance
        if one.tier == tier and isinstance(done, Lossy):
            if windowed(header):
                assert done.behind == 0
            else:
                assert found.setdefault(one.entry.position, done.behind) == done.behind
    return found


def windowed(header) -> bool:
    return header.namespace.spec.groups[header.group].window is not None


def coded(cache: KVCache, tier: str) -> dict[int, int]:
    """The same, as the codec was told it."""
    found: dict[int, int] = {}
    for one in cache.entries():
        if one.tier == tier:
            told = int(one._open(False)[1]["behind"].view("<u4")[0, 0])
            if windowed(one.header()):
                assert told == 0
            else:
                assert found.setdefault(one.entry.position, told) == told
    return found


def ends(size: int) -> dict[int, int]:
    """What is behind each chunk of a text of that size."""
    return {at: max(0, size - at - CHUNK) for at in range(0, size, CHUNK)}


def load(cache: KVCache, tokens, space=SPACE, codec: str = ENDING, **options) -> tuple[int, int, int, int]:
    """Tokens that match, that load, that are exact of them and that are given up; every value is checked."""
    match = cache.lookup(tokens, space, approximate=[lossy_namespace(space, codec)], **options)
    pool, told = blank(space, match.length), []
    result = cache.load(match, pool, ready=told.append)
    assert told == sorted(set(told))
    assert told[-1:] == ([result.tokens] if result.tokens else [])
    wanted = finite(np.asarray(tokens)[: result.tokens], space)
    for number, group in enumerate(space.spec.groups):
        first = group.first_needed(result.tokens)
        have, want = (one.arrays(number, first, result.tokens) for one in (pool, wanted))
        at = max(0, result.exact_tokens - first)
        for name in have:
            assert have[name][:, :at].tobytes() == want[name][:, :at].tobytes()
            assert have[name][:, at:].tobytes() == rounded(want[name][:, at:]).tobytes()
    return match.length, result.tokens, result.exact_tokens, result.given_up


# -- what is said ---------------------------------------------------------------------------------------


def test_nothing_behind_is_not_written() -> None:
    plain = {"kind": "lossy", "codec": "x", "tables": "0" * 64}
    assert msgspec.to_builtins(Lossy(codec="x", tables="0" * 64)) == plain
    assert msgspec.to_builtins(Lossy(codec="x", tables="0" * 64, behind=7)) == {**plain, "behind": 7}
    assert msgspec.json.encode(EXACT) == b'{"kind":"exact"}'


@pytest.mark.parametrize("space", SPACES, ids=IDS)
@pytest.mark.parametrize("size", [CHUNK - 3, 4 * CHUNK, 6 * CHUNK + 5])
@pytest.mark.parametrize("way", ["stored", "cascade", "from the source"])
def test_a_chunk_is_coded_for_where_its_sequence_ends(make_cache, gate, space, size: int, way: str) -> None:
    if way == "stored":
        cache, tier = make_cache(codecs={"host": ENDING}, gate=gate), "host"
    else:
        cache = make_cache(16 * MB if way == "cascade" else 1, 16 * MB, codecs=DOWN, gate=gate)
        tier = "disk"
    store(cache, prompt(1, size), space)
    assert (cache.stats()["host"].objects == 0) == (way == "from the source")
    assert said(cache, tier) == coded(cache, tier) == ({} if space is SPACES[2] else ends(size))


def test_in_a_remote_tier_a_sequence_ends_with_its_last_whole_chunk(shm, gate) -> None:
    """What is behind that is not sent: nobody who comes from afar follows the sequence any further."""
    tiers = [DirectoryTier(shm / "host", 16 * MB, name="host"), RemoteTier("far", FaultyStore())]
    with KVCache(tiers, chunk_tokens=CHUNK, codecs={"far": ENDING}, gate=gate, exists_seconds=5.0) as cache:
        store(cache, prompt(1, 3 * CHUNK + 5))
        assert said(cache, "far") == coded(cache, "far") == {0: 32, 16: 16, 32: 0}


def test_a_codec_that_does_not_care_says_nothing(make_cache, gate) -> None:
    cache = make_cache(codecs={"host": LOSSY}, gate=gate)
    store(cache, prompt(1, 4 * CHUNK))
    for one in cache.entries():
        assert one.header().provenance.behind == 0
        raw = cache.tiers[0]._path(one.entry.address).read_bytes()
        assert b"tables" in raw and b"behind" not in raw


def test_what_moves_stays_coded_for_what_it_was(make_cache, gate) -> None:
    tokens = prompt(1, 4 * CHUNK + 5)
    store(make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=gate), tokens)
    codecs = {"third": ENDING, "disk": ENDING}
    cache = make_cache(16 * MB, 16 * MB, names=("new", "disk"), codecs=codecs, gate=gate)
    assert load(cache, tokens)[:2] == (tokens.size, tokens.size)
    cache.flush(30)
    assert {one.header().codec[0].name for one in cache.entries() if one.tier == "new"} == {"raw"}
    assert said(cache, "new") == ends(tokens.size)  # promoted
    for to in (LOSSLESS, ENDING, "raw", ENDING):
        assert cache.recode(to, "new").recoded == 5
        assert said(cache, "new") == ends(tokens.size)
    assert coded(cache, "new") == ends(tokens.size)  # coded again for the same end


def test_what_is_stored_of_lossy_state_is_good_for_no_earlier_end(make_cache, gate) -> None:
    """Some of it was loaded, and may have been coded for this end: raw arrays do not make that better."""
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=gate)
    store(cache, prompt(1, 4 * CHUNK), under=ENDED)
    assert said(cache, "host") == said(cache, "disk") == coded(cache, "disk") == ends(64)


def test_show_says_for_how_many_tokens_behind_it_an_object_was_coded(
    shm, gate, tmp_path, monkeypatch
) -> None:
    for name, value in {
        "KVASS_HOST_PATH": shm / "host", "KVASS_DISK_BYTES": 0, "KVASS_MODELS_PATH": tmp_path,
        "KVASS_HOST_CODEC": ENDING, "KVASS_CHUNK_TOKENS": CHUNK, "COLUMNS": 220,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    with KVCache.open() as cache:
        store(cache, prompt(1, 100 * CHUNK))
        shown = {one.entry.position: one.address for one in cache.entries()}
    first, last = (
        CliRunner().invoke(app, ["show", shown[at]], catch_exceptions=False).output for at in (0, 99 * CHUNK)
    )
    assert "coded for 1,584 tokens behind it" in first
    assert "lossy-tiny-ending, by the tables" in last and "behind it" not in last


def test_staging_keeps_what_is_said(shm, gate) -> None:
    far, tokens = FaultyStore(), prompt(1, GUARD_TOKENS + 4 * CHUNK + 9)
    whole = tokens.size // CHUNK * CHUNK
    for name in ("one", "two"):
        tiers = [DirectoryTier(shm / name, 16 * MB, name="host"), RemoteTier("far", far)]
        codecs = {"far": ENDING}
        with KVCache(tiers, chunk_tokens=CHUNK, codecs=codecs, gate=gate, exists_seconds=5.0) as cache:
            if name == "one":
                store(cache, tokens)
            else:
                assert load(cache, tokens) == (whole, whole, 0, 0)
                assert said(cache, "host") == ends(whole)


# -- recoding -------------------------------------------------------------------------------------------


def test_what_is_recoded_is_coded_for_the_nearest_end_behind_it(make_cache, gate) -> None:
    space = SPACES[1]
    cache = make_cache(gate=gate)
    first, second = prompt(1, 6 * CHUNK + 3), prompt(7, 3 * CHUNK)
    branch = np.concatenate([first[: 2 * CHUNK], second])
    for text in (first, branch):
        store(cache, text, space)
    assert cache.recode(ENDING, "host").failed == 0
    wanted = {}
    for text, nearest in ((first, branch.size), (branch, branch.size)):
        keys = chain(lossy_namespace(space, ENDING).root(), text, CHUNK)
        for number, key in enumerate(keys):
            stop = (number + 1) * CHUNK
            wanted[key] = (nearest if number < 2 else text.size) - stop
    for one in cache.entries():
        told, header = int(one._open(False)[1]["behind"].view("<u4")[0, 0]), one.header()
        behind = 0 if windowed(header) else wanted.get(one.entry.address[:KEY_BYTES], 0)
        assert header.provenance.behind == told == behind
    assert cache.recode(ENDING, "host").already == cache.stats()["host"].objects


def test_an_index_with_wrong_parents_leads_nowhere() -> None:
    def entry(name: int, position: int, parent: int | None = None, part: int = 0, length: int = 16) -> Entry:
        key = bytes([name]) * KEY_BYTES
        before = None if parent is None else address(bytes([parent]) * KEY_BYTES, part)
        return Entry(address(key, part), before, b"", position, length, 1, 0.0, 0.0, 0.0)

    def nearest(*entries: Entry) -> dict[int, int]:
        found = _nearest_ends(sorted(entries, key=lambda one: one.position))
        return {one[0]: end for one, end in found.items()}

    assert nearest(entry(1, 0, 2), entry(2, 16, 1)) == {1: 32, 2: 32}
    assert nearest(entry(1, 0, 1), entry(2, 0, 1), entry(3, 16, 9)) == {1: 16, 2: 16, 3: 32}
    assert nearest(entry(1, 0), entry(2, 1, 1, length=2)) == {1: 3, 2: 3}  # an end within its parent
    other = entry(2, 16, 1)._replace(address=address(bytes([2]) * KEY_BYTES, 1))
    assert nearest(entry(1, 0), other) == {1: 16, 2: 32}  # another group's chunk is no child
    long = [entry(number % 250, 16 * number, (number - 1) % 250 if number else None) for number in range(250)]
    assert nearest(*long)[0] == 16 * 250


# -- loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES[:2], ids=IDS[:2])
@pytest.mark.parametrize("size", [LONG, LONG - 5])
def test_a_prompt_that_leaves_a_sequence_early_gets_256_tokens_less(make_cache, gate, space, size) -> None:
    tokens, longer = prompt(1, size), np.concatenate([prompt(1, size), prompt(9, 50)])
    store(make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=gate), tokens, space)
    cache = make_cache(16 * MB, 16 * MB, names=("new", "disk"), codecs=DOWN, gate=gate)
    for round_ in range(2):  # from the disk, and promoted to raw arrays
        for text in (tokens, longer):
            assert load(cache, text, space) == (size, size, 0, 0)
        # an engine computes the last token of a prompt itself
        assert load(cache, tokens, space, limit=size - 1) == (size - 1, size - 1, 0, 0)
        for m in (size - 2, size - 40, GUARD_TOKENS + CHUNK, GUARD_TOKENS + 1, GUARD_TOKENS, 3):
            left = max(0, m - GUARD_TOKENS)
            assert load(cache, tokens, space, limit=m) == (m, left, 0, m - left)
        cache.flush(30)
        if not round_:
            cache.tiers[1].delete([one.entry.address for one in cache.entries() if one.tier == "disk"])


@pytest.mark.parametrize("space", SPACES[:2], ids=IDS[:2])
def test_what_is_exact_is_never_given_up(make_cache, gate, space) -> None:
    tokens = prompt(1, LONG)
    cache = make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=gate)
    store(cache, tokens, space)
    for keep in (LONG // CHUNK - 1, LONG // CHUNK - 4, 2):
        cache.tiers[0].delete([address(chain(space.root(), tokens, CHUNK)[keep], 0)])
        exact = keep * CHUNK
        assert load(cache, tokens, space) == (LONG, LONG, exact, 0)
        left = max(exact, LONG - 2 - GUARD_TOKENS)
        assert load(cache, tokens, space, limit=LONG - 2) == (LONG - 2, left, exact, LONG - 2 - left)
        assert load(cache, tokens, space, limit=exact) == (exact, exact, exact, 0)
        cache.flush(30)
    match = cache.lookup(tokens, space, limit=GUARD_TOKENS, approximate=[lossy_namespace(space, ENDING)])
    result = cache.load(match, blank(space, match.length))
    assert (match.length, result.tokens) == (GUARD_TOKENS, 2 * CHUNK)
    assert match.upon(result.tokens, result.exact_tokens) == space  # nothing lossy is left of it


def test_what_was_coded_as_an_end_is_one(make_cache, gate) -> None:
    """Where a sequence ends within another, what was stored for it first is used to its end."""
    first, second = prompt(1, GUARD_TOKENS + 4 * CHUNK), prompt(1, GUARD_TOKENS + 9 * CHUNK)
    cache = make_cache(codecs={"host": ENDING}, gate=gate)
    store(cache, first)
    store(cache, second)
    assert load(cache, first) == (first.size, first.size, 0, 0)
    assert load(cache, second) == (second.size, second.size, 0, 0)
    m = first.size + CHUNK
    assert load(cache, second, limit=m) == (m, m - GUARD_TOKENS, 0, GUARD_TOKENS)
    m = first.size - 2  # within a chunk that was coded as an end, which goes on behind its beginning
    assert load(cache, first, limit=m) == (m, m - GUARD_TOKENS, 0, GUARD_TOKENS)
    m = second.size - 2  # what was coded for another end is far from this one, but the last is not
    assert load(cache, second, limit=m)[1] == m - GUARD_TOKENS
    match = cache.lookup(second, ENDED)
    cache.tiers[0]._path(match.pieces()[first.size // CHUNK].address).unlink()
    result = cache.load(match, blank(SPACE, match.length))  # what lies behind the gap is of no concern
    assert (result.tokens, result.given_up) == (first.size, 0)


@pytest.mark.parametrize("space", SPACES, ids=IDS)
def test_a_codec_that_does_not_care_gives_nothing_up(make_cache, gate, space) -> None:
    tokens = prompt(1, LONG)
    cache = make_cache(codecs={"host": LOSSY}, gate=gate)
    store(cache, tokens, space)
    for m in (LONG, LONG - 2, LONG - 40, 3):
        assert load(cache, tokens, space, LOSSY, limit=m) == (m, m, 0, 0)


def test_where_all_layers_have_windows_each_chunk_is_an_end(make_cache, gate) -> None:
    space, tokens = SPACES[2], prompt(1, LONG)
    cache = make_cache(codecs={"host": ENDING}, gate=gate)
    store(cache, tokens, space)
    for m in (LONG, LONG - 5, LONG - 5 - CHUNK, CHUNK):
        assert load(cache, tokens, space, limit=m) == (m, m, 0, 0)
    m = LONG - 5 - 2  # but not to be left within
    assert load(cache, tokens, space, limit=m) == (m, m - GUARD_TOKENS, 0, GUARD_TOKENS)


@pytest.mark.parametrize("space", SPACES[:2], ids=IDS[:2])
def test_where_an_object_fails_the_end_before_it_is_given_up(make_cache, gate, space) -> None:
    tokens = prompt(1, LONG)
    cache = make_cache(codecs={"host": ENDING}, gate=gate)
    store(cache, tokens, space)
    match = cache.lookup(tokens, space, approximate=[lossy_namespace(space, ENDING)])
    lost = LONG // CHUNK - 1
    one = address(chain(match.namespace.root(), tokens, CHUNK)[lost], 0)
    path = cache.tiers[0]._path(one)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    pool, told = blank(space, match.length), []
    result = cache.load(match, pool, ready=told.append)
    m = lost * CHUNK
    assert (result.tokens, result.given_up) == (m - GUARD_TOKENS, GUARD_TOKENS)
    assert told[-1] == result.tokens
    wanted = finite(tokens[: result.tokens], space)
    for number, group in enumerate(space.spec.groups):
        first = group.first_needed(result.tokens)
        for name, have in pool.arrays(number, first, result.tokens).items():
            want = wanted.arrays(number, first, result.tokens)[name]
            assert have.tobytes() == rounded(want).tobytes()


def test_where_a_windows_earlier_piece_is_gone_too_the_hit_ends_before_it(make_cache, gate) -> None:
    """With windows a hit that gives its end up needs pieces that the longer one did not."""
    space = SPACES[1]
    tokens = prompt(1, 2 * GUARD_TOKENS + 8 * CHUNK)
    cache = make_cache(codecs={"host": ENDING}, gate=gate)
    store(cache, tokens, space)
    match = cache.lookup(tokens, space, limit=tokens.size - 2, approximate=[lossy_namespace(space, ENDING)])
    given = tokens.size - 2 - GUARD_TOKENS
    needed = [piece for piece in match.pieces(given) if piece not in match.pieces()]
    cache.tiers[0]._path(needed[-1].address).unlink()
    pool = blank(space, match.length)
    result = cache.load(match, pool)
    assert (result.tokens, result.given_up) == (needed[-1].start - GUARD_TOKENS, GUARD_TOKENS)
    first = space.spec.groups[0].first_needed(result.tokens)
    wanted = finite(tokens[: result.tokens], space).arrays(0, first, result.tokens)
    for name, have in pool.arrays(0, first, result.tokens).items():
        assert have.tobytes() == rounded(wanted[name]).tobytes()


def test_ready_never_tells_what_is_given_up_later(make_cache, gate) -> None:
    tokens = prompt(1, LONG)
    cache = make_cache(codecs={"host": ENDING}, gate=gate)
    store(cache, tokens)
    for m in (LONG, LONG - 2):
        match, told = cache.lookup(tokens, SPACE, limit=m, approximate=[ENDED]), []
        result = cache.load(match, blank(SPACE, m), ready=told.append)
        early = [CHUNK * number for number in range(1, 6)]  # while it loads, not only at the end
        assert told == sorted({*early, result.tokens}) and max(told) == result.tokens
        assert result.tokens == (m if m == LONG else m - GUARD_TOKENS)


def test_what_was_given_up_is_promoted_and_checked_all_the_same(make_cache, gate) -> None:
    tokens = prompt(1, LONG)
    store(make_cache(16 * MB, 16 * MB, codecs=DOWN, gate=gate), tokens)
    cache = make_cache(16 * MB, 16 * MB, names=("new", "disk"), codecs=DOWN, gate=gate)
    assert load(cache, tokens, limit=LONG - 2)[1] == LONG - 2 - GUARD_TOKENS
    cache.flush(30)
    assert said(cache, "new") == ends(LONG)
    match = cache.lookup(tokens, SPACE, limit=LONG - 2, approximate=[ENDED])
    assert cache.check(match) is match
    path = cache.tiers[0]._path(match.pieces()[-2].address)
    path.write_bytes(path.read_bytes()[:-1])
    cache.tiers[1].delete([match.pieces()[-2].address])
    assert cache.check(match).length == match.pieces()[-2].start


def test_state_of_a_codec_that_is_not_here_is_taken_for_one_that_cares(make_cache, gate, monkeypatch) -> None:
    tokens, other = prompt(1, LONG), lossy_namespace(SPACE, OTHER)
    cache = make_cache(gate=gate)
    store(cache, tokens, under=other)
    match = cache.lookup(tokens, other, limit=LONG - 2)
    assert cache.load(match, blank(SPACE, LONG)).tokens == LONG - 2
    monkeypatch.setattr("kvass.codecs.registry.entry_points", lambda **_: [])
    cache = make_cache(gate=gate)
    match = cache.lookup(tokens, other, limit=LONG - 2)
    assert cache.load(match, blank(SPACE, LONG)).tokens == LONG - 2 - GUARD_TOKENS

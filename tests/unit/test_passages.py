"""Passages that were stored are found wherever they stand in a prompt, and their KV is loaded."""

import itertools
import time

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.passages import segments
from fixtures.world import CHUNK, SLIDING, WINDOWED, blank, kv, namespace, prompt, store
from kvass.cache import KVCache, Passage
from kvass.chunks import as_tokens
from kvass.container import Encoded, empty_arrays, read_arrays, read_header
from kvass.errors import InputError, TierUnavailableError
from kvass.fingerprints import GRAM, SHORTEST, Fingerprints
from kvass.keys import Namespace, lossy_namespace
from kvass.spec import KVSpec
from kvass.tiers.base import MOST_MARKS, Mark, WriteItem
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.memory import BytesBlob, MemoryTier, collect

MB = 1 << 20
SPACE = namespace()
EXAMPLES = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=["memory", "directory"])
def cache(request, shm):
    with opened(shm, request.param) as made:
        yield made


def opened(shm, kind="memory", chunk=CHUNK) -> KVCache:
    tier = MemoryTier(16 * MB) if kind == "memory" else DirectoryTier(shm / "host", 16 * MB, name="host")
    return KVCache([tier], chunk_tokens=chunk)


def joined(*parts):
    return as_tokens(np.concatenate([np.asarray(part, "<i4") for part in parts]))


def ranges(found: list[Passage]) -> list[tuple[int, int, int]]:
    return [(one.start, one.stop, one.place) for one in found]


def loaded(cache, tokens, donors, space: Namespace = SPACE, exact=0, **options):
    """Segments of a prompt, each checked to be what one of the donors has there."""
    found = segments(cache, space, tokens, exact, **options)
    for one in found:
        part = np.asarray(tokens)[one.start : one.stop]
        wanted = next(
            kv(donor, space) for donor in donors
            if np.array_equal(donor[one.read_at : one.read_at + one.tokens], part)
        )  # fmt: skip
        for group, arrays in enumerate(one.kv):
            for name, array in wanted.arrays(group, one.read_at, one.read_at + one.tokens).items():
                assert array.tobytes() == arrays[name].tobytes()
    return [(one.start, one.stop, one.read_at) for one in found]


# -- what is found ----------------------------------------------------------------------------------------


def test_moved_passages_are_found_whole_and_loaded(cache):
    one, two = prompt(1, 700), prompt(2, 500)
    store(cache, one)
    store(cache, two)
    asked = joined(prompt(3, 50), one[101:407], [7], two[:70], prompt(4, 9), two[490:], one[640:], [5])
    wanted = [(50, 356, 101), (357, 427, 0)]
    assert ranges(cache.passages(asked, SPACE)) == wanted
    assert loaded(cache, asked, [one, two]) == wanted
    assert ranges(cache.passages(asked, SPACE, start=60)) == [(60, 356, 111), (357, 427, 0)]
    assert loaded(cache, asked, [one, two], exact=300) == [(357, 427, 0)]
    assert cache.passages(asked, SPACE, start=len(asked) + 7) == []


def texts_with_a_run_in_common():
    """Two texts, and where in each of them a run stands that both have."""
    return st.tuples(
        st.integers(0, 2**32 - 1), st.integers(SHORTEST, 200), st.integers(0, 150), st.integers(0, 150),
        st.integers(0, 60), st.integers(0, 60), st.sampled_from([16, 64, 100, 256]), st.booleans(),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["memory", "directory"])
@EXAMPLES
@given(made=texts_with_a_run_in_common())
def test_every_run_of_the_shortest_length_is_found(shm, kind, made):
    """At any place relative to chunks' borders, in one store or as a sequence that grew."""
    seed, size, before, after, behind, behind_prompt, chunk, grew = made
    random = np.random.default_rng(seed)
    shared = random.integers(0, 40_000, size)
    text = joined(random.integers(0, 40_000, before), shared, random.integers(0, 40_000, behind))
    asked = joined(
        40_001 + random.integers(0, 99, after), shared, 40_001 + random.integers(0, 99, behind_prompt)
    )
    with opened(shm / str(time.monotonic_ns()), kind, chunk) as cache:
        for end in (before + size // 2, before + size // 2 + 3, text.size) if grew else (text.size,):
            store(cache, text[:end])
        (found,) = cache.passages(asked, SPACE)
        assert (found.start, found.stop, found.place) == (after, after + size, before)
        (segment,) = segments(cache, SPACE, joined(asked, [1]), 0)
        assert (segment.start, segment.stop, segment.read_at) == (after, after + size, before)


def test_an_edit_disturbs_only_where_it_is(cache):
    old = prompt(1, 1000)
    store(cache, old)
    assert ranges(cache.passages(joined(old[:500], [1, 2, 3], old[501:]), SPACE)) == [
        (0, 500, 0), (503, 1002, 501),
    ]  # fmt: skip
    replaced = old.copy()
    replaced[500] += 1
    assert ranges(cache.passages(replaced, SPACE)) == [(0, 500, 0), (501, 1000, 501)]


def test_what_is_too_short_is_not_found(cache):
    old = prompt(1, 1000)
    store(cache, old)
    for size in (GRAM - 1, SHORTEST - 1, SHORTEST):
        found = cache.passages(joined(prompt(2, 50), old[100 : 100 + size], prompt(3, 50)), SPACE)
        assert len(found) == (size == SHORTEST)
    assert cache.passages([], SPACE) == []
    assert segments(cache, SPACE, [], 0) == []


def test_the_same_passage_twice_and_one_inside_another(cache):
    old = prompt(1, 300)
    store(cache, old)
    store(cache, joined(prompt(2, 20), old[100:200]))
    found = ranges(cache.passages(joined(old, [5], old[50:150]), SPACE))
    assert found == [(0, 300, 0), (301, 401, 50)]


def test_passages_that_overlap_are_cut(cache):
    a, b, c = prompt(1, 100), prompt(2, 100), prompt(3, 200)
    donors = [joined(a, b), joined(b, c)]
    for one in donors:
        store(cache, one)
    asked = joined(a, b, c, [5])
    assert ranges(cache.passages(asked, SPACE)) == [(0, 100, 0), (100, 400, 0)]
    assert loaded(cache, asked, donors) == [(0, 100, 0), (100, 400, 0)]


def test_a_run_goes_on_into_the_branch_that_agrees(cache):
    stem, branches = prompt(1, 3 * CHUNK), [prompt(seed, 200) for seed in (2, 3, 4)]
    donors = [joined(stem, branch) for branch in branches]
    for one in donors:
        store(cache, one)
    asked = joined(prompt(9, 30), donors[1][5:200], prompt(8, 30))
    assert loaded(cache, asked, donors) == [(30, 225, 5)]


def test_the_last_token_stays_new(cache):
    old = prompt(1, 200)
    store(cache, old)
    assert loaded(cache, old, [old]) == [(0, 199, 0)]
    assert loaded(cache, old, [old], exact=100) == [(100, 199, 100)]
    assert loaded(cache, old, [old], exact=136) == []


def test_texts_of_one_token_take_no_long_time(shm):
    with opened(shm, chunk=256) as cache:
        store(cache, as_tokens([7] * 20_000))
        began = time.process_time()
        found = cache.passages(as_tokens([7] * 20_000), SPACE)
        assert sum(one.tokens for one in found) > 15_000
        assert time.process_time() - began < 10


def test_common_passages_are_found_in_the_latest_texts(cache):
    common = prompt(1, 200)
    donors = [joined(prompt(100 + number, 10 + number), common) for number in range(3 * MOST_MARKS)]
    for one in donors:
        store(cache, one)
    (found,) = cache.passages(common, SPACE)
    assert (found.tokens, found.place) in {
        (200, 10 + number) for number in range(2 * MOST_MARKS, 3 * MOST_MARKS)
    }
    for one in donors[-MOST_MARKS:]:
        cache.forget(one, SPACE)
    assert cache.passages(common, SPACE) == []  # the earlier ones' rows made room: only a miss
    store(cache, joined([3], common))
    assert ranges(cache.passages(common, SPACE)) == [(0, 200, 1)]


def test_namespaces_are_apart_and_lossy_state_is_never_given(cache):
    old = prompt(1, 200)
    other = namespace(tenant="another")
    store(cache, old, other)
    assert cache.passages(old, SPACE) == []
    assert segments(cache, SPACE, old, 0) == []
    lossy = lossy_namespace(SPACE, "q2")
    assert cache.passages(old, lossy) == []
    assert ranges(cache.passages(old, other)) == [(0, 200, 0)]


def test_bad_tokens_are_refused(cache):
    with pytest.raises(InputError):
        cache.passages([1, -1], SPACE)
    with pytest.raises(InputError):
        segments(cache, SPACE, [[1, 2]], 0)


# -- where it is found ------------------------------------------------------------------------------------


def test_promotions_and_cascades_bring_what_leads_to_them(make_cache):
    old = prompt(1, 333)
    cache = make_cache(16 * MB, 16 * MB)
    store(cache, old)
    disk = cache.tiers[1]
    asked = joined(prompt(3, 50), old[20:333], [5])
    with KVCache([disk], chunk_tokens=CHUNK) as below:
        assert loaded(below, asked, [old]) == [(50, 363, 20)]
    again = make_cache(16 * MB, 16 * MB)
    (again.tiers[0]).delete([again.lookup(old, SPACE).pieces()[0].address])
    assert again.tiers[0].usage().objects == 0
    assert loaded(again, asked, [old]) == [(50, 363, 20)]  # from the lower tier, where it stays
    again.flush()
    assert again.tiers[0].usage().objects == 0
    match = again.lookup(old[:325], SPACE)  # the last chunk is used in part, and comes up whole
    assert again.load(match, blank(SPACE, 325)).tokens == 325
    again.flush()
    with KVCache([again.tiers[0]], chunk_tokens=CHUNK) as above:
        assert loaded(above, asked, [old]) == [(50, 363, 20)]


def test_what_is_forgotten_or_gone_is_a_miss(cache):
    old = prompt(1, 333)
    store(cache, old)
    asked = joined(prompt(3, 50), old, [5])
    cache.forget(old, SPACE, keep=200)
    assert loaded(cache, asked, [old]) == [(50, 242, 0)]
    found = cache.passages(asked, SPACE)
    cache.forget(old, SPACE)
    assert list(cache.donors(found, SPACE)) == [None]
    assert loaded(cache, asked, [old]) == []


def test_no_time_is_a_miss(cache):
    old = prompt(1, 333)
    store(cache, old)
    assert loaded(cache, joined(old, [5]), [old], seconds=0.0) == []
    assert loaded(cache, joined(old, [5]), [old], seconds=60.0) == [(0, 333, 0)]


def test_a_tier_that_fails_and_a_closed_cache_have_nothing(shm, monkeypatch):
    old = prompt(1, 333)
    with opened(shm) as cache:
        store(cache, old)
        (found,) = cache.passages(old, SPACE)

        def fails(*_):
            raise TierUnavailableError("as if gone")

        for verb in ("seen", "open", "contains"):
            with monkeypatch.context() as patch:
                patch.setattr(cache.tiers[0], verb, fails)
                assert segments(cache, SPACE, old, 0) == []
        assert len(segments(cache, SPACE, old, 0)) == 1
    assert cache.passages(old, SPACE) == []
    assert list(cache.donors([found], SPACE)) == [None]
    assert segments(cache, SPACE, old, 0) == []


def test_another_cut_of_the_text_is_a_miss(shm):
    old = prompt(1, 333)
    with opened(shm, "directory", 3 * CHUNK) as cache:
        store(cache, old)
    with opened(shm, "directory") as cache:
        assert ranges(cache.passages(old, SPACE)) == [(0, 333, 0)]
        assert segments(cache, SPACE, old, 0) == []


@pytest.mark.parametrize("spec", [WINDOWED, SLIDING])
def test_a_passage_longer_than_a_window_is_loaded_in_pieces_that_it_sees(shm, spec):
    groups = [msgspec.structs.replace(one, window=one.window and 100) for one in spec.groups]
    spec = KVSpec(groups=tuple(groups))
    space, old = namespace(spec), prompt(1, 400)
    with opened(shm, "directory") as cache:
        store(cache, old, space)
        for first, size in itertools.product(range(96, 113), (99, 100)):
            asked = joined(prompt(3, 30), old[first : first + size], [5])
            wanted = [(30, 129, first), (129, 130, first + 99)][: size - 98]
            assert loaded(cache, asked, [old], space) == wanted


# -- hostile rows and headers -----------------------------------------------------------------------------


def rewritten(cache, number, change):
    """Change the header of a stored chunk, digests and all."""
    tier = cache.tiers[0]
    one = sorted(cache.entries(), key=lambda each: each.entry.position)[number].entry
    with tier.open(one.address) as reader:
        parsed = read_header(reader)
        arrays = empty_arrays(parsed)
        read_arrays(reader, parsed, arrays)
    encoded = Encoded(msgspec.structs.replace(parsed.header, digests={}, **change(parsed.header)), arrays)
    data = collect(encoded)
    if isinstance(tier, MemoryTier):
        tier._objects[one.address].data = data
    else:
        tier._path(one.address).write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: {"tokens": [token ^ 1 for token in header.tokens]},
        lambda header: {"tokens": header.tokens[:-1]},
        lambda header: {"parent": header.parent[:-3] + "1-0"},
        lambda header: {"parent": "nonsense"},
        lambda header: {"parent": ""},
        lambda header: {"key": "0" * 64},
        lambda header: {"shard": 3},
        lambda header: {"namespace": namespace(tenant="another")},
    ],
)
def test_a_header_that_lies_is_a_miss(cache, change):
    old = prompt(1, 20 * CHUNK)
    store(cache, old)
    rewritten(cache, 10, change)
    asked = joined(prompt(3, 50), old, [5])
    assert ranges(cache.passages(asked, SPACE)) == [
        (50, 50 + 10 * CHUNK, 0), (50 + 11 * CHUNK, 50 + 20 * CHUNK, 11 * CHUNK),
    ]  # fmt: skip
    assert loaded(cache, asked, [old]) == [(50, 50 + 10 * CHUNK, 0)]


@pytest.mark.parametrize("position", [0, 5, 9 * CHUNK, 11 * CHUNK, (1 << 31) - 1])
@pytest.mark.parametrize("number", [10, 19])
def test_a_header_with_a_wrong_place_gives_nothing_wrong(cache, position, number):
    old = prompt(1, 20 * CHUNK)
    store(cache, old)
    rewritten(cache, number, lambda _: {"position": position})
    asked = joined(prompt(3, 50), old, [5])
    for start, stop, place in loaded(cache, asked, [old]):
        assert stop - start >= SHORTEST
        assert place == start - 50


def test_rows_that_lie_give_nothing_wrong(cache, monkeypatch):
    """Whoever keeps fingerprints may be wrong about what stood there, or where, or that it still does."""
    old, other = prompt(1, 333), prompt(2, 333)
    store(cache, old)
    store(cache, other)
    tier, real = cache.tiers[0], cache.tiers[0].seen
    chunks = [one.entry.address for one in cache.entries()]
    random = np.random.default_rng(0)

    def seen(root, values):
        for mark in real(root, values):
            for place in (mark.place + 1, -1, -(10**6), 10**6, 1 << 40):
                yield mark._replace(place=place)
            yield mark._replace(value=mark.value ^ 1)
            yield mark._replace(address=chunks[random.integers(len(chunks))])
            yield mark._replace(address=bytes(35))
            yield Mark(mark.value, mark.address[:-1] + b"\7", mark.place)

    monkeypatch.setattr(tier, "seen", lambda *asked: list(seen(*asked)))
    found = loaded(cache, joined(prompt(3, 50), old, [5], other, [5]), [old, other])
    assert all(start - place in (50, 50 + 334) for start, _, place in found)


def test_what_is_no_object_is_none(cache):
    old = prompt(1, 80)
    store(cache, old)
    tier = cache.tiers[0]
    one = min(cache.entries(), key=lambda each: each.entry.position).entry.address
    wrong = Fingerprints(np.array([0]), np.array([12345], np.uint64))
    tier.delete([one])
    item = WriteItem(one, None, SPACE.root(), 0, CHUNK, old[:CHUNK], BytesBlob(b"no object"), wrong)
    assert tier.write([item]) == [True]
    assert tier.seen(SPACE.root(), [12345]) == [Mark(12345, one, 0)]
    assert cache.passages(old, SPACE) == []

"""Passages that were read before are found wherever they stand in a prompt."""

import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.chunks import as_tokens
from kvass.reuse.fingerprints import GRAM, SHORTEST, fingerprints
from kvass.reuse.known import MOST_PLACES, Known
from kvass.reuse.passages import Passage, Seen, passages

SEEDS = st.integers(0, 2**32 - 1)


class Library:
    """Texts in memory, under their names."""

    def __init__(self, **texts):
        self.texts = {name: as_tokens(text) for name, text in texts.items()}
        self.rows = defaultdict(list)
        for name, text in self.texts.items():
            found = fingerprints(text)
            for place, value in zip(found.places.tolist(), found.values.tolist(), strict=True):
                self.rows[value].append(Seen(value, name, place))

    def seen(self, values):
        return [row for value in values for row in self.rows[value]]

    def find(self, prompt, **options):
        return passages(as_tokens(prompt), self.seen, self.texts.__getitem__, **options)


def text(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49_000, size).tolist()


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.integers(SHORTEST, 300), st.integers(0, 200), st.integers(0, 200), st.integers(2, 60_000))
def test_every_run_of_the_shortest_length_has_a_fingerprint_in_common(seed, size, before, after, vocabulary):
    random = np.random.default_rng(seed)
    shared = random.integers(0, vocabulary, size)
    one = as_tokens(np.concatenate([random.integers(0, vocabulary, before), shared]))
    other = as_tokens(
        np.concatenate([random.integers(0, vocabulary, after), shared, random.integers(0, vocabulary, 40)])
    )
    there = {int(value) for place, value in zip(*fingerprints(one), strict=True) if place >= before}
    here = {
        int(value)
        for place, value in zip(*fingerprints(other), strict=True)
        if after <= place <= after + size - GRAM
    }
    assert there & here


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.integers(0, 400))
def test_fingerprints_depend_on_the_tokens_alone(seed, size):
    tokens = as_tokens(text(seed, size))
    found = fingerprints(tokens)
    assert (np.diff(found.places) > 0).all()
    for place, value in zip(*found, strict=True):
        alone = fingerprints(tokens[place : place + GRAM])
        assert alone.values.tolist() == [value]
        assert alone.places.tolist() == [0]
    assert len(found.places) == 0 if size < GRAM else len(found.places) >= 1


def test_one_token_in_seventeen_gets_a_fingerprint():
    assert len(fingerprints(as_tokens(text(1, 100_000))).places) == pytest.approx(100_000 / 17, rel=0.05)
    assert len(fingerprints(as_tokens([7] * 10_000)).places) < 10_000 / 30


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.data())
def test_moved_passages_are_found_whole(seed, data):
    library = Library(one=text(seed, 700), two=text(seed + 1, 500))
    size = data.draw(st.integers(SHORTEST, 400))
    at = data.draw(st.integers(0, 700 - size))
    before = text(seed + 2, data.draw(st.integers(0, 150)))
    prompt = [
        *before,
        *library.texts["one"][at : at + size],
        49_500,
        *library.texts["two"][:70],
        *text(seed + 3, 9),
    ]
    found = library.find(prompt)
    start = len(before)
    assert found == [
        Passage(start, start + size, "one", at),
        Passage(start + size + 1, start + size + 71, "two", 0),
    ]


def test_an_edit_disturbs_only_where_it_is():
    old = text(1, 1000)
    new = [*old[:500], 1, 2, 3, *old[501:]]
    assert Library(old=old).find(new) == [Passage(0, 500, "old", 0), Passage(503, 1002, "old", 501)]


def test_what_is_too_short_is_not_found():
    old = text(1, 1000)
    assert not Library(old=old).find([*text(2, 50), *old[100 : 100 + GRAM - 1], *text(3, 50)])
    assert not Library(old=old).find([*text(2, 50), *old[100 : 100 + SHORTEST - 1], *text(3, 50)])
    assert Library(old=old).find([*text(2, 50), *old[100 : 100 + SHORTEST], *text(3, 50)])
    assert not Library(old=old).find([])
    assert not Library(old=[]).find(old)


def test_the_same_passage_twice_in_a_prompt_and_one_inside_another():
    old = text(1, 300)
    library = Library(old=old, part=old[100:200])
    assert library.find([*old, 5, *old[50:150]]) == [
        Passage(0, 300, "old", 0),
        Passage(301, 401, "old", 50),
    ]


def test_passages_that_overlap_are_cut():
    a, b, c = text(1, 100), text(2, 100), text(3, 200)
    found = Library(one=[*a, *b], two=[*b, *c]).find([*a, *b, *c])
    assert found == [Passage(0, 100, "one", 0), Passage(100, 400, "two", 0)]


def test_a_hash_alone_is_never_believed():
    """Whoever keeps fingerprints may be wrong about what stood there, or where, or that it still does."""
    old = text(1, 200)
    values = fingerprints(as_tokens(old)).values.tolist()
    places = fingerprints(as_tokens(old)).places.tolist()
    texts = {"other": as_tokens(text(2, 200)), "gone": as_tokens([]), "old": as_tokens(old)}

    def seen(asked):
        for value, place in zip(values, places, strict=True):
            yield from (
                Seen(value, "other", place),
                Seen(value, "gone", place),
                Seen(value, "old", place + 1),
            )
            yield from (Seen(value, "old", 10**6), Seen(value, "old", -1), Seen(value ^ 1, "old", place))

    assert passages(as_tokens(old), seen, texts.__getitem__) == []


def test_texts_of_one_token_take_no_long_time():
    began = time.process_time()
    library = Library(one=[7] * 20_000)
    library.rows = {value: rows[:8] for value, rows in library.rows.items()}
    library.seen = lambda values: [row for value in values for row in library.rows.get(value, ())]
    found = library.find([7] * 20_000)
    assert sum(run.tokens for run in found) > 15_000
    assert time.process_time() - began < 60


class TestKnown:
    def test_texts_are_forgotten_oldest_first(self):
        known = Known(capacity=500)
        for number in range(5):
            known.add(bytes([number]), as_tokens(text(number, 200)))
        assert known.tokens == 400
        assert [bool(known.find(as_tokens(text(number, 200)))) for number in range(5)] == [False] * 3 + [
            True
        ] * 2
        known.forget(b"\x04")
        known.forget(b"\x03")
        known.forget(b"\x03")
        assert (known.tokens, known.rows) == (0, 0)

    def test_a_name_taken_again_is_another_text(self):
        known = Known()
        known.add(b"a", as_tokens(text(1, 200)))
        known.add(b"a", as_tokens(text(2, 100)))
        assert known.tokens == 100
        assert known.find(as_tokens(text(1, 200))) == []
        assert known.find(as_tokens(text(2, 100))) == [Passage(0, 100, b"a", 0)]

    def test_very_common_passages_are_bounded(self):
        known, common = Known(), text(1, 300)
        for number in range(50):
            known.add(number.to_bytes(2), as_tokens([*common, *text(100 + number, 40)]))
        assert known.rows < MOST_PLACES * 300 / 17 * 1.5 + 50 * 340 / 17 / 4
        (found,) = known.find(as_tokens(common))
        assert found.tokens == 300
        assert found.text >= (46).to_bytes(2)
        for number in range(50):
            known.forget(number.to_bytes(2))
        assert (known.tokens, known.rows) == (0, 0)

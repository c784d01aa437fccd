"""Fingerprints of token ids: those of a run that two texts share are shared too."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.chunks import as_tokens
from kvass.fingerprints import GRAM, SHORTEST, fingerprints, fingerprints_of_parts

SEEDS = st.integers(0, 2**32 - 1)


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


def pairs(found, shift=0):
    return {
        (place + shift, value)
        for place, value in zip(found.places.tolist(), found.values.tolist(), strict=True)
    }


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.lists(st.integers(1, 150), min_size=1, max_size=8), st.sampled_from([2, 49_000]))
def test_parts_have_between_them_what_the_text_has(seed, sizes, vocabulary):
    tokens = as_tokens(np.random.default_rng(seed).integers(0, vocabulary, sum(sizes)))
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    found = [pairs(part, at) for part, at in zip(fingerprints_of_parts(tokens, starts), starts, strict=True)]
    if tokens.size >= SHORTEST:
        assert set.union(*found) == pairs(fingerprints(tokens))
    else:
        assert not set.union(*found)


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(0, 200), st.integers(1, 200), st.integers(0, 200))
def test_a_part_is_the_same_whatever_comes_behind_it_or_long_before(seed, before, size, behind):
    """So a chunk that is stored already needs nothing more when its sequence goes on."""
    whole = as_tokens(text(seed, before + size + behind))
    (alone,) = fingerprints_of_parts(whole[: before + size], [before])
    within, _ = fingerprints_of_parts(np.concatenate([whole, as_tokens([1])]), [before, before + size])
    short = min(before, SHORTEST)
    (near,) = fingerprints_of_parts(whole[before - short : before + size], [short])
    assert pairs(alone) == pairs(within) == pairs(near)
    assert all(-SHORTEST < place <= size - GRAM for place in alone.places.tolist())


def test_nothing_has_no_parts():
    assert fingerprints_of_parts(as_tokens([]), []) == []
    assert fingerprints(as_tokens([])).places.tolist() == []

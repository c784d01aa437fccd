"""rANS: what was coded comes back, kernels and plain numpy agree, and no stream leads out of bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.codecs import plain, rans

EXAMPLES = settings(deadline=None, max_examples=60)


@st.composite
def coded(draw):
    """Frequencies, contexts and symbols, of few tables and skewed distributions."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables, symbols = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 32, 256]))
    weights = (2.0 ** random.uniform(0, draw(st.sampled_from([1, 30])), (tables, symbols))).astype(np.int64)
    count = rans.LANES * draw(st.integers(1, 6))
    contexts = random.integers(0, tables, count).astype(np.uint8)
    return rans.frequencies(weights), contexts, random.integers(0, symbols, count).astype(np.uint8)


def decoded(frequencies, contexts, words, count):
    """Symbols, where the stream ended, and whether it ended well."""
    padded = np.concatenate([words, np.zeros(rans.PADDING, np.uint16)])
    states, symbols = np.empty(rans.LANES, np.uint32), np.empty(count, np.uint8)
    at = rans.begin(padded, 0, states)
    at = rans.decode(rans.decoding_tables(frequencies), contexts, padded, at, states, symbols, count)
    return symbols, at, rans.ended(states)


def encoded(frequencies, contexts, symbols, runs=1):
    tables, states = rans.coding_tables(frequencies), rans.fresh()
    words = np.empty(len(symbols) + rans.STATE_WORDS, np.uint16)
    at, size = len(words), len(symbols) // runs
    for first in range(len(symbols) - size, -1, -size):
        part = slice(first, first + size)
        at = rans.encode_run(tables, contexts[part], symbols[part], words, at, states)
    return words[rans.finish(words, at, states) :]


@EXAMPLES
@given(coded())
def test_symbols_come_back_and_plain_numpy_writes_the_same_stream(given_):
    frequencies, contexts, symbols = given_
    words = encoded(frequencies, contexts, symbols)
    assert np.array_equal(words, plain.rans_encode(frequencies, contexts, symbols))
    back, at, ended = decoded(frequencies, contexts, words, len(symbols))
    assert np.array_equal(back, symbols)
    assert (at, ended) == (len(words), True)
    assert np.array_equal(plain.rans_decode(frequencies, contexts, words), symbols)


@EXAMPLES
@given(coded(), st.data())
def test_a_foreign_stream_decodes_to_the_same_garbage_everywhere(given_, data):
    frequencies, contexts, _ = given_
    count = len(contexts)
    words = np.array(data.draw(st.lists(st.integers(0, 65535), min_size=9, max_size=9)), np.uint16)
    words = np.resize(words, data.draw(st.integers(rans.STATE_WORDS, rans.STATE_WORDS + count)))
    back, _, _ = decoded(frequencies, contexts, words, count)
    assert np.array_equal(back, plain.rans_decode(frequencies, contexts, words))


@EXAMPLES
@given(coded(), st.data())
def test_a_stream_cut_short_is_noticed(given_, data):
    frequencies, contexts, symbols = given_
    words = encoded(frequencies, contexts, symbols)
    if len(words) > rans.STATE_WORDS:
        cut = words[: data.draw(st.integers(rans.STATE_WORDS, len(words) - 1))]
        _, at, ended = decoded(frequencies, contexts, cut, len(symbols))
        assert not (ended and at == len(cut))


def test_a_stream_is_put_together_from_runs():
    random = np.random.default_rng(0)
    frequencies = rans.frequencies(random.integers(1, 99, (3, 7)))
    contexts, symbols = (
        random.integers(0, 3, 192).astype(np.uint8),
        random.integers(0, 7, 192).astype(np.uint8),
    )
    in_runs = encoded(frequencies, contexts, symbols, runs=3)
    assert np.array_equal(in_runs, encoded(frequencies, contexts, symbols))


def test_the_rate_is_the_entropy():
    random = np.random.default_rng(0)
    frequencies = rans.frequencies(np.array([[1000, 400, 100, 20, 3]]))
    share = frequencies[0] / rans.TOTAL
    symbols = random.choice(5, 640_000, p=share).astype(np.uint8)
    rate = 16 * len(encoded(frequencies, np.zeros_like(symbols), symbols)) / len(symbols)
    assert rate < 1.01 * -(share * np.log2(share)).sum()


@pytest.mark.parametrize("wrong", [[[4095, 2]], [[4096, 0]], [[1] * 257]])
def test_frequencies_that_no_decoder_can_use_are_refused(wrong):
    with pytest.raises(ValueError, match="frequencies"):
        rans.decoding_tables(np.array(wrong, np.uint16))

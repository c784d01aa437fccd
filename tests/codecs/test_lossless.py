"""The lossless codec: the same bits, fewer of them, and nothing but a miss for streams that lie."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_like import bits, group_of, kv_like

from kvass.codecs import lossless_kernels as kernels
from kvass.codecs import plain, rans
from kvass.codecs.base import Chunk
from kvass.codecs.lossless import Lossless
from kvass.codecs.lossless_tables import family, table_frequencies
from kvass.errors import CorruptObjectError, InputError

EXAMPLES = settings(deadline=None, max_examples=60)
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def assert_same(back, arrays):
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].dtype == array.dtype
        assert np.array_equal(bits(back[name]), bits(array))


def test_the_tables_are_those_of_the_format():
    found = table_frequencies()
    assert (found.sum(axis=1) == rans.TOTAL).all()
    assert hashlib.sha256(found.astype("<u2").tobytes()).hexdigest() == (
        "68c1e4907a51d3c0e39d50ae280fe8c318c99b4724e7b0a32b9d4b2bffae057f"
    )


@EXAMPLES
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 99))
def test_what_models_have_comes_back(dtype, tokens, seed):
    chunk = Chunk(group_of(dtype, heads=3, dim=5, v_dim=7), 0, 0, tokens)
    arrays = kv_like(chunk, seed)
    assert_same(Lossless().decode(Lossless().encode(arrays, chunk), chunk), arrays)


def test_an_engines_own_layout_comes_back():
    chunk = Chunk(group_of("float16"), 0, 256, 33)
    arrays = {"kv": np.random.default_rng(0).bytes(int(np.prod(chunk.group.shape("kv", 33))) * 2)}
    arrays["kv"] = np.frombuffer(arrays["kv"], np.float16).reshape(chunk.group.shape("kv", 33))
    assert_same(Lossless().decode(Lossless().encode(arrays, chunk), chunk), arrays)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 10.9), ("float16", 13.9), ("float32", 26.9)])
def test_it_is_dense_without_calibration(dtype, most):
    chunk = Chunk(group_of(dtype, heads=3, dim=64, v_dim=64), 0, 256, 256)
    arrays = kv_like(chunk)
    stored = Lossless().encode(arrays, chunk)
    elements = sum(array.size for array in arrays.values())
    assert 8 * sum(stream.nbytes for stream in stored.values()) / elements < most


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_without_order_hardly_grow(dtype):
    chunk = Chunk(group_of(dtype, heads=2, dim=64, v_dim=64), 0, 0, 256)
    random = np.random.default_rng(0)
    arrays = {
        name: np.frombuffer(random.bytes(array.nbytes), array.dtype).reshape(array.shape)
        for name, array in kv_like(chunk).items()
    }
    stored = Lossless().encode(arrays, chunk)
    raw = sum(array.nbytes for array in arrays.values())
    most = 1.1 if dtype in ("bfloat16", "float32") else 1.5
    assert sum(stream.nbytes for stream in stored.values()) < most * raw


@EXAMPLES
@given(st.integers(1, 40), st.integers(0, 99))
def test_plain_numpy_decodes_the_same(tokens, seed):
    chunk = Chunk(group_of(layers=1), 0, 0, tokens)
    arrays = kv_like(chunk, seed)
    stream = Lossless().encode(arrays, chunk)["k"][0]  # one layer
    channels = arrays["k"][0, 0].size
    words, escapes = stream[:8].view(np.uint32)
    chosen, tops = stream[8 : 8 + 2 * channels].reshape(2, channels)
    coded, rest = np.split(stream[8 + 2 * channels :], [2 * words])
    padded = -(-tokens * channels // rans.LANES) * rans.LANES
    symbols = plain.rans_decode(
        table_frequencies(), np.resize(chosen & 127, padded), np.frombuffer(coded.tobytes(), np.uint16)
    )
    mantissas = plain.unpacked_mantissas(rest[escapes:], tokens, channels, 7)
    rows = plain.unfolded(
        symbols[: tokens * channels].reshape(tokens, channels), chosen, tops, rest[:escapes], mantissas
    )
    assert np.array_equal(rows, arrays["k"].view(np.uint16).reshape(tokens, channels))


@EXAMPLES
@given(st.integers(1, 7), st.integers(1, 20), st.integers(0, 99))
def test_mantissas_of_every_width_are_packed_and_unpacked(width, tokens, seed):
    rows = np.random.default_rng(seed).integers(0, 1 << 16, (tokens, 3)).astype(np.uint16)
    packed = np.empty(kernels.packed_size(tokens, 3, width), np.uint8)
    kernels.pack(rows, width, packed)
    kept = (rows & 127) >> (7 - width) << (7 - width)
    assert np.array_equal(plain.unpacked_mantissas(packed, tokens, 3, width), kept)


CHUNK = Chunk(group_of("bfloat16"), 0, 0, 21)
STORED = Lossless().encode(kv_like(CHUNK), CHUNK)


def assert_miss_or_right_shape(stream):
    try:
        back = Lossless().decode({"k": stream, "v": STORED["v"]}, CHUNK)
    except CorruptObjectError:
        return
    assert back["k"].shape == CHUNK.group.shape("k", 21)


@EXAMPLES
@given(st.integers(0, STORED["k"].size - 1))
def test_a_stream_cut_short_is_corrupt(size):
    with pytest.raises(CorruptObjectError):
        Lossless().decode({"k": STORED["k"][:, :size], "v": STORED["v"]}, CHUNK)


def test_a_stream_with_something_behind_it_is_corrupt():
    longer = np.concatenate([STORED["k"], STORED["k"]], axis=1)
    with pytest.raises(CorruptObjectError):
        Lossless().decode({"k": longer, "v": STORED["v"]}, CHUNK)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, STORED["k"].size * 8 - 1), st.integers(0, 2))
def test_flipped_bits_lead_nowhere_bad(bit, more):
    stream = STORED["k"].copy()
    for place in (bit, (bit * 7919) % (stream.size * 8), (bit * 104729) % (stream.size * 8))[: more + 1]:
        stream[0, place // 8] ^= np.uint8(1 << place % 8)
    assert_miss_or_right_shape(stream)


@EXAMPLES
@given(st.integers(0, 2**32 - 1), st.integers(0, 3000))
def test_random_bytes_lead_nowhere_bad(seed, size):
    assert_miss_or_right_shape(np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)[None])


@pytest.mark.parametrize("change", [(1, 0), (-1, 0), (0, 1), (-(1 << 31), 0), (0, -1), (-1, 2), (1, -2)])
def test_counts_that_lie_are_corrupt(change):
    stream = STORED["k"].copy()
    stream[0, :8].view(np.uint32)[:] += np.array(change, np.int64).astype(np.uint32)
    with pytest.raises(CorruptObjectError):
        Lossless().decode({"k": stream, "v": STORED["v"]}, CHUNK)


def test_a_table_that_does_not_exist_is_corrupt():
    stream = STORED["k"].copy()
    stream[0, 8] = family().tables
    with pytest.raises(CorruptObjectError):
        Lossless().decode({"k": stream, "v": STORED["v"]}, CHUNK)


def test_arrays_of_another_chunk_are_refused():
    with pytest.raises(InputError, match="k"):
        Lossless().encode(kv_like(CHUNK), CHUNK._replace(tokens=20))

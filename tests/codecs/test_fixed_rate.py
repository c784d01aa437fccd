"""int8 and KIVI: bounded errors, exact sinks, kernels that agree with plain numpy, refusals."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_like import POSITIONS, bits, group_of, kv_like, tables_of

from kvass.codecs import fixed_kernels as kernels
from kvass.codecs import plain
from kvass.codecs.base import Chunk
from kvass.codecs.int8 import Int8
from kvass.codecs.kivi import Kivi
from kvass.errors import CorruptObjectError, InputError

EXAMPLES = settings(deadline=None, max_examples=60)
CODECS = {"int8": Int8, "kivi4": lambda tables: Kivi(tables, 4), "kivi2": lambda tables: Kivi(tables, 2)}
MAKE = pytest.mark.parametrize("make", CODECS.values(), ids=CODECS.keys())
SHAPES = st.sampled_from([(0, 18), (4, 18), (16, 18), (64, 64), (64, 80), (96, 128)])
"""Rotated channels and channels of a key: of heads that are vectors of 32 pairs, and of others."""


@EXAMPLES
@given(st.sampled_from([*CODECS]), SHAPES, st.integers(1, 80), st.sampled_from([0, 256]), st.integers(0, 99))
def test_the_kernels_agree_with_plain_numpy(name, shape, tokens, start, seed):
    tables = tables_of(shape[0])
    codec = CODECS[name](tables)
    chunk = Chunk(group_of(dim=shape[1], v_dim=37), 0, start, tokens)
    stored = codec.encode(kv_like(chunk, seed), chunk)
    back = codec.decode(stored, chunk)
    rope = tables.rope(0)
    rows = np.concatenate(rope.rows(start, tokens), axis=1) if rope else np.empty((tokens, 0), np.float32)
    grids = {name: stored[f"{name}_grid"].astype(np.float32) for name in ("k", "v")}
    wide = {
        "k": plain.keys(stored["k"], grids["k"], codec.bits, codec.key_group or tokens, rows),
        "v": plain.values(stored["v"], grids["v"], codec.bits, codec.value_group or 37, 37),
    }
    first = 4 if start == 0 else 0
    for name, array in wide.items():
        wanted = array.astype(ml_dtypes.bfloat16)[:, first:]
        assert np.array_equal(bits(back[name][:, first:]), bits(wanted))


@MAKE
def test_errors_are_within_half_a_step(make):
    tables = tables_of(16)
    codec, chunk = make(tables), Chunk(group_of("float32", v_dim=64), 0, 512, 96)
    arrays = kv_like(chunk)
    stored = codec.encode(arrays, chunk)
    back = codec.decode(stored, chunk)
    error = np.abs(tables.rope(0).unrotate(back["k"] - arrays["k"], 512))
    key_step = np.repeat(stored["k_grid"][..., 1, :].astype(np.float32), codec.key_group or 96, axis=1)
    value_step = np.repeat(stored["v_grid"][..., 1].astype(np.float32), codec.value_group or 64, axis=-1)
    assert (error <= 0.5001 * key_step + 1e-4).all()
    assert (np.abs(back["v"] - arrays["v"]) <= 0.5001 * value_step + 1e-5).all()
    spread = np.ptp(tables.rope(0).unrotate(arrays["k"], 512), axis=1).mean()
    assert key_step.mean() <= 1.02 * spread / ((1 << codec.bits) - 1)


@MAKE
@pytest.mark.parametrize("tokens", [1, 4, 5, 40])
def test_the_first_tokens_are_exact_and_shape_no_grid(make, tokens):
    codec, chunk = make(tables_of(16)), Chunk(group_of(), 0, 0, tokens)
    arrays = kv_like(chunk)
    arrays["k"][:, :4] *= 200
    stored = codec.encode(arrays, chunk)
    back = codec.decode(stored, chunk)
    for name in ("k", "v"):
        assert np.array_equal(bits(back[name][:, :4]), bits(arrays[name][:, :4]))
    assert np.abs(stored["k_grid"].astype(np.float32)).max() < 100


@MAKE
def test_a_later_chunk_has_no_exact_tokens(make):
    chunk = Chunk(group_of(), 0, 256, 8)
    assert make(tables_of(16)).encode(kv_like(chunk), chunk).keys() == {"k", "v", "k_grid", "v_grid"}


@MAKE
@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn"])
def test_other_floats_come_back_in_kind(make, dtype):
    codec, chunk = make(tables_of(16)), Chunk(group_of(dtype), 0, 0, 20)
    arrays = kv_like(chunk)
    back = codec.decode(codec.encode(arrays, chunk), chunk)
    for name in ("k", "v"):
        assert (back[name].dtype, back[name].shape) == (arrays[name].dtype, arrays[name].shape)
        assert np.isfinite(back[name].astype(np.float32)).all()


@MAKE
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e5])
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_cannot_be_kept_is_refused(make, value, name):
    chunk = Chunk(group_of(), 0, 256, 8)
    arrays = kv_like(chunk)
    arrays[name][1, 5, 1, 3] = value
    with pytest.raises(InputError):
        make(tables_of(16)).encode(arrays, chunk)


@MAKE
def test_an_engines_own_layout_is_refused(make):
    chunk = Chunk(group_of(), 0, 0, 8)
    with pytest.raises(InputError, match="kv"):
        make(tables_of(16)).encode({"kv": np.zeros((2, 8, 48), ml_dtypes.bfloat16)}, chunk)


@MAKE
def test_positions_behind_the_tables_are_refused(make):
    codec, chunk = make(tables_of(16)), Chunk(group_of(), 0, 256, 8)
    stored = codec.encode(kv_like(chunk), chunk)
    far = chunk._replace(start=POSITIONS - 4)
    with pytest.raises(InputError, match="positions"):
        codec.encode(kv_like(far), far)
    with pytest.raises(CorruptObjectError, match="positions"):
        codec.decode(stored, far)


@MAKE
def test_tables_that_rotate_more_than_a_head_has_are_corrupt(make):
    chunk = Chunk(group_of(dim=8), 0, 256, 8)
    stored = make(tables_of(8)).encode(kv_like(chunk), chunk)
    with pytest.raises(CorruptObjectError):
        make(tables_of(16)).decode(stored, chunk)


@MAKE
@pytest.mark.parametrize("harm", ["grid", "missing", "more", "shape", "dtype"])
def test_stored_arrays_that_do_not_fit_are_corrupt(make, harm):
    codec, chunk = make(tables_of(16)), Chunk(group_of(), 0, 0, 8)
    stored = codec.encode(kv_like(chunk), chunk)
    if harm == "grid":
        stored["v_grid"][0, 5, 1, 0, 1] = np.nan
    elif harm == "missing":
        del stored["k_first"]
    elif harm == "more":
        stored["z"] = stored["k"]
    elif harm == "shape":
        stored["k"] = stored["k"][:, :, :1]
    else:
        stored["k"] = stored["k"].view(np.int8)
    with pytest.raises(CorruptObjectError):
        codec.decode(stored, chunk)


@MAKE
@EXAMPLES
@given(st.integers(0, 2**32 - 1))
def test_any_bytes_decode_to_finite_arrays_or_are_corrupt(make, seed):
    random = np.random.default_rng(seed)
    codec, chunk = make(tables_of(16)), Chunk(group_of(), 0, 256, 40)
    stored = codec.encode(kv_like(chunk), chunk)
    for name, array in stored.items():
        stored[name] = np.frombuffer(random.bytes(array.nbytes), array.dtype).reshape(array.shape)
    if seed % 2:
        stored |= {name: np.nan_to_num(stored[name]) for name in ("k_grid", "v_grid")}
    try:
        back = codec.decode(stored, chunk)
    except CorruptObjectError:
        return
    for name in ("k", "v"):
        assert back[name].shape == chunk.group.shape(name, 40)
        assert np.isfinite(back[name].astype(np.float32)).all()


@settings(deadline=None, max_examples=300)
@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_rounding_is_to_nearest_even(value):
    assert kernels.rounded(np.float32(value)) == np.float32(value).astype(ml_dtypes.bfloat16).view(np.uint16)


def test_every_float16_is_widened_as_numpy_does_it():
    halves = np.arange(1 << 16, dtype=np.uint16)
    finite = halves[np.isfinite(halves.view(np.float16))]
    wide = np.empty(finite.size, np.float32)
    assert kernels.widened(finite, wide)
    assert np.array_equal(wide.view(np.uint32), finite.view(np.float16).astype(np.float32).view(np.uint32))
    for one in halves[~np.isfinite(halves.view(np.float16))][::97]:
        assert not kernels.widened(np.array([1, one, 2], np.uint16), wide[:3].copy())

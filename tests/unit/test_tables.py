"""Tables: one safetensors file, known by its digest; rotations put together from stored cosines and sines."""

import os

import numba
import numpy as np
import pytest
from safetensors import numpy as safetensors

from kvass.codecs.kernel import kernel
from kvass.codecs.tables import Tables, rope_arrays, write_tables
from kvass.errors import CorruptObjectError, InputError, ModelFilesError

ARRAYS = {
    "steps": np.arange(6, dtype=np.float32).reshape(2, 3),
    "odd": np.arange(7, dtype=np.uint8),
    "wide": np.array([[1.5]], np.float64),
    "none": np.zeros((0, 4), np.int16),
}


def test_what_is_written_is_read_and_is_valid_safetensors(tmp_path) -> None:
    raw = write_tables(ARRAYS, {"made": "for a test"})
    (tmp_path / "tables.safetensors").write_bytes(raw)
    found = Tables.load(tmp_path / "tables.safetensors")
    theirs = safetensors.load(raw)
    for name, array in ARRAYS.items():
        assert np.array_equal(found.array(name), array)
        assert found.array(name).dtype == array.dtype
        assert np.array_equal(theirs[name], array)
    assert Tables.parse(safetensors.save(ARRAYS)).array("odd")[6] == 6
    assert write_tables(dict(reversed(ARRAYS.items())), {"made": "for a test"}) == raw
    assert Tables.parse(raw).digest == found.digest != Tables.parse(write_tables(ARRAYS)).digest


def test_what_is_not_there_or_not_sound_is_an_error(tmp_path) -> None:
    with pytest.raises(ModelFilesError, match="calibrate"):
        Tables.load(tmp_path / "nowhere")
    raw = write_tables(ARRAYS)
    for bad in (
        b"", raw[:7], raw[:40], raw[:-1], b"\xff" * 8 + raw[8:], raw.replace(b'"F32"', b'"F99"'),
        raw.replace(b"[2,3]", b"[2,4]"), raw.replace(b"{", b"[", 1), raw.replace(b"[2,3]", b"[-2,-3]"),
        raw.replace(b'"dtype"', b'"dtypo"', 1),
    ):  # fmt: skip
        assert bad != raw
        with pytest.raises(ModelFilesError):
            Tables.parse(bad)
    with pytest.raises(CorruptObjectError, match="absent"):
        Tables.parse(raw).array("absent")


def test_keys_are_rotated_as_the_model_does_and_back() -> None:
    rates = 10000.0 ** -(np.arange(4) / 4)
    made = Tables.parse(write_tables(rope_arrays(1, rates, 1000)))
    assert made.rope(0) is None
    rope = made.rope(1)
    assert (rope.rotary_dim, rope.positions) == (8, 1024)
    keys = np.random.default_rng(1).normal(size=(2, 300, 3, 10)).astype(np.float32)
    angles = (np.arange(300) + 500)[:, None] * rates
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
    wanted = np.concatenate(
        [
            keys[..., :4] * cos - keys[..., 4:8] * sin,
            keys[..., 4:8] * cos + keys[..., :4] * sin,
            keys[..., 8:],
        ],
        axis=-1,
    )
    turned = rope.rotate(keys, 500)
    assert turned.dtype == np.float32
    assert np.allclose(turned, wanted, atol=1e-5)
    assert np.allclose(rope.unrotate(turned, 500), keys, atol=1e-5)
    assert np.array_equal(turned[:, 100:], rope.rotate(keys[:, 100:], 600))  # position alone decides
    with pytest.raises(InputError, match="1024"):
        rope.rotate(keys, 1000)


def test_rotations_that_do_not_fit_are_corrupt() -> None:
    arrays = rope_arrays(0, [1.0, 0.1], 512)
    for name in arrays:
        for bad in (None, arrays[name][:, :1], arrays[name].astype(np.float64), arrays[name][0]):
            harmed = {key: value for key, value in arrays.items() if key != name}
            if bad is not None:
                harmed[name] = bad
            with pytest.raises(CorruptObjectError):
                Tables.parse(write_tables(harmed)).rope(0)


def test_what_is_no_file_is_refused_and_waits_for_nobody(tmp_path) -> None:
    os.mkfifo(tmp_path / "tables.safetensors")
    with pytest.raises(ModelFilesError, match="is no file"):
        Tables.load(tmp_path / "tables.safetensors")


def test_kernels_work_where_nothing_may_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose folders are all read-only."""
    compiled = numba.njit

    def njit(*functions, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'double': no locator available")
        return compiled(*functions, **options)

    def double(number: int) -> int:
        return 2 * number

    monkeypatch.setattr(numba, "njit", njit)
    assert kernel(double)(21) == 42

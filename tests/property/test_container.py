"""Objects: what was written is read, bit for bit; what was changed in any way is refused."""

import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load as safetensors_load

from kvass.chunks import as_tokens
from kvass.codecs.raw import Raw
from kvass.container import (
    ALIGNMENT,
    Array,
    CodecStep,
    Encoded,
    Header,
    Parsed,
    empty_arrays,
    read_arrays,
    read_header,
)
from kvass.errors import CorruptObjectError, InputError
from kvass.keys import FORMAT_VERSION, Namespace, address, address_text, content_key, next_key
from kvass.provenance import EXACT
from kvass.spec import KVSpec, LayerGroup, RopeSpec, numpy_dtype
from kvass.testing import strategies
from kvass.testing.strategies import Chunk
from kvass.tiers.memory import BytesReader, collect

EXAMPLES = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
PLAIN = ("float32", "float16")
"""What numpy itself has; the others come from safetensors as numpy cannot name them."""


def header_of(chunk: Chunk, codec: CodecStep | None = None) -> Header:
    root = chunk.namespace.root()
    raw = chunk.tokens.tobytes()
    parent = address_text(address(root, chunk.group)) if chunk.position else ""
    return Header(
        digest="", format=FORMAT_VERSION, key=next_key(root, raw, chunk.tokens.size).hex(), group=chunk.group,
        shard=0, parent=parent, content_key=content_key(root, raw).hex(), namespace=chunk.namespace,
        position=chunk.position, tokens=chunk.tokens.tolist(), codec=[codec or Raw().step()],
        provenance=EXACT, digests={},
    )  # fmt: skip


def written(chunk: Chunk) -> bytes:
    return bytes(collect(Encoded(header_of(chunk), chunk.arrays)))


def read(raw: bytes) -> tuple[Parsed, dict[str, Array]]:
    reader = BytesReader(raw)
    parsed = read_header(reader)
    arrays = empty_arrays(parsed)
    assert read_arrays(reader, parsed, arrays) == sum(array.nbytes for array in arrays.values())
    return parsed, arrays


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


# -- round trip ---------------------------------------------------------------------------------------


@EXAMPLES
@given(strategies.chunks())
def test_what_was_written_is_read(chunk: Chunk) -> None:
    raw = written(chunk)
    parsed, arrays = read(raw)
    expected = header_of(chunk)
    assert msgspec.structs.replace(parsed.header, digest="", digests={}) == expected
    assert parsed.header.namespace.root() == chunk.namespace.root()
    assert parsed.size == len(raw)
    group = chunk.namespace.spec.groups[chunk.group]
    assert arrays.keys() == {"k", "v"}
    for name, array in arrays.items():
        assert array.dtype == numpy_dtype(group.dtype) == chunk.arrays[name].dtype
        assert array.shape == group.shape(name, chunk.tokens.size)
        assert bits(array) == bits(chunk.arrays[name])
        assert parsed.arrays[name].offset >= ALIGNMENT
    assert min(stored.offset for stored in parsed.arrays.values()) % ALIGNMENT == 0
    assert sum(stored.size for stored in parsed.arrays.values()) == group.bytes_per_token * chunk.tokens.size


@EXAMPLES
@given(strategies.chunks())
def test_the_same_chunk_gives_the_same_bytes(chunk: Chunk) -> None:
    """Also from views of a larger pool, and read into views of one."""
    group, count = chunk.namespace.spec.groups[chunk.group], chunk.tokens.size
    pool = {name: np.zeros(group.shape(name, count + 7), array.dtype) for name, array in chunk.arrays.items()}
    views = {name: array[:, 3 : 3 + count] for name, array in pool.items()}
    for name, view in views.items():
        view[:] = chunk.arrays[name]
    raw = written(chunk)
    assert raw == written(chunk._replace(arrays=views)) == written(chunk)
    for view in views.values():
        view[:] = 0
    reader = BytesReader(raw)
    read_arrays(reader, read_header(reader), views)
    for name, view in views.items():
        assert bits(view) == bits(chunk.arrays[name])
        assert not pool[name][:, :3].any() and not pool[name][:, 3 + count :].any()


@EXAMPLES
@given(strategies.chunks(max_tokens=8), st.integers(1, 5), st.data())
def test_stored_arrays_of_any_name_shape_and_dtype(chunk: Chunk, count: int, data: st.DataObject) -> None:
    """Codecs of others store what they like."""
    names = data.draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=count,
                               max_size=count, unique=True))  # fmt: skip
    dtypes = st.sampled_from(["uint8", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
    arrays = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        drawn = data.draw(dtypes)
        dtype = np.dtype(np.uint8) if drawn == "uint8" else numpy_dtype(drawn)
        size = int(np.prod(shape)) * dtype.itemsize
        arrays[name] = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)
    step = CodecStep("x", {"bits": 4, "scale": 0.5, "mode": "y", "on": True})
    parsed, found = read(bytes(collect(Encoded(header_of(chunk, step), arrays))))
    assert parsed.header.codec == [step]
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert bits(found[name]) == bits(array)


@pytest.mark.parametrize(
    "rope",
    [
        {"theta": 10_000},
        {"parameters": {"sections": [16, 24, 24]}},
        {"parameters": {"factor": None}},
        {"parameters": {"nested": {"factor": 1.0}}},
        {"theta": float("nan")},
        {"theta": float("inf")},
    ],
    ids=str,
)
def test_a_spec_that_would_be_read_as_another_is_refused(rope: dict[str, Any]) -> None:
    """It would be written, found corrupt, and written again, for ever."""
    fields: dict[str, Any] = {"kind": "default", "theta": 1e4, "rotary_dim": 2, **rope}
    group = LayerGroup(
        kind="attention", layers=(0,), kv_heads=1, head_dim=2, v_head_dim=2, dtype="float32",
        rope=RopeSpec(**fields),
    )  # fmt: skip
    space = Namespace(
        model="", weights="", config="", adapter="", spec=KVSpec(groups=(group,)), tenant="", numerics=""
    )
    arrays = {name: np.zeros((1, 1, 1, 2), np.float32) for name in ("k", "v")}
    with pytest.raises(InputError, match="cannot be stored"):
        Encoded(header_of(Chunk(space, 0, 0, as_tokens([1]), arrays)), arrays)


# -- damage -------------------------------------------------------------------------------------------


def assert_refused(raw: bytes, targets: dict[str, Array] | None = None) -> None:
    with pytest.raises(CorruptObjectError):
        read(raw)


@EXAMPLES
@given(strategies.chunks(max_tokens=20), st.data())
def test_a_changed_byte_is_never_accepted(chunk: Chunk, data: st.DataObject) -> None:
    raw = written(chunk)
    data_start = read_header(BytesReader(raw)).size - sum(array.nbytes for array in chunk.arrays.values())
    places = st.one_of(
        st.integers(0, data_start - 1), st.integers(data_start, len(raw) - 1), st.integers(0, 64)
    )
    for _ in range(12):
        at = min(data.draw(places), len(raw) - 1)
        other = data.draw(st.integers(1, 255))
        assert_refused(raw[:at] + bytes([raw[at] ^ other]) + raw[at + 1 :])


def test_no_bit_of_a_whole_object_may_change() -> None:
    """Every bit of one small object, one after the other."""
    group = LayerGroup(
        kind="attention", layers=(0, 1), kv_heads=1, head_dim=2, v_head_dim=2, dtype="bfloat16"
    )
    space = Namespace(
        model="m", weights="w", config="c", adapter="", spec=KVSpec(groups=(group,)), tenant="",
        numerics="n",
    )  # fmt: skip
    arrays = {
        name: np.arange(1, 13).reshape(2, 3, 1, 2).astype(numpy_dtype("bfloat16")) for name in ("k", "v")
    }
    raw = bytearray(written(Chunk(space, 0, 0, as_tokens([1, 2, 3]), arrays)))
    read(bytes(raw))
    for at in range(len(raw)):
        for bit in range(8) if at < 1500 or at > ALIGNMENT - 8 else (0,):
            raw[at] ^= 1 << bit
            assert_refused(bytes(raw))
            raw[at] ^= 1 << bit
    read(bytes(raw))


@EXAMPLES
@given(strategies.chunks(max_tokens=20), st.data())
def test_what_is_cut_grown_or_shifted_is_never_accepted(chunk: Chunk, data: st.DataObject) -> None:
    raw = written(chunk)
    for end in [
        0,
        1,
        7,
        8,
        len(raw) - 1,
        *range(ALIGNMENT, len(raw), ALIGNMENT),
        data.draw(st.integers(0, len(raw) - 1)),
    ]:
        assert_refused(raw[:end])
    more = data.draw(st.binary(min_size=1, max_size=ALIGNMENT))
    assert_refused(raw + more)
    assert_refused(raw + bytes(ALIGNMENT))
    assert_refused(more + raw)
    at = data.draw(st.integers(0, len(raw) - 1))
    assert_refused(raw[:at] + more + raw[at:])
    assert_refused(raw[:at] + raw[at + 1 :])


@EXAMPLES
@given(strategies.chunks(max_tokens=12), strategies.chunks(max_tokens=12))
def test_halves_of_two_objects_are_no_object(one: Chunk, other: Chunk) -> None:
    first, second = written(one), written(other)
    head = len(first) - sum(array.nbytes for array in one.arrays.values())
    mixed = first[:head] + second[len(second) - (len(first) - head) :]
    if mixed not in (first, second):
        assert_refused(mixed)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=3 * ALIGNMENT))
def test_noise_is_no_object(raw: bytes) -> None:
    assert_refused(raw)
    assert_refused(raw.ljust(ALIGNMENT, b"\0"))
    assert_refused(raw.ljust(2 * ALIGNMENT, b" "))


@EXAMPLES
@given(strategies.chunks(max_tokens=8), st.data())
def test_targets_that_do_not_fit_are_refused(chunk: Chunk, data: st.DataObject) -> None:
    reader = BytesReader(written(chunk))
    parsed = read_header(reader)
    name = data.draw(st.sampled_from(["k", "v"]))
    for change in (
        lambda array: array[:, :-1],
        lambda array: np.concatenate([array, array]),
        lambda array: np.zeros(array.shape, np.int16),
        lambda array: array.reshape(-1),
        lambda array: None,
    ):
        targets = empty_arrays(parsed)
        targets[name] = change(targets[name])
        with pytest.raises(InputError):
            read_arrays(reader, parsed, targets)


# -- the safetensors library --------------------------------------------------------------------------


@EXAMPLES
@given(strategies.chunks())
def test_safetensors_opens_every_object(chunk: Chunk) -> None:
    raw = written(chunk)
    group = chunk.namespace.spec.groups[chunk.group]
    with tempfile.NamedTemporaryFile(suffix=".safetensors", dir="/dev/shm") as file:
        Path(file.name).write_bytes(raw)
        with safe_open(file.name, "numpy") as opened:
            assert set(opened.keys()) == {"k", "v"}
            metadata = opened.metadata()
            assert metadata.keys() == {"kvass"}
            said = json.loads(metadata["kvass"])
            assert said["tokens"] == chunk.tokens.tolist()
            assert said["position"] == chunk.position
            assert msgspec.convert(said, Header) == read_header(BytesReader(raw)).header
            for name in ("k", "v"):
                piece = opened.get_slice(name)
                assert tuple(piece.get_shape()) == group.shape(name, chunk.tokens.size)
                if group.dtype in PLAIN:
                    assert piece.get_dtype() == {"float32": "F32", "float16": "F16"}[group.dtype]
                    assert bits(opened.get_tensor(name)) == bits(chunk.arrays[name])
    if group.dtype in PLAIN:
        for name, array in safetensors_load(raw).items():
            assert array.dtype == chunk.arrays[name].dtype
            assert bits(array) == bits(chunk.arrays[name])


@EXAMPLES
@given(strategies.chunks())
def test_torch_reads_the_same_bits(chunk: Chunk) -> None:
    """The dtypes that numpy has no name for."""
    import torch
    from safetensors.torch import load

    found = load(written(chunk))
    assert found.keys() == {"k", "v"}
    for name, tensor in found.items():
        assert tensor.dtype == getattr(torch, chunk.namespace.spec.groups[chunk.group].dtype)
        assert tuple(tensor.shape) == chunk.arrays[name].shape
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == bits(chunk.arrays[name])

"""The conformance suite of codecs: subclass `CodecConformance` and supply `make_codec`."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvass.codecs.base import Chunk, Codec
from kvass.container import Array, CodecStep, Encoded, Header, empty_arrays, read_arrays, read_header
from kvass.errors import CorruptObjectError, InputError
from kvass.keys import FORMAT_VERSION, Namespace
from kvass.provenance import EXACT
from kvass.spec import KVSpec, LayerGroup, numpy_dtype
from kvass.testing import strategies
from kvass.tiers.memory import BytesReader, collect

_EXAMPLES = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.differing_executors])


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


class CodecConformance:
    """What a codec owes the cache. Hypothesis chooses dtypes, shapes, bits and positions.

    Of a codec with tables, which are those of one model, say what that model is: `groups` and `number`.
    """

    group = LayerGroup(kind="attention", layers=(0, 1), kv_heads=2, head_dim=4, v_head_dim=4, dtype="float32")
    """A group that the codec takes."""
    number = 0
    """Its number in the spec."""
    positions = 4096
    """Tokens that a sequence may have."""

    def make_codec(self) -> Codec:
        """The codec under test."""
        raise NotImplementedError("supply make_codec")

    def groups(self) -> st.SearchStrategy[LayerGroup]:
        """Groups that the codec takes: any, where it has no tables."""
        return strategies.layer_groups()

    def _draw(self, data: st.DataObject) -> tuple[Codec, Chunk, dict[str, Array]]:
        made = self.make_codec()
        group = data.draw(self.groups())
        tokens = data.draw(st.integers(1, 40))
        start = data.draw(st.integers(0, self.positions - tokens))
        chunk = Chunk(group, self.number, start, tokens, data.draw(st.sampled_from((0, 1000))))
        if made.lossless:
            return made, chunk, data.draw(strategies.arrays(group, tokens))
        return made, chunk, _finite(chunk, data.draw(st.integers(0, 1000)))

    def test_it_says_what_it_is(self) -> None:
        made = self.make_codec()
        assert made.name
        assert isinstance(made.lossless, bool)
        assert isinstance(made.in_place, bool)
        assert isinstance(made.end_aware, bool)
        assert made.lossless or not made.in_place
        assert not (made.lossless and made.end_aware)
        step = made.step()
        assert step.name == made.name
        assert msgspec.json.decode(msgspec.json.encode(step), type=CodecStep) == step
        assert self.make_codec().step() == step

    @_EXAMPLES
    @given(st.data())
    def test_what_comes_back_has_the_canonical_shape(self, data: st.DataObject) -> None:
        made, chunk, arrays = self._draw(data)
        back = made.decode(made.encode(arrays, chunk), chunk)
        assert back.keys() == {"k", "v"}
        for name, array in back.items():
            assert array.shape == chunk.group.shape(name, chunk.tokens)
            assert array.dtype == arrays[name].dtype
            if made.lossless:
                assert np.array_equal(_bits(array), _bits(arrays[name]))
            else:
                assert np.isfinite(array.astype(np.float32)).all()

    @_EXAMPLES
    @given(st.data())
    def test_an_engines_own_layout_comes_back_from_a_lossless_codec(self, data: st.DataObject) -> None:
        made, chunk, arrays = self._draw(data)
        if not made.lossless:
            return
        flat = [array.reshape(len(array), chunk.tokens, -1) for array in arrays.values()]
        packed = {"kv": np.ascontiguousarray(np.concatenate(flat, axis=2))}
        back = made.decode(made.encode(packed, chunk), chunk)
        assert back.keys() == packed.keys()
        assert back["kv"].dtype == packed["kv"].dtype
        assert back["kv"].shape == chunk.group.shape("kv", chunk.tokens)
        assert np.array_equal(_bits(back["kv"]), _bits(packed["kv"]))

    @_EXAMPLES
    @given(st.data())
    def test_encoding_is_deterministic_and_changes_nothing(self, data: st.DataObject) -> None:
        made, chunk, arrays = self._draw(data)
        before = {name: _bits(array).copy() for name, array in arrays.items()}
        one, other = made.encode(arrays, chunk), self.make_codec().encode(arrays, chunk)
        assert one.keys() == other.keys()
        for name in one:
            assert np.array_equal(_bits(one[name]), _bits(other[name]))
        for name, array in arrays.items():
            assert np.array_equal(_bits(array), before[name])

    @_EXAMPLES
    @given(st.data())
    def test_what_stands_behind_a_chunk_is_for_end_aware_encoders_only(self, data: st.DataObject) -> None:
        made, chunk, arrays = self._draw(data)
        near, far = chunk._replace(behind=0), chunk._replace(behind=1000)
        stored = made.encode(arrays, far)
        if not made.end_aware:
            same = made.encode(arrays, near)
            assert stored.keys() == same.keys()
            for name in stored:
                assert np.array_equal(_bits(stored[name]), _bits(same[name]))
        one, other = made.decode(stored, near), made.decode(stored, far)
        for name in ("k", "v"):
            assert np.array_equal(_bits(one[name]), _bits(other[name]))

    @_EXAMPLES
    @given(st.data())
    def test_views_of_a_larger_pool_are_taken(self, data: st.DataObject) -> None:
        made, chunk, arrays = self._draw(data)
        room = chunk.tokens + 5
        pool = {name: np.zeros(chunk.group.shape(name, room), one.dtype) for name, one in arrays.items()}
        views = {name: array[:, 2 : 2 + chunk.tokens] for name, array in pool.items()}
        for name, view in views.items():
            view[:] = arrays[name]
        one, other = made.encode(views, chunk), made.encode(arrays, chunk)
        for name in one:
            assert np.array_equal(_bits(one[name]), _bits(other[name]))

    @_EXAMPLES
    @given(st.data())
    def test_stored_arrays_survive_the_container(self, data: st.DataObject) -> None:
        made, chunk, arrays = self._draw(data)
        stored = made.encode(arrays, chunk)
        for name, array in stored.items():
            assert array.ndim
            assert all(row.flags.c_contiguous for row in array), f"a row of {name!r} is not C-contiguous"
            if made.in_place:
                wanted = chunk.group.shape(name, chunk.tokens), arrays[name].dtype
                assert (array.shape, array.dtype) == wanted
        reader = BytesReader(collect(Encoded(_header(chunk.group, chunk.tokens, made.step()), stored)))
        parsed = read_header(reader)
        read = empty_arrays(parsed)
        read_arrays(reader, parsed, read)
        one, other = made.decode(read, chunk), made.decode(stored, chunk)
        for name in one:
            assert np.array_equal(_bits(one[name]), _bits(other[name]))

    @pytest.mark.parametrize("values", ["nan", "inf", "-inf"])
    def test_a_lossy_codec_refuses_what_is_not_finite(self, values: str) -> None:
        made, chunk = self.make_codec(), Chunk(self.group, self.number, 0, 8)
        for name in ("k", "v"):
            arrays = _finite(chunk, 1)
            arrays[name][0, 5, 0, 0] = float(values)
            if made.lossless:
                made.encode(arrays, chunk)
            else:
                with pytest.raises(InputError):
                    made.encode(arrays, chunk)

    @pytest.mark.parametrize("harm", ["missing", "fewer tokens", "fewer layers", "other dtype", "flat"])
    def test_arrays_that_do_not_fit_are_corrupt(self, harm: str) -> None:
        changes: dict[str, Callable[[Any], Any]] = {
            "fewer tokens": lambda array: array[:, :-1],
            "fewer layers": lambda array: array[:-1],
            "other dtype": lambda array: array.astype("float16" if array.dtype != "float16" else "float32"),
            "flat": lambda array: array.reshape(len(array), -1)[:, 1:],
        }
        made, chunk = self.make_codec(), Chunk(self.group, self.number, 0, 8)
        stored = made.encode(_finite(chunk, 1), chunk)
        for name, array in stored.items():
            harmed = dict(stored)
            if harm == "missing":
                del harmed[name]
            elif array.ndim < 2 and harm in ("fewer tokens", "flat"):
                continue
            else:
                harmed[name] = changes[harm](array)
            # A stream cut short may go unnoticed here: its digest tells. It must end, with right shapes.
            stream = harm in ("fewer tokens", "flat") and len(array) == 1 and array.dtype == np.uint8
            try:
                back = made.decode(harmed, chunk)
            except CorruptObjectError:
                continue
            assert stream, f"{name!r} with {harm!r} is taken for whole"
            assert {one: held.shape for one, held in back.items()} == {
                one: chunk.group.shape(one, chunk.tokens) for one in ("k", "v")
            }


def _finite(chunk: Chunk, seed: int) -> dict[str, Array]:
    """K and V of all sizes in float16's range, as a model might have them."""
    noise = np.random.default_rng(seed)
    dtype = numpy_dtype(chunk.group.dtype)
    return {
        name: (
            noise.normal(size=chunk.group.shape(name, chunk.tokens)) * np.exp2(noise.integers(-6, 5))
        ).astype(dtype)
        for name in ("k", "v")
    }


def _header(group: LayerGroup, count: int, step: CodecStep) -> Header:
    spec = KVSpec(groups=(group,))
    namespace = Namespace(model="", weights="", config="", adapter="", spec=spec, tenant="", numerics="")
    return Header(
        digest="", format=FORMAT_VERSION, key="0" * 64, group=0, shard=0, parent="",
        content_key="0" * 64, namespace=namespace, position=0, tokens=list(range(count)), codec=[step],
        provenance=EXACT, digests={},
    )  # fmt: skip

"""The conformance suite of codecs: subclass `CodecConformance` and supply `make_codec`."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvass.codecs.base import Codec
from kvass.container import Array, CodecStep, Encoded, Header, empty_arrays, read_arrays, read_header
from kvass.errors import CorruptObjectError
from kvass.keys import FORMAT_VERSION, Namespace
from kvass.provenance import EXACT
from kvass.spec import KVSpec, LayerGroup
from kvass.testing import strategies
from kvass.tiers.memory import BytesReader, collect

_EXAMPLES = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.differing_executors])


@st.composite
def _groups_and_arrays(draw: st.DrawFn) -> tuple[LayerGroup, int, dict[str, Array]]:
    group = draw(strategies.layer_groups())
    count = draw(st.integers(1, 40))
    return group, count, draw(strategies.arrays(group, count))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


class CodecConformance:
    """What a codec owes the cache. Hypothesis chooses dtypes, shapes and bits."""

    def make_codec(self) -> Codec:
        """The codec under test."""
        raise NotImplementedError("supply make_codec")

    def test_it_says_what_it_is(self) -> None:
        made = self.make_codec()
        assert made.name
        assert isinstance(made.lossless, bool)
        assert isinstance(made.in_place, bool)
        step = made.step()
        assert step.name == made.name
        assert msgspec.json.decode(msgspec.json.encode(step), type=CodecStep) == step
        assert self.make_codec().step() == step

    @_EXAMPLES
    @given(_groups_and_arrays())
    def test_what_comes_back_has_the_canonical_shape(
        self, given_: tuple[LayerGroup, int, dict[str, Array]]
    ) -> None:
        group, count, arrays = given_
        made = self.make_codec()
        back = made.decode(made.encode(arrays, group), group, count)
        assert back.keys() == {"k", "v"}
        for name, array in back.items():
            assert array.shape == group.shape(name, count)
            assert array.dtype == arrays[name].dtype
            if made.lossless:
                assert np.array_equal(_bits(array), _bits(arrays[name]))

    @_EXAMPLES
    @given(_groups_and_arrays())
    def test_encoding_is_deterministic_and_changes_nothing(
        self, given_: tuple[LayerGroup, int, dict[str, Array]]
    ) -> None:
        group, _, arrays = given_
        before = {name: _bits(array).copy() for name, array in arrays.items()}
        one, other = self.make_codec().encode(arrays, group), self.make_codec().encode(arrays, group)
        assert one.keys() == other.keys()
        for name in one:
            assert np.array_equal(_bits(one[name]), _bits(other[name]))
        for name, array in arrays.items():
            assert np.array_equal(_bits(array), before[name])

    @_EXAMPLES
    @given(_groups_and_arrays())
    def test_views_of_a_larger_pool_are_taken(self, given_: tuple[LayerGroup, int, dict[str, Array]]) -> None:
        group, count, arrays = given_
        pool = {name: np.zeros(group.shape(name, count + 5), array.dtype) for name, array in arrays.items()}
        views = {name: array[:, 2 : 2 + count] for name, array in pool.items()}
        for name, view in views.items():
            view[:] = arrays[name]
        made = self.make_codec()
        one, other = made.encode(views, group), made.encode(arrays, group)
        for name in one:
            assert np.array_equal(_bits(one[name]), _bits(other[name]))

    @_EXAMPLES
    @given(_groups_and_arrays())
    def test_stored_arrays_survive_the_container(
        self, given_: tuple[LayerGroup, int, dict[str, Array]]
    ) -> None:
        group, count, arrays = given_
        made = self.make_codec()
        stored = made.encode(arrays, group)
        for name, array in stored.items():
            assert len(array) == len(group.layers), f"the first axis of {name!r} must be the layers"
            assert all(layer.flags.c_contiguous for layer in array)
            if made.in_place:
                assert (array.shape, array.dtype) == (group.shape(name, count), arrays[name].dtype)
        reader = BytesReader(collect(Encoded(_header(group, count, made.step()), stored)))
        parsed = read_header(reader)
        read = empty_arrays(parsed)
        read_arrays(reader, parsed, read)
        one, other = made.decode(read, group, count), made.decode(stored, group, count)
        for name in one:
            assert np.array_equal(_bits(one[name]), _bits(other[name]))

    @pytest.mark.parametrize("harm", ["missing", "fewer tokens", "fewer layers", "other dtype", "flat"])
    def test_arrays_that_do_not_fit_are_corrupt(self, harm: str) -> None:
        group = LayerGroup(
            kind="attention", layers=(0, 1), kv_heads=2, head_dim=4, v_head_dim=4, dtype="float32"
        )
        changes: dict[str, Callable[[Any], Any]] = {
            "fewer tokens": lambda array: array[:, :-1],
            "fewer layers": lambda array: array[:-1],
            "other dtype": lambda array: array.astype("float16" if array.dtype != "float16" else "float32"),
            "flat": lambda array: array.reshape(len(array), -1)[:, 1:],
        }
        arrays = {name: np.ones(group.shape(name, 8), np.float32) for name in ("k", "v")}
        made = self.make_codec()
        stored = made.encode(arrays, group)
        for name in stored:
            harmed = dict(stored)
            if harm == "missing":
                del harmed[name]
            else:
                harmed[name] = changes[harm](harmed[name])
            with pytest.raises(CorruptObjectError):
                made.decode(harmed, group, 8)


def _header(group: LayerGroup, count: int, step: CodecStep) -> Header:
    spec = KVSpec(groups=(group,))
    namespace = Namespace(model="", weights="", config="", adapter="", spec=spec, tenant="", numerics="")
    return Header(
        digest="", format=FORMAT_VERSION, key="0" * 64, group=0, shard=0, parent="",
        content_key="0" * 64, namespace=namespace, position=0, tokens=list(range(count)), codec=[step],
        provenance=EXACT, digests={},
    )  # fmt: skip

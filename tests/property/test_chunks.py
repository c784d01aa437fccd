"""Token ids: what is an id is taken as it is, everything else is refused by name."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvass.chunks import MAX_TOKEN_ID, Tokens, as_tokens, common_prefix
from kvass.errors import InputError
from kvass.testing import strategies

EXAMPLES = settings(deadline=None, max_examples=150)

ids = st.lists(strategies.token_ids(), max_size=40)
integer_dtypes = st.sampled_from(["i1", "u1", "i2", "u2", "<i4", ">i4", "u4", "<i8", ">i8", "u8"])


@EXAMPLES
@given(ids)
def test_ids_are_taken_as_they_are(given_: list[int]) -> None:
    for source in (given_, tuple(given_), np.array(given_, "i8"), np.array(given_, "u4")):
        tokens = as_tokens(source)
        assert tokens.dtype == np.dtype("<i4")
        assert tokens.flags.c_contiguous and tokens.ndim == 1
        assert tokens.tolist() == given_
        assert tokens.tobytes() == b"".join(one.to_bytes(4, "little") for one in given_)


@EXAMPLES
@given(st.lists(st.integers(0, 127), max_size=20), integer_dtypes)
def test_every_kind_of_integer_gives_the_same_bytes(given_: list[int], dtype: str) -> None:
    assert as_tokens(np.array(given_, dtype)).tobytes() == as_tokens(given_).tobytes()


@EXAMPLES
@given(st.lists(strategies.token_ids(), min_size=1, max_size=20))
def test_the_array_is_its_own(given_: list[int]) -> None:
    source = np.array(given_, "<i4")
    tokens = as_tokens(source)
    source[:] = 7
    assert tokens.tolist() == given_
    assert as_tokens(np.repeat(np.array(given_, "i8"), 2)[::2]).tolist() == given_
    assert as_tokens(np.array(given_, "<i4")[::-1]).tolist() == given_[::-1]


no_ids = st.one_of(
    st.integers(max_value=-1),
    st.integers(min_value=MAX_TOKEN_ID + 1),
    st.floats(),
    st.none(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.lists(st.integers(0, 3), max_size=2),
    st.just(object()),
)


@settings(deadline=None, max_examples=300)
@given(ids, no_ids, st.data())
@example([1 << 23], 1 << 63, None)
@example([], -(1 << 63), None)
@example([], 1 << 64, None)
@example([1], float("nan"), None)
@example([1], 2.0, None)
@example([1], np.float32(2), None)
@example([1], np.datetime64(1, "s"), None)
@example([1], np.timedelta64(1, "s"), None)
def test_what_is_no_id_is_refused(given_: list[int], wrong: Any, data: st.DataObject | None) -> None:
    at = data.draw(st.integers(0, len(given_))) if data else len(given_)
    with pytest.raises(InputError, match="token ids must"):
        as_tokens([*given_[:at], wrong, *given_[at:]])


@pytest.mark.parametrize(
    "wrong",
    [
        None, 3, "12", b"12", {1}, {1: 2}, iter([1]), object(), [[1]], [[]], [[1], [2, 3]], [[1], 2],
        np.zeros((2, 2), int), np.array(3), [True], np.ones(2, bool), np.ones(2), np.ones(2, complex),
        np.array(["1"]), np.array([None]), np.zeros(1, "i4,i4"), np.array([1], "M8[s]"),
        np.array([1], "m8[s]"),
        np.array([2**63], "u8"), np.array([-1], "i1"), np.array([MAX_TOKEN_ID + 1]),
    ],
)  # fmt: skip
def test_what_is_no_flat_sequence_of_ids_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="token ids must"):
        as_tokens(wrong)


def test_no_tokens_are_fine() -> None:
    for empty in ([], (), np.array([]), np.array([], "u8"), range(0)):
        assert as_tokens(empty).size == 0


@EXAMPLES
@given(strategies.related_tokens(count=2, max_size=400))
def test_common_prefix_is_what_counting_gives(texts: list[Tokens]) -> None:
    for one in texts:
        for other in (*texts, as_tokens([])):
            count = 0
            for a, b in zip(one.tolist(), other.tolist(), strict=False):
                if a != b:
                    break
                count += 1
            assert common_prefix(one, other) == count == common_prefix(other, one)


@EXAMPLES
@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=30))
def test_common_prefix_of_short_alphabets(one: list[int], other: list[int]) -> None:
    count = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    assert common_prefix(as_tokens(one), as_tokens(other)) == count

"""Keys: what is shared by two chains is what they have in common, and nothing else ever is."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvass.chunks import Tokens, as_tokens, common_prefix
from kvass.errors import InputError
from kvass.keys import (
    KEY_BYTES,
    Namespace,
    address,
    address_text,
    chain,
    content_key,
    next_key,
    parse_address,
    split_address,
    tenant_digest,
)
from kvass.spec import KVSpec, LayerGroup
from kvass.testing import strategies

EXAMPLES = settings(deadline=None, max_examples=80)
FIELDS = ("weights", "config", "adapter", "tenant", "numerics", "layout")

ROOT = "3ba2670f64cdd8edd4e40d0f5939c23fb30f1bf3746ff4a1e5216748a59567f3"
KEY = "2925e15fb7479959f5edd0c2192043fce186c261cfa816d863383d677f29d761"
CONTENT = "ab19ba73a6a2f86d4a79cde9b60c240b2ffcffd97ccebb11f98c08a2dc1dd3d1"

roots = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
short_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


def plain() -> KVSpec:
    group = LayerGroup(kind="attention", layers=(0,), kv_heads=1, head_dim=2, v_head_dim=2, dtype="float32")
    return KVSpec(groups=(group,))


def namespace(**fields: str) -> Namespace:
    return Namespace(
        **{"model": "", "spec": plain(), **dict.fromkeys(FIELDS, ""), **fields}  # type: ignore[arg-type]
    )


# -- chains -------------------------------------------------------------------------------------------


@EXAMPLES
@given(roots, strategies.related_tokens(count=2, max_size=80), st.integers(1, 20))
def test_keys_agree_exactly_as_far_as_whole_chunks_do(root: bytes, texts: list[Tokens], size: int) -> None:
    one, other = texts[0], texts[-1]
    keys, others = chain(root, one, size), chain(root, other, size)
    assert len(keys) == one.size // size
    shared = common_prefix(one, other) // size
    assert keys[:shared] == others[:shared]
    assert not set(keys[shared:]) & set(others)
    assert len(set(keys)) == len(keys)


@EXAMPLES
@given(roots, strategies.tokens(1, 100), st.integers(1, 20))
def test_a_chain_is_its_steps(root: bytes, tokens: Tokens, size: int) -> None:
    key = root
    for number, found in enumerate(chain(root, tokens, size)):
        part = tokens[number * size : (number + 1) * size]
        key = next_key(key, part.tobytes(), part.size)
        assert found == key


@EXAMPLES
@given(roots, roots, strategies.tokens(4, 60))
def test_chains_under_two_roots_share_nothing(root: bytes, other: bytes, tokens: Tokens) -> None:
    assume(root != other)
    assert not set(chain(root, tokens, 4)) & set(chain(other, tokens, 4))
    assert content_key(root, tokens.tobytes()) != content_key(other, tokens.tobytes())


@EXAMPLES
@given(roots, strategies.tokens(2, 60), st.data())
def test_no_two_cuts_of_a_text_meet(root: bytes, tokens: Tokens, data: st.DataObject) -> None:
    """Behind a common beginning, each cut has keys of its own, wherever it ends."""
    seen: dict[bytes, tuple[int, ...]] = {root: ()}
    for _ in range(data.draw(st.integers(2, 5))):
        key, at, cuts = root, 0, ()
        while at < tokens.size:
            step = data.draw(st.integers(1, tokens.size - at))
            key = next_key(key, tokens[at : at + step].tobytes(), step)
            at, cuts = at + step, (*cuts, step)
            assert seen.setdefault(key, cuts) == cuts


@EXAMPLES
@given(roots, strategies.tokens(1, 20), strategies.tokens(1, 20))
def test_a_chunk_is_no_other_chunk_by_its_bytes(root: bytes, one: Tokens, other: Tokens) -> None:
    assume(one.size != other.size or bool((one != other).any()))
    assert next_key(root, one.tobytes(), one.size) != next_key(root, other.tobytes(), other.size)
    assert next_key(root, one.tobytes(), one.size) != content_key(root, one.tobytes())


# -- roots --------------------------------------------------------------------------------------------


@EXAMPLES
@given(st.lists(strategies.namespaces(), min_size=2, max_size=6))
def test_two_namespaces_that_differ_never_share_a_root(spaces: list[Namespace]) -> None:
    seen: dict[bytes, Namespace] = {}
    for space in spaces:
        bare = msgspec.structs.replace(space, model="")
        assert seen.setdefault(space.root(), bare) == bare


@EXAMPLES
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), st.data())
def test_moving_characters_between_fields_changes_the_root(text: str, data: st.DataObject) -> None:
    """The same characters, cut into the fields at other places."""

    def cut() -> tuple[str, ...]:
        places = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=5, max_size=5)))
        edges = [0, *places, len(text)]
        return tuple(text[a:b] for a, b in pairwise(edges))

    one, other = cut(), cut()
    assume(one != other)
    assert namespace(**dict(zip(FIELDS, one, strict=True))).root() != (
        namespace(**dict(zip(FIELDS, other, strict=True))).root()
    )


@EXAMPLES
@given(st.permutations(FIELDS), short_text.filter(bool))
def test_a_value_in_another_field_is_another_root(fields: list[str], value: str) -> None:
    assert namespace(**{fields[0]: value}).root() != namespace(**{fields[1]: value}).root()


@EXAMPLES
@given(strategies.namespaces(), short_text)
def test_only_the_models_name_is_no_part_of_the_root(space: Namespace, text: str) -> None:
    replace = msgspec.structs.replace
    assert replace(space, model=text).root() == space.root()
    for field in FIELDS:
        assume(text != getattr(space, field))
        assert replace(space, **{field: text}).root() != space.root()
    assert replace(space, format=space.format + 1).root() != space.root()


def _changes(group: LayerGroup) -> list[dict[str, Any]]:
    return [
        {"kind": "sliding" if group.kind == "attention" else "attention"},
        {"layers": (*group.layers, 99)},
        {"layers": tuple(layer + 1 for layer in group.layers)},
        {"kv_heads": group.kv_heads + 1},
        {"head_dim": group.head_dim + 1},
        {"v_head_dim": group.v_head_dim + 1},
        {"head_dim": group.v_head_dim, "v_head_dim": group.head_dim},
        {"dtype": "float16" if group.dtype != "float16" else "bfloat16"},
        {"window": (group.window or 0) + 1},
        {"rope": None if group.rope else strategies._rope(2.0)},
    ]


@EXAMPLES
@given(strategies.namespaces(), st.data())
def test_every_part_of_the_spec_is_part_of_the_root(space: Namespace, data: st.DataObject) -> None:
    groups = space.spec.groups
    number = data.draw(st.integers(0, len(groups) - 1))
    for change in _changes(groups[number]):
        made = msgspec.structs.replace(groups[number], **change)
        if made == groups[number]:
            continue
        spec = KVSpec(groups=(*groups[:number], made, *groups[number + 1 :]))
        assert msgspec.structs.replace(space, spec=spec).root() != space.root()
    if len(groups) > 1 and groups[0] != groups[-1]:
        turned = KVSpec(groups=groups[::-1])
        assert msgspec.structs.replace(space, spec=turned).root() != space.root()


def test_roots_are_the_same_on_every_machine() -> None:
    """A root that changes loses every stored object. Should this fail, the format version is to be raised."""
    space = namespace(weights="w", config="c", adapter="a", tenant="t", numerics="n", layout="canonical")
    assert space.root().hex() == ROOT
    assert chain(space.root(), as_tokens([1, 2, 3, 4]), 2)[-1].hex() == KEY
    assert content_key(space.root(), as_tokens([1, 2]).tobytes()).hex() == CONTENT


@EXAMPLES
@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=2, max_size=6))
def test_salts_have_digests_of_their_own_that_do_not_show_them(salts: set[str]) -> None:
    digests = {tenant_digest(salt) for salt in salts}
    assert len(digests) == len(salts)
    assert all(len(digest) in (0, 64) for digest in digests)
    assert (tenant_digest("") == "") and tenant_digest("x") != tenant_digest("X")


# -- addresses ----------------------------------------------------------------------------------------

parts = st.tuples(roots, st.integers(0, 0xFF), st.integers(0, 0xFFFF))


@EXAMPLES
@given(parts)
def test_an_address_is_read_back(part: tuple[bytes, int, int]) -> None:
    raw = address(*part)
    assert split_address(raw) == part
    assert parse_address(address_text(raw)) == raw


@EXAMPLES
@given(parts, parts)
def test_addresses_differ_when_a_part_does(
    one: tuple[bytes, int, int], other: tuple[bytes, int, int]
) -> None:
    assert (address(*one) == address(*other)) == (one == other)
    assert (address_text(address(*one)) == address_text(address(*other))) == (one == other)


@EXAMPLES
@given(parts, st.data())
def test_no_second_text_means_the_same_address(part: tuple[bytes, int, int], data: st.DataObject) -> None:
    text = address_text(address(*part))
    at = data.draw(st.integers(0, len(text)))
    changed = data.draw(
        st.one_of(
            st.characters().map(lambda mark: text[:at] + mark + text[at:]),
            st.characters().map(lambda mark: text[:at] + mark + text[at + 1 :]),
            st.just(text[:at] + text[at + 1 :]),
            st.sampled_from([text.upper(), f" {text}", f"{text}\n", text.replace("-", "-0"), f"+{text}"]),
            st.sampled_from([text.replace("-", "-+"), text.replace("-", "--"), text.replace("-", "- ")]),
        )
    )
    assume(changed != text)
    try:
        raw = parse_address(changed)
    except InputError:
        return
    assert address_text(raw) == changed
    assert raw != address(*part)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=80))
@example("-".join(["0" * 64, "256", "0"]))
@example("-".join(["0" * 64, "0", "65536"]))
@example("-".join(["0" * 64, "-1", "0"]))
@example("-".join(["0" * 64, "٣", "0"]))
@example("-".join(["0" * 64, "1_0", "0"]))
@example("-".join([" " * 2 + "0" * 62, "0", "0"]))
@example("-".join(["0" * 64, "9" * 5000, "0"]))
@example("../../etc/passwd")
def test_any_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match="no object address"):
        parse_address(text)

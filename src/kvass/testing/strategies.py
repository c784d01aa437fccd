"""Hypothesis strategies: tokens, specs, namespaces and chunks, with the edges where keys and rows break."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from kvass.chunks import MAX_TOKEN_ID, Tokens, as_tokens
from kvass.container import Array
from kvass.keys import Namespace
from kvass.spec import KVSpec, LayerGroup, RopeSpec, numpy_dtype

_EDGES = (0, 1, 254, 255, 256, 65_534, 65_535, 65_536, MAX_TOKEN_ID - 1, MAX_TOKEN_ID)
"""Ids at which one of the three bytes that hold them is all zeros or all ones."""

_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Chunk(NamedTuple):
    """A chunk of one group: its text and its arrays `k`, `v` `[layers, tokens, kv_heads, dim]`."""

    namespace: Namespace
    group: int
    position: int
    tokens: Tokens
    arrays: dict[str, Array]


def token_ids() -> st.SearchStrategy[int]:
    """Any token id, often one at an edge."""
    return st.one_of(st.sampled_from(_EDGES), st.integers(0, MAX_TOKEN_ID))


def tokens(min_size: int = 0, max_size: int = 600) -> st.SearchStrategy[Tokens]:
    """Sequences of token ids; short alphabets too, so that sequences have beginnings in common."""
    short = st.lists(st.integers(0, 1), min_size=min_size, max_size=max_size)
    edges = st.lists(token_ids(), min_size=min_size, max_size=max_size)
    return st.one_of(short, edges).map(as_tokens)


@st.composite
def related_tokens(draw: st.DrawFn, count: int = 8, max_size: int = 600) -> list[Tokens]:
    """Several sequences of one token or more that were cut from a few texts: beginnings of each other,
    equal up to some token, and of lengths at the index's row boundaries."""
    texts = [
        draw(st.lists(token_ids(), min_size=4, max_size=8)) * (max_size // 4)
        for _ in range(draw(st.integers(1, 2)))
    ]
    lengths = st.one_of(
        st.integers(1, max_size), st.sampled_from([1, 147, 148, 149, 295, 296, 297, 444, 592])
    )
    found = []
    for _ in range(draw(st.integers(1, count))):
        text = list(draw(st.sampled_from(texts))[: min(draw(lengths), max_size)])
        if draw(st.booleans()):
            text[draw(st.integers(0, len(text) - 1))] = draw(token_ids())
        found.append(as_tokens(text))
    return found


@st.composite
def layer_groups(draw: st.DrawFn, first_layer: int = 0) -> LayerGroup:
    """Small groups of every kind."""
    window = draw(st.one_of(st.none(), st.integers(1, 40)))
    rope = draw(st.one_of(st.none(), st.floats(1.0, 1e6).map(_rope)))
    return LayerGroup(
        kind="attention" if window is None else "sliding",
        layers=tuple(range(first_layer, first_layer + draw(st.integers(1, 3)))),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 8)),
        v_head_dim=draw(st.integers(1, 8)),
        dtype=draw(st.sampled_from(_DTYPES)),
        window=window,
        rope=rope,
    )


def _rope(theta: float) -> RopeSpec:
    return RopeSpec(kind="default", theta=theta, rotary_dim=4, parameters={"factor": theta / 2, "mode": "x"})


@st.composite
def specs(draw: st.DrawFn, max_groups: int = 3) -> KVSpec:
    """Small specs."""
    groups: list[LayerGroup] = []
    for _ in range(draw(st.integers(1, max_groups))):
        groups.append(draw(layer_groups(sum(len(group.layers) for group in groups))))
    return KVSpec(groups=tuple(groups))


@st.composite
def namespaces(draw: st.DrawFn, spec: KVSpec | None = None) -> Namespace:
    """Namespaces whose fields are short, often empty, and so often equal when put next to each other."""
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    return Namespace(
        model=draw(text),
        weights=draw(text),
        config=draw(text),
        adapter=draw(text),
        spec=spec if spec is not None else draw(specs()),
        tenant=draw(text),
        numerics=draw(text),
        layout=draw(text),
    )


def arrays(group: LayerGroup, count: int) -> st.SearchStrategy[dict[str, Array]]:
    """Arrays of `count` tokens with any bits at all: NaN of every kind, infinities, both zeros."""
    return st.integers(0, 2**32 - 1).map(lambda seed: _random_bits(group, count, seed))


def _random_bits(group: LayerGroup, count: int, seed: int) -> dict[str, Array]:
    random, dtype = np.random.default_rng(seed), numpy_dtype(group.dtype)
    found = {}
    for name in ("k", "v"):
        shape = group.shape(name, count)
        raw = random.bytes(int(np.prod(shape)) * dtype.itemsize)
        found[name] = np.frombuffer(raw, dtype).reshape(shape)
    return found


@st.composite
def chunks(draw: st.DrawFn, max_tokens: int = 64) -> Chunk:
    """A chunk of some group of some model, as the container stores it."""
    namespace = draw(namespaces())
    group = draw(st.integers(0, len(namespace.spec.groups) - 1))
    text = draw(tokens(1, max_tokens))
    position = draw(st.sampled_from([0, text.size, 1 << 20]))
    found = draw(arrays(namespace.spec.groups[group], text.size))
    return Chunk(namespace, group, position, text, found)

"""A tiny model whose KV is a function of the tokens, so that every stored object can be checked.

The KV of a token depends on all tokens before it, as a real model's does: an object that stands behind
other tokens than its key says has other bytes.
"""

import numpy as np

from kvass.cache import KVCache, Pool
from kvass.chunks import Tokens, as_tokens
from kvass.container import Array
from kvass.keys import Namespace
from kvass.spec import KVSpec, LayerGroup, RopeSpec, numpy_dtype

CHUNK = 16
_MIX = np.uint64(0x9E3779B97F4A7C15)


def spec(heads: int = 2) -> KVSpec:
    """Two groups, one of them sliding. 128 bytes a token and head in the first."""
    return KVSpec(
        groups=(
            LayerGroup(
                kind="attention", layers=(0, 2), kv_heads=heads, head_dim=8, v_head_dim=8, dtype="float32",
                rope=RopeSpec(kind="default", theta=10000.0, rotary_dim=8),
            ),
            LayerGroup(
                kind="sliding", layers=(1,), kv_heads=1, head_dim=8, v_head_dim=4, dtype="bfloat16",
                window=24,
            ),
        )
    )  # fmt: skip


def namespace(heads: int = 2, tenant: str = "") -> Namespace:
    """The namespace of that model."""
    return Namespace(
        model="tiny", weights="w" * 64, config="c" * 64, adapter="", spec=spec(heads), tenant=tenant,
        numerics="tests/none/float32/cpu",
    )  # fmt: skip


def text(family: int, branch: int = 0, length: int = 100, fork: int = 37) -> Tokens:
    """A text of `length` tokens. Those of one family agree up to token `fork`."""
    stem = np.random.default_rng([7, family]).integers(0, 50_000, 4096)
    own = np.random.default_rng([8, family, branch]).integers(0, 50_000, 4096)
    return as_tokens(np.concatenate([stem[:fork], own])[:length])


def values(group: LayerGroup, name: str, tokens: Tokens, start: int, stop: int) -> Array:
    """K or V of tokens `start` to `stop` of a sequence that begins with `tokens`."""
    place = np.arange(1, stop + 1, dtype=np.uint64) * _MIX | np.uint64(1)
    before = np.cumsum((tokens[:stop].astype(np.uint64) + np.uint64(1)) * place)[start:]
    shape = group.shape(name, stop - start)
    layers, _, heads, dim = shape
    lane = np.arange(1, layers * heads * dim + 1, dtype=np.uint64).reshape(layers, 1, heads, dim)
    salt = np.uint64(sum(group.layers) * 2 + (name == "v") + 1)
    mixed = (before[None, :, None, None] ^ (lane * salt * _MIX)) * _MIX
    dtype = numpy_dtype(group.dtype)
    bits = (mixed >> np.uint64(40)).astype(np.uint32 if dtype.itemsize == 4 else np.uint16)
    return np.ascontiguousarray(bits).view(dtype)


class Source:
    """A view of a sequence's KV, to be stored."""

    def __init__(self, tokens: Tokens, model: KVSpec):
        self._tokens = tokens
        self._spec = model

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        """As `KVView.arrays`."""
        held = self._spec.groups[group]
        return {name: values(held, name, self._tokens, start, stop) for name in ("k", "v")}


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are equal byte for byte."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()
    )


def store(cache: KVCache, tokens: Tokens, space: Namespace) -> int:
    """Store a sequence; how many objects went in."""
    return cache.store(tokens, space, Source(tokens, space.spec)).wait(30).objects


def load(cache: KVCache, tokens: Tokens, space: Namespace) -> int:
    """Look up and load a sequence; how many tokens are in place, all of them right byte for byte.

    Raises AssertionError for a wrong one.
    """
    match = cache.lookup(tokens, space)
    if not match:
        return 0
    pool = Pool(space.spec, match.length)
    pool.fill(0xA5)
    loaded = cache.load(match, pool).tokens
    for number, group in enumerate(space.spec.groups):
        first = group.first_needed(loaded)
        for name, array in pool.arrays(number, first, loaded).items():
            assert same_bits(array, values(group, name, tokens, first, loaded)), (
                f"{name} of group {number} is wrong in {loaded} tokens"
            )
    return loaded


def borrow(cache: KVCache, tokens: Tokens, space: Namespace) -> int:
    """Find a sequence's passages and load them; how many tokens, all of them right byte for byte.

    Raises AssertionError for a wrong one.
    """
    found, total = cache.passages(tokens, space), 0
    group = space.spec.groups[0]  # no window: it has all
    for passage, match in zip(found, cache.donors(found, space), strict=True):
        if match is None:
            continue
        place, end = passage.place, passage.end
        assert np.array_equal(match.tokens[place:end], tokens[passage.start : passage.stop])
        start = place // match.chunk_tokens * match.chunk_tokens
        pool = Pool(space.spec, end - start, start)
        pool.fill(0xA5)
        loaded = cache.load(match, pool, start=start).tokens
        for name, array in pool.arrays(0, start, loaded).items():
            assert same_bits(array, values(group, name, match.tokens, start, loaded)), f"{name} is wrong"
        total += max(0, loaded - place)
    return total

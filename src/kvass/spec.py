"""What one model's KV cache looks like: layer groups, heads, dims, dtype, RoPE, window."""

from typing import Annotated, Literal

import ml_dtypes
import msgspec
import numpy as np
from blake3 import blake3

from kvass.errors import UnsupportedModelError

DTypeName = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
GroupKind = Literal["attention", "sliding"]

_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a KV dtype name. Raises UnsupportedModelError for a name we do not store."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise UnsupportedModelError(
            f"KV dtype {name!r} is not supported; one of {', '.join(_DTYPES)} is"
        ) from None


Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
"""Checked where a header is read: nonsense must not become the shape of an array."""


class RopeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rotary embedding of one group, enough to un-rotate its keys. `kind` as transformers names it."""

    kind: str
    theta: float
    rotary_dim: int
    parameters: dict[str, float | int | bool | str | list[float]] = {}


class LayerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers whose KV has one shape and one lifetime.

    Arrays of a chunk: `k` `[layers, tokens, kv_heads, head_dim]` after RoPE and `v`
    `[layers, tokens, kv_heads, v_head_dim]`; in an engine's own layout the same bytes in some order of
    its own, as one array `kv` `[layers, tokens, kv_heads * (head_dim + v_head_dim)]`.
    `window`: a token sees itself and `window - 1` before it.
    """

    kind: GroupKind
    layers: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    kv_heads: Count
    head_dim: Count
    v_head_dim: Count
    dtype: str
    window: Count | None = None
    rope: RopeSpec | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes in this group."""
        per_head = self.head_dim + self.v_head_dim
        return len(self.layers) * self.kv_heads * per_head * numpy_dtype(self.dtype).itemsize

    def shape(self, name: str, tokens: int) -> tuple[int, ...]:
        """Shape of array `name` for `tokens` tokens: 'k' or 'v'; or 'kv', as an engine packs both."""
        if name == "kv":
            return (len(self.layers), tokens, self.kv_heads * (self.head_dim + self.v_head_dim))
        return (len(self.layers), tokens, self.kv_heads, self.head_dim if name == "k" else self.v_head_dim)

    def first_needed(self, hit: int) -> int:
        """The first token whose KV a hit of `hit` tokens still needs in this group."""
        return 0 if self.window is None else max(0, hit - self.window + 1)


class KVSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layer groups of one model. Group 0 is the primary: its objects carry the prefix tree."""

    groups: tuple[LayerGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token takes over all groups."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Where each of the model's layers stands, in their order: its group, and its place in that."""
        found = {
            layer: (number, at)
            for number, group in enumerate(self.groups)
            for at, layer in enumerate(group.layers)
        }
        return dict(sorted(found.items()))

    def digest(self) -> str:
        """BLAKE3 of the spec's canonical JSON, in hex."""
        return blake3(msgspec.json.encode(self, order="sorted")).hexdigest()

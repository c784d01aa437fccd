"""The contract of a codec; `kvass.testing.codecs` is its conformance suite."""

from collections.abc import Mapping
from typing import Protocol

from kvass.container import Array, CodecStep
from kvass.spec import LayerGroup


class Codec(Protocol):
    """Turns the canonical arrays of a chunk into stored arrays and back.

    `in_place`: stored arrays have the canonical names, shapes and dtypes, so that they can be read
    straight into the engine's memory. `lossless`: decoding gives the same bits.
    """

    name: str
    lossless: bool
    in_place: bool

    def step(self) -> CodecStep:
        """What the header records, enough to decode."""

    def encode(self, arrays: Mapping[str, Array], spec: LayerGroup) -> dict[str, Array]:
        """Canonical arrays `k`, `v` `[layers, tokens, heads, dim]` to stored arrays `[layers, ...]`."""

    def decode(self, stored: Mapping[str, Array], spec: LayerGroup, tokens: int) -> dict[str, Array]:
        """Stored arrays back to canonical ones. Raises CorruptObjectError when they do not fit the spec."""

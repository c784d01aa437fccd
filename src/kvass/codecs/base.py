"""The contract of a codec; `kvass.testing.codecs` is its conformance suite."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from kvass.container import Array, CodecStep
from kvass.spec import LayerGroup


class Chunk(NamedTuple):
    """What a chunk's arrays belong to: the layer group and its number in the spec, the position of the first
    token in its sequence, and how many tokens there are.

    `behind`: how many tokens of its sequence came after it when it was coded (see `tokens_behind`); 0, the
    careful default: it is the end. For encoders that are `end_aware`; decoding never depends on it.
    """

    group: LayerGroup
    number: int
    start: int
    tokens: int
    behind: int = 0


def tokens_behind(group: LayerGroup, end: int, stop: int) -> int:
    """`Chunk.behind` of a chunk up to `stop` of a sequence of `end` tokens.

    In a group with a window each chunk is an end: what the window no longer sees of this sequence is what it
    sees of a shorter prefix.
    """
    return max(0, end - stop) if group.window is None else 0


class Codec(Protocol):
    """Turns the canonical arrays of a chunk into stored arrays and back.

    `in_place`: stored arrays have the canonical names, shapes and dtypes, so that they can be read
    straight into the engine's memory. `lossless`: decoding gives the same bits. `end_aware`: encode spends
    less on chunks with more tokens behind them; such state is certified only up to the end it was coded for.
    """

    name: str
    lossless: bool
    in_place: bool
    end_aware: bool

    def step(self) -> CodecStep:
        """What the header records, enough to decode; of a lossy codec with `{"tables": digest}`."""

    def encode(self, arrays: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """Canonical arrays to stored ones.

        Canonical: `k` (after RoPE) and `v` `[layers, tokens, kv_heads, dim]` in the group's dtype; in an
        engine's own layout one array `kv` `[layers, tokens, width]`, which lossless codecs take as well.
        Stored: arrays whose first axis has rows that are C-contiguous, each with a digest of its own:
        `[layers, ...]`, or `[1, bytes]` uint8 where a stream goes over all layers. Raises InputError for
        values that the codec cannot keep (not finite, a position behind its tables): nothing is stored.
        """

    def decode(self, stored: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """Stored arrays, which may be hostile, back to canonical ones.

        Takes time and memory in proportion to the chunk, whatever they say. Raises CorruptObjectError where
        they do not fit it.
        """

"""Looking at what is stored: why a prompt hit as far as it did, and single objects as arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvass.codecs.registry import codec_of
from kvass.container import MAX_HEADER_BYTES, Array, Header, Parsed, empty_arrays, read_arrays, read_header
from kvass.errors import CorruptObjectError, UnsupportedModelError
from kvass.keys import address, address_text
from kvass.tiers.base import Entry, Tier


class Difference(NamedTuple):
    """Where a prompt and the nearest stored text part: ids of both from there on."""

    position: int
    prompt: list[int]
    stored: list[int]


class Explanation(NamedTuple):
    """Why a prompt hit as far as it did."""

    tokens: int
    hit: int
    reason: str
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One stored object as a researcher sees it: header, and arrays verified when they are read."""

    tier: str
    entry: Entry
    _open: Callable[[], tuple[Parsed, dict[str, Array]]]

    @property
    def address(self) -> str:
        """The object's address, for `show` and `rm`."""
        return address_text(self.entry.address)

    def header(self) -> Header:
        """What the object says of itself. Raises CorruptObjectError."""
        return self._open()[0].header

    def arrays(self) -> dict[str, Array]:
        """`k`, `v` `[layers, tokens, kv_heads, dim]`. Raises CorruptObjectError."""
        return self._open()[1]


def opener(tier: Tier, entry: Entry) -> Callable[[], tuple[Parsed, dict[str, Array]]]:
    """A function that reads and verifies an object. It raises KeyError, CorruptObjectError, TierError."""

    def opened() -> tuple[Parsed, dict[str, Array]]:
        with tier.open(entry.address) as reader:
            if reader.size > entry.size + MAX_HEADER_BYTES:  # before anything is allocated for it
                raise CorruptObjectError("object is larger than what was stored")
            parsed = read_header(reader)
            header = parsed.header
            if address(bytes.fromhex(header.key), header.group, header.shard) != entry.address:
                raise CorruptObjectError("object is not the one that its address says")
            stored = empty_arrays(parsed)
            read_arrays(reader, parsed, stored)
        coder = codec_of(header.codec)
        group = header.namespace.spec.groups[header.group]
        try:
            return parsed, coder.decode(stored, group, len(header.tokens))
        except UnsupportedModelError as error:
            raise CorruptObjectError(f"object cannot be decoded: {error}") from error

    return opened

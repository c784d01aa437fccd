"""Looking at what is stored: why a prompt hit as far as it did, and single objects as arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvass.codecs.registry import codec
from kvass.container import Array, Header, Parsed, empty_arrays, read_arrays, read_header
from kvass.errors import ConfigError, CorruptObjectError, UnsupportedModelError
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


def opener(tier: Tier, one: bytes) -> Callable[[], tuple[Parsed, dict[str, Array]]]:
    """A function that reads and verifies an object. It raises KeyError, CorruptObjectError, TierError."""

    def opened() -> tuple[Parsed, dict[str, Array]]:
        with tier.open(one) as reader:
            parsed = read_header(reader)
            header = parsed.header
            if address(bytes.fromhex(header.key), header.group, header.shard) != one:
                raise CorruptObjectError("object is not the one that its address says")
            stored = empty_arrays(parsed)
            read_arrays(reader, parsed, stored)
        if len(header.codec) != 1:
            raise CorruptObjectError("object has a codec chain that this version cannot read")
        group = header.namespace.spec.groups[header.group]
        try:
            return parsed, codec(header.codec[0].name).decode(stored, group, len(header.tokens))
        except (ConfigError, UnsupportedModelError) as error:
            raise CorruptObjectError(f"object cannot be decoded: {error}") from error

    return opened

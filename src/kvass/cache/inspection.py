"""Looking at what is stored: why a prompt hit as far as it did, and single objects as arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvass.cache.coding import Decoder
from kvass.cache.finding import Failed, nearest
from kvass.cache.match import Match, Piece
from kvass.cache.moving import FAILURES, stored_tokens
from kvass.cache.recoding import decoded
from kvass.chunks import Tokens
from kvass.codecs.base import Chunk
from kvass.container import MAX_HEADER_BYTES, Array, Header, Parsed, empty_arrays, read_arrays, read_header
from kvass.errors import CorruptObjectError, UnsupportedModelError
from kvass.keys import address, address_text
from kvass.quality import Verdict
from kvass.tiers.base import Entry, Tier


class Difference(NamedTuple):
    """Where a prompt and the nearest stored text part: ids of both from there on."""

    position: int
    prompt: list[int]
    stored: list[int]


class Explanation(NamedTuple):
    """Why a prompt hit as far as it did. `verdicts`: of each lossy codec that was asked for or that a tier
    stores by, whether its state may be used, and why."""

    tokens: int
    hit: int
    reason: str
    difference: Difference | None
    verdicts: Mapping[str, Verdict] = MappingProxyType({})


def explanation(tiers: Sequence[Tier], failed: Failed, match: Match, context: int) -> Explanation:
    """Why a lookup's match ended, with up to `context` tokens of both texts from there on."""
    size, hit = match.tokens.size, match.length
    if hit == size:
        return Explanation(size, hit, "everything is stored", None)
    stored = _stored_from(tiers, failed, match, context)
    if not stored.size:
        reason = "nothing that is stored goes on like this prompt"
        if not hit:
            reason = "nothing is stored that begins like this prompt"
        return Explanation(size, hit, reason, None)
    if stored[0] == match.tokens[hit]:
        return Explanation(size, hit, "more is stored, but not of all the model's layer groups", None)
    difference = Difference(hit, match.tokens[hit : hit + context].tolist(), stored.tolist())
    return Explanation(size, hit, f"token {hit} differs from what is stored", difference)


def _stored_from(tiers: Sequence[Tier], failed: Failed, match: Match, context: int) -> Tokens:
    """The nearest stored text from the end of a match on, up to `context` tokens."""
    start = sum(count for _, count in match.runs) * match.chunk_tokens
    end = match.length + context
    found: list[Tokens] = []
    for tokens in _chunks_from(tiers, failed, match, start, end):
        found.append(tokens)
        if start + sum(map(len, found)) >= end:
            break
    text = np.concatenate(found) if found else match.tokens[:0]
    return text[match.length - start : end - start]


def _chunks_from(
    tiers: Sequence[Tier], failed: Failed, match: Match, start: int, end: int
) -> Iterator[Tokens]:
    """Stored chunks from `start`, a chunk's start, on: the one nearest to the prompt and what follows it.

    Tiers find a chunk by its tokens. One that agrees in none, or that follows a text which is not the
    prompt's, is found by a scan; it takes the one that was used last.
    """
    root, size = match.namespace.root(), match.chunk_tokens
    parent = address(match.keys[start // size - 1], 0) if start else address(root, 0)
    child = match.child or nearest(tiers, failed, parent, match.tokens[start:][:size])
    if child is not None:
        tokens = _tokens(tiers, child[0], child[1].address)
        if tokens is None:
            return
        yield tokens
        if tokens.size < size:
            return
        parent, start = child[1].address, start + size
    elif not start:
        return  # whatever else begins a text under this root has nothing to do with this one
    following = _by_parent(tiers, failed, root, start, end)
    while parent in following:
        number, entry = following[parent]
        tokens = _tokens(tiers, number, entry.address)
        if tokens is None or not tokens.size:
            return
        yield tokens
        parent = entry.address


def _by_parent(
    tiers: Sequence[Tier], failed: Failed, root: bytes, start: int, end: int
) -> dict[bytes, tuple[int, Entry]]:
    """For each parent, which of its children at positions from `start` to `end` was used last."""
    found: dict[bytes, tuple[int, Entry]] = {}
    for number, tier in enumerate(tiers):
        try:
            for entry in tier.scan():
                if entry.root != root or entry.parent is None or not start <= entry.position < end:
                    continue
                known = found.get(entry.parent)
                if known is None or entry.accessed > known[1].accessed:
                    found[entry.parent] = (number, entry)
        except FAILURES as error:
            failed(tier, "scan", error)
    return found


def _tokens(tiers: Sequence[Tier], number: int, one: bytes) -> Tokens | None:
    return stored_tokens(tiers[number], Piece(0, 0, one, 0, 0, 0, number))


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One stored object as a researcher sees it: header, and arrays verified when they are read."""

    tier: str
    entry: Entry
    _open: Callable[[bool], tuple[Parsed, dict[str, Array]]]

    @property
    def address(self) -> str:
        """The object's address, for `show` and `rm`."""
        return address_text(self.entry.address)

    def header(self) -> Header:
        """What the object says of itself, once its digests were found right. Raises CorruptObjectError."""
        return self._open(False)[0].header

    def arrays(self) -> dict[str, Array]:
        """`k`, `v` `[layers, tokens, kv_heads, dim]`. Raises CorruptObjectError."""
        return self._open(True)[1]


def opener(tier: Tier, entry: Entry, decoder: Decoder) -> Callable[[bool], tuple[Parsed, dict[str, Array]]]:
    """A function that reads and verifies an object, and decodes it if told to. It raises KeyError,
    CorruptObjectError, TierError; only
    after all digests were found right NotDecodableError, where nothing here decodes it."""

    def opened(decode: bool) -> tuple[Parsed, dict[str, Array]]:
        with tier.open(entry.address) as reader:
            if reader.size > entry.size + MAX_HEADER_BYTES:  # before anything is allocated for it
                raise CorruptObjectError("object is larger than what was stored")
            parsed = read_header(reader)
            header = parsed.header
            if address(bytes.fromhex(header.key), header.group, header.shard) != entry.address:
                raise CorruptObjectError("object is not the one that its address says")
            stored = empty_arrays(parsed)
            read_arrays(reader, parsed, stored)
        if not decode:
            return parsed, stored
        group = header.namespace.spec.groups[header.group]
        chunk = Chunk(group, header.group, header.position, len(header.tokens))
        try:
            return parsed, decoded(stored, decoder(header), chunk, header.namespace.arrays)
        except UnsupportedModelError as error:
            raise CorruptObjectError(f"object cannot be decoded: {error}") from error

    return opened

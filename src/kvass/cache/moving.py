"""Objects between a sequence and the tiers, and between tiers: what to write, cascades, promotions."""

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvass.cache.blobs import NO_BLOB, ChunkBlob, TierBlob
from kvass.cache.coding import Target
from kvass.cache.executor import Copying
from kvass.cache.match import Match, Piece
from kvass.cache.pool import KVView
from kvass.chunks import Tokens, as_tokens
from kvass.container import MAX_HEADER_BYTES, read_header
from kvass.errors import CorruptObjectError, InputError, TierError
from kvass.fingerprints import SHORTEST, fingerprints_of_parts
from kvass.keys import KEY_BYTES, Namespace, address, chain, next_key, split_address
from kvass.tiers.base import Run, Tier, WriteItem
from kvass.tiers.marks import is_marked

FAILURES = (TierError, CorruptObjectError, OSError)
"""What a tier may answer with; to the cache each of them is a miss."""


def quarantine(tier: Tier, one: bytes, failed: Callable[[Tier, str, BaseException], None]) -> None:
    """Take an object that failed verification out of sight. Never raises because of the tier."""
    try:
        tier.quarantine(one)
    except FAILURES as error:
        failed(tier, "quarantine", error)


def check_size(size: int, bytes_per_token: int, tokens: int) -> None:
    """Raises CorruptObjectError where an object is larger than any codec makes so many tokens."""
    if size > 2 * bytes_per_token * tokens + MAX_HEADER_BYTES:
        raise CorruptObjectError(f"object of {size} bytes is larger than any codec makes it")


def sequence_items(
    tokens: Tokens, target: Target, shards: Sequence[int], source: KVView, chunk_tokens: int, copying: Copying
) -> list[WriteItem]:  # fmt: skip
    """All objects of a sequence: its whole chunks and the last partial one, every part, in order.

    Raises InputError for a namespace or a source that no object can hold.
    """
    namespace = target.namespace
    written = msgspec.json.encode(namespace)
    if msgspec.json.encode(msgspec.json.decode(written, type=Namespace)) != written:
        raise InputError("the namespace holds values that are not of their fields' types; nothing is stored")
    root = namespace.root()
    keys = chain(root, tokens, chunk_tokens)
    if tokens.size % chunk_tokens:
        tail = tokens[len(keys) * chunk_tokens :]
        keys.append(next_key(keys[-1] if keys else root, tail.tobytes(), tail.size))
    marks = fingerprints_of_parts(tokens, range(0, tokens.size, chunk_tokens))
    items = []
    for chunk, key in enumerate(keys):
        start = chunk * chunk_tokens
        part = tokens[start : start + chunk_tokens]
        for group, shard in itertools.product(range(len(namespace.spec.groups)), shards):
            one = address(key, group, shard)
            parent = address(keys[chunk - 1], group, shard) if chunk else None
            blob = ChunkBlob(target, one, parent, root, start, part, source, tokens.size)
            held = part if group == 0 else None
            led = marks[chunk] if is_marked(namespace, one) else None
            items.append(WriteItem(one, parent, root, start, part.size, held, copying.wrap(blob), led))
    return items


def lacking(tier: Tier, items: Sequence[WriteItem]) -> list[WriteItem]:
    """Items that a tier lacks; a last chunk that lies within a longer stored one is not lacking."""
    there = tier.contains([item.address for item in items])
    wanted = [item for item, ok in zip(items, there, strict=True) if not ok]
    if not wanted:
        return []
    tail = [item for item in items if item.position == items[-1].position]
    if wanted[-1].position == tail[0].position and tail[0].tokens is not None:
        _, group, shard = split_address(tail[0].address)
        child = tier.nearest_child(tail[0].parent or address(tail[0].root, group, shard), tail[0].tokens)
        if child is not None and child.common == tail[0].length:
            within = [child.address[:KEY_BYTES] + item.address[KEY_BYTES:] for item in tail]
            if all(tier.contains(within)):
                wanted = [item for item in wanted if item.position != tail[0].position]
    return wanted


def copy(source: Tier, target: Tier, items: Sequence[WriteItem], run: Run) -> int:
    """Copy objects between tiers byte by byte. What follows one that is gone would have no parent there
    and is left out; how many were. Whoever reads the copies verifies them."""
    moved, cut = [], set()
    for item in items:
        part = item.address[KEY_BYTES:]
        if part in cut:
            continue
        blob = TierBlob(source, item.address)
        if blob.size:
            moved.append(item._replace(blob=blob))
        else:
            cut.add(part)
    target.write(moved, run)
    return len(items) - len(moved)


def promotions(
    tiers: Sequence[Tier], failed: Callable[[Tier, str, BaseException], None], match: Match, length: int
) -> list[tuple[Tier, list[WriteItem]]]:
    """What the fastest tier lacks of a match's first `length` tokens, by the tier that has it; a slower one
    that fails has nothing.

    Parts that no window sees any more come too: without them their successors would have no parents.
    """
    pieces = match.pieces(length, unseen=True)
    found = []
    for number, tier in enumerate(tiers):
        try:
            there = tier.contains([piece.address for piece in pieces])
        except FAILURES as error:
            if not number:
                raise
            failed(tier, "promote", error)
            continue
        if number:
            items = [_promoted(tier, match, piece) for piece, ok in zip(pieces, there, strict=True) if ok]
            found.append((tier, [item for item in items if item is not None]))
        pieces = [piece for piece, ok in zip(pieces, there, strict=True) if not ok]
    return found


def _promoted(tier: Tier, match: Match, piece: Piece) -> WriteItem | None:
    _, group, shard = split_address(piece.address)
    parent = address(match.keys[piece.chunk - 1], group, shard) if piece.chunk else None
    tokens = marks = None
    if piece.group == 0:
        tokens = match.tokens[piece.start : piece.start + piece.stored]
        if piece.used < piece.stored:
            tokens = stored_tokens(tier, piece)
        if tokens is None or tokens.size != piece.stored:
            return None
        if is_marked(match.namespace, piece.address):
            before = match.tokens[: piece.start][-SHORTEST:]
            whole = np.concatenate([before, tokens])
            (marks,) = fingerprints_of_parts(whole, [before.size])
    return WriteItem(
        piece.address, parent, match.namespace.root(), piece.start, piece.stored, tokens, NO_BLOB, marks
    )


def stored_tokens(tier: Tier, piece: Piece) -> Tokens | None:
    """The tokens of a stored chunk, from its header; None where it cannot be read."""
    try:
        with tier.open(piece.address) as reader:
            return as_tokens(read_header(reader).header.tokens)
    except (KeyError, *FAILURES):
        return None

"""Objects between a sequence and the tiers, and between tiers: what to write, cascades, promotions."""

from collections.abc import Sequence

from kvass.cache.blobs import NO_BLOB, ChunkBlob, TierBlob
from kvass.cache.executor import Copying
from kvass.cache.match import Match, Piece
from kvass.cache.pool import KVView
from kvass.chunks import Tokens, as_tokens
from kvass.codecs.base import Codec
from kvass.container import read_header
from kvass.errors import CorruptObjectError, TierError
from kvass.keys import Namespace, address, chain, next_key
from kvass.tiers.base import Run, Tier, WriteItem

FAILURES = (TierError, CorruptObjectError, OSError)
"""What a tier may answer with; to the cache each of them is a miss."""


def sequence_items(
    tokens: Tokens, namespace: Namespace, source: KVView, coder: Codec, chunk_tokens: int, copying: Copying
) -> list[WriteItem]:
    """All objects of a sequence: its whole chunks and the last partial one, every group, in order."""
    root = namespace.root()
    keys = chain(root, tokens, chunk_tokens)
    if tokens.size % chunk_tokens:
        tail = tokens[len(keys) * chunk_tokens :]
        keys.append(next_key(keys[-1] if keys else root, tail.tobytes(), tail.size))
    items = []
    for chunk, key in enumerate(keys):
        start = chunk * chunk_tokens
        part = tokens[start : start + chunk_tokens]
        for group in range(len(namespace.spec.groups)):
            parent = address(keys[chunk - 1], group) if chunk else None
            blob = ChunkBlob(coder, namespace, key, parent, root, group, start, part, source)
            held = part if group == 0 else None
            items.append(
                WriteItem(address(key, group), parent, root, start, part.size, held, copying.wrap(blob))
            )
    return items


def lacking(tier: Tier, items: Sequence[WriteItem]) -> list[WriteItem]:
    """Items that a tier lacks; a last chunk that lies within a longer stored one is not lacking."""
    there = tier.contains([item.address for item in items])
    wanted = [item for item, ok in zip(items, there, strict=True) if not ok]
    if not wanted:
        return []
    last = next(item for item in items if item.position == items[-1].position)
    if wanted[-1].position == last.position and last.tokens is not None:
        child = tier.nearest_child(last.parent or address(last.root, 0), last.tokens)
        if child is not None and child.common == last.length:
            wanted = [item for item in wanted if item.position != last.position]
    return wanted


def copy(source: Tier, target: Tier, items: Sequence[WriteItem], run: Run) -> None:
    """Copy objects between tiers byte by byte, stopping at the first that is gone: what follows it would
    have no parent. Whoever reads the copies verifies them."""
    moved = []
    for item in items:
        blob = TierBlob(source, item.address)
        if not blob.size:
            break
        moved.append(item._replace(blob=blob))
    target.write(moved, run)


def promotions(tiers: Sequence[Tier], match: Match, length: int) -> dict[int, list[WriteItem]]:
    """What a load of `length` tokens took from slower tiers and the fastest lacks, by tier."""
    root, size = match.namespace.root(), match.chunk_tokens
    found: dict[int, list[WriteItem]] = {}
    for piece in match.pieces(length):
        if not piece.tier:
            continue
        parent = address(match.keys[piece.chunk - 1], piece.group) if piece.chunk else None
        tokens = None
        if piece.group == 0:
            tokens = match.tokens[piece.start : piece.start + size][: piece.stored]
            if piece.used < piece.stored:
                tokens = stored_tokens(tiers[piece.tier], piece)
                if tokens is None:
                    continue
        item = WriteItem(piece.address, parent, root, piece.start, piece.stored, tokens, NO_BLOB)
        found.setdefault(piece.tier, []).append(item)
    for number, items in found.items():
        there = tiers[0].contains([item.address for item in items])
        found[number] = [item for item, ok in zip(items, there, strict=True) if not ok]
    return found


def stored_tokens(tier: Tier, piece: Piece) -> Tokens | None:
    """The tokens of a stored chunk, from its header; None where it cannot be read."""
    try:
        with tier.open(piece.address) as reader:
            return as_tokens(read_header(reader).header.tokens)
    except (KeyError, *FAILURES):
        return None

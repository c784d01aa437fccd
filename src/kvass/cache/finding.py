"""Looking a prompt up: the longest beginning that the tiers hold, with all that every group needs of it."""

from collections.abc import Callable, Sequence

from kvass.cache.match import Match, Piece
from kvass.cache.moving import FAILURES
from kvass.chunks import Tokens
from kvass.keys import Namespace, address, chain
from kvass.tiers.base import Child, Tier

Failed = Callable[[Tier, str, BaseException], None]
"""Told of a tier's failure: which tier, during what, why."""

_GALLOP = 64
"""Keys asked for at once while looking for the first that is missing."""


def find(
    tiers: Sequence[Tier],
    failed: Failed,
    tokens: Tokens,
    namespace: Namespace,
    chunk_tokens: int,
    limit: int,
    keys: list[bytes] | None,
    shards: tuple[int, ...] = (0,),
) -> Match:
    """The longest beginning of the first `limit` tokens that is stored. A tier that fails has nothing."""
    root = namespace.root()
    if keys is None:
        keys = chain(root, tokens[:limit], chunk_tokens)
    part = address(b"", 0, shards[0])
    primary = [key + part for key in keys[: limit // chunk_tokens]]
    runs, found = [], 0
    for number, tier in enumerate(tiers):
        more = _leading(tier, failed, primary, found)
        if more:
            runs.append((number, more))
            found += more
    length, child = found * chunk_tokens, None
    if length < limit:
        parent = primary[found - 1] if found else root + part
        child = nearest(tiers, failed, parent, tokens[length:limit][:chunk_tokens])
        length += child[1].common if child else 0
    match = Match(tokens, namespace, chunk_tokens, length, keys, tuple(runs), child, shards)
    if len(namespace.spec.groups) > 1 or namespace.spec.groups[0].window is not None or len(shards) > 1:
        match = _with_all_parts(tiers, failed, match)
    return match


def _leading(tier: Tier, failed: Failed, addresses: list[bytes], start: int) -> int:
    """How many addresses from `start` on are in a tier without a gap."""
    found, step = 0, _GALLOP
    try:
        while start + found < len(addresses):
            asked = addresses[start + found : start + found + step]
            there = tier.contains(asked)
            if False in there:
                return found + there.index(False)
            found += len(asked)
            step *= 4
    except FAILURES as error:
        failed(tier, "lookup", error)
    return found


def nearest(tiers: Sequence[Tier], failed: Failed, parent: bytes, tokens: Tokens) -> tuple[int, Child] | None:
    """The stored chunk behind `parent` that agrees longest with `tokens`, over all tiers."""
    best: tuple[int, Child] | None = None
    for number, tier in enumerate(tiers):
        try:
            child = tier.nearest_child(parent, tokens)
        except FAILURES as error:
            failed(tier, "lookup", error)
            continue
        if child is not None and (best is None or child.common > best[1].common):
            best = (number, child)
    return best


def _with_all_parts(tiers: Sequence[Tier], failed: Failed, match: Match) -> Match:
    """Shorten a match until every group and shard has the objects that its window still needs there."""
    there: dict[bytes, bool] = {}
    while match.length:
        pieces = match.pieces()
        look(tiers, failed, [piece for piece in pieces if piece.address not in there], there)
        missing = [piece.start for piece in pieces if not there[piece.address]]
        if not missing:
            return match
        match = match.cut(max(missing))
    return match


def look(tiers: Sequence[Tier], failed: Failed, pieces: Sequence[Piece], there: dict[bytes, bool]) -> None:
    """Note of each piece whether a tier has it, its own or a slower one; each tier is asked once."""
    there.update((piece.address, False) for piece in pieces)
    for number, tier in enumerate(tiers):
        asked = [one.address for one in pieces if one.tier <= number and not there[one.address]]
        try:
            there.update(zip(asked, tier.contains(asked) if asked else (), strict=True))
        except FAILURES as error:
            failed(tier, "lookup", error)

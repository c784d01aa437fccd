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
) -> Match:
    """The longest beginning of the first `limit` tokens that is stored. A tier that fails has nothing."""
    root = namespace.root()
    if keys is None:
        keys = chain(root, tokens[:limit], chunk_tokens)
    primary = [key + address(b"", 0) for key in keys[: limit // chunk_tokens]]
    runs, found = [], 0
    for number, tier in enumerate(tiers):
        more = _leading(tier, failed, primary, found)
        if more:
            runs.append((number, more))
            found += more
    length, child = found * chunk_tokens, None
    if length < limit:
        parent = primary[found - 1] if found else address(root, 0)
        child = nearest(tiers, failed, parent, tokens[length:limit][:chunk_tokens])
        length += child[1].common if child else 0
    match = Match(tokens, namespace, chunk_tokens, length, keys, tuple(runs), child)
    if len(namespace.spec.groups) > 1 or namespace.spec.groups[0].window is not None:
        match = _with_all_groups(tiers, failed, match)
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


def _with_all_groups(tiers: Sequence[Tier], failed: Failed, match: Match) -> Match:
    """Shorten a match until every group has the objects that its window still needs there."""
    while match.length:
        missing = [piece for piece in match.pieces() if not _there(tiers, failed, piece)]
        if not missing:
            return match
        match = match.cut(max(piece.start for piece in missing))
    return match


def _there(tiers: Sequence[Tier], failed: Failed, piece: Piece) -> bool:
    for tier in tiers[piece.tier :]:
        try:
            if tier.contains([piece.address])[0]:
                return True
        except FAILURES as error:
            failed(tier, "lookup", error)
    return False

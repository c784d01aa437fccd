"""What a lookup found, and which objects a load of it needs."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvass.chunks import Tokens
from kvass.keys import KEY_BYTES, Namespace, address
from kvass.quality import Budget
from kvass.tiers.base import Child


class Piece(NamedTuple):
    """One object to be loaded: its chunk, group, place in the sequence, stored and used tokens."""

    chunk: int
    group: int
    address: bytes
    start: int
    stored: int
    used: int
    tier: int


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored of a prompt: its first `length` tokens, in whole chunks and the beginning of one more.

    `runs`: (index of the tier, chunks) in order; `child`: the chunk whose beginning is used, and its tier;
    `shards`: the parts of each group (tensor-parallel ranks) that are meant. `beneath`: where this is a match
    of lossy state, the exact one (of whole chunks, possibly none), from which the beginning is loaded;
    `budget`: what that state may cost.
    """

    tokens: Tokens
    namespace: Namespace
    chunk_tokens: int
    length: int
    keys: list[bytes] = field(repr=False)
    runs: tuple[tuple[int, int], ...]
    child: tuple[int, Child] | None
    shards: tuple[int, ...] = (0,)
    beneath: "Match | None" = None
    budget: Budget | None = None

    def __bool__(self) -> bool:
        return self.length > 0

    @property
    def exact(self) -> int:
        """How many of its tokens are exact state: all, or those of `beneath`."""
        return self.length if self.beneath is None else self.beneath.length

    def upon(self, loaded: int, exact: int) -> Namespace:
        """The namespace in which belongs what is computed on top of a load of `loaded` tokens, of which the
        first `exact` are exact: that of the exact state where there is nothing else below it."""
        return self.beneath.namespace if self.beneath is not None and loaded == exact else self.namespace

    def cut(self, length: int) -> "Match":
        """The same match, ended at a chunk's start."""
        left, runs = length // self.chunk_tokens, []
        for tier, chunks in self.runs:
            taken = min(chunks, left)
            if taken:
                runs.append((tier, taken))
            left -= taken
        beneath = self.beneath
        if beneath is not None and beneath.length > length:
            beneath = beneath.cut(length)
        return replace(self, length=length, runs=tuple(runs), child=None, beneath=beneath)

    def over(self, exact: "Match", budget: Budget | None) -> "Match":
        """This match of lossy state, with what an exact one has of it loaded from there."""
        whole = exact.length // self.chunk_tokens * self.chunk_tokens
        return replace(self, beneath=exact.cut(whole), budget=budget)

    def anywhere(self) -> "Match":
        """The same match, its objects to be looked for from the fastest tier on."""
        runs = ((0, sum(chunks for _, chunks in self.runs)),) if self.runs else ()
        child = (0, self.child[1]) if self.child else None
        beneath = self.beneath.anywhere() if self.beneath else None
        return replace(self, runs=runs, child=child, beneath=beneath)

    def whole(self) -> "Match":
        """The same match, ended where its last whole chunk does."""
        return self.cut(self.length // self.chunk_tokens * self.chunk_tokens)

    def layers(self) -> list["Match"]:
        """The matches of one namespace each that this one is made of, exact first."""
        if self.beneath is None:
            return [self]
        own = replace(self, beneath=None)
        return [self.beneath, own] if self.beneath else [own]

    def pieces(
        self, length: int | None = None, have: Collection[bytes] = (), *, unseen: bool = False
    ) -> list[Piece]:
        """Objects that a hit of `length` tokens (all) needs, less those in `have`.

        `unseen`: with those that lie before every window too, and only serve a later branch.
        """
        length = self.length if length is None else length
        size, groups = self.chunk_tokens, self.namespace.spec.groups
        keys, tiers = self.keys, [tier for tier, chunks in self.runs for _ in range(chunks)]
        if self.beneath:
            exact = self.beneath
            below = [tier for tier, chunks in exact.runs for _ in range(chunks)]
            keys = [*exact.keys[: len(below)], *keys[len(below) :]]
            tiers[: len(below)] = below
        found = []
        first = [0 if unseen else group.first_needed(length) for group in groups]
        for chunk in range(min(first) // size, -(-length // size)):
            start = chunk * size
            used = min(size, length - start)
            if chunk < len(tiers):
                key, stored, tier = keys[chunk], size, tiers[chunk]
            else:
                assert self.child is not None
                tier, child = self.child
                key, stored = child.address[:KEY_BYTES], child.length
            for number, needed in enumerate(first):
                if start + used <= needed:
                    continue
                for shard in self.shards:
                    one = address(key, number, shard)
                    if one not in have:
                        found.append(Piece(chunk, number, one, start, stored, used, tier))
        return found

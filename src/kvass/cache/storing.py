"""Storing a sequence's KV: into the fastest tier at once, into the others behind it."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from kvass import metrics
from kvass.cache.blobs import NO_BLOB, ChunkBlob
from kvass.cache.coding import Recoder, Target
from kvass.cache.executor import Copying, CountedBlob
from kvass.cache.looking import TokenIds
from kvass.cache.moving import FAILURES, copy, lacking, sequence_items
from kvass.cache.pool import KVView
from kvass.cache.recoding import move, write_encoded
from kvass.cache.tiered import Tiered
from kvass.chunks import Tokens, as_tokens
from kvass.container import Blob
from kvass.errors import InputError, TierUnavailableError
from kvass.keys import Namespace
from kvass.provenance import Blended, is_blend
from kvass.quality import Budget
from kvass.tiers.base import Tier, WriteItem


@dataclass(slots=True)
class StoreTicket:
    """A store under way. The source is free already; `copied` is False where the store was given up."""

    copied: bool = False
    future: "Future[None] | None" = field(default=None, repr=False)
    bytes: int = 0
    objects: int = 0

    def wait(self, seconds: float | None = None) -> Self:
        """Wait until the fastest tier has the objects (lower tiers: `KVCache.flush`); not at all where the
        store was given up. Raises TimeoutError after `seconds`."""
        if self.copied and self.future is not None:
            self.future.result(seconds)
        return self


class Storing(Tiered):
    """The half of a cache that writes."""

    _stalled: Future[None] | None = None

    def store(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        source: KVView,
        *,
        budget: Budget | None = None,
        made: Blended | None = None,
    ) -> StoreTicket:
        """Keep a sequence's KV: whole chunks and the last partial one; what is there already is left.

        `namespace`: of approximate state where any of it was computed upon such (`Match.upon`); it is stored
        then only if a certificate covers it within `budget` (the settings' by default). `made`: how blended
        state was made; without it, none is stored.
        Returns once the source was copied (or the store given up, after `store_deadline`): the source may
        then be reused. The objects become visible soon after, in lower tiers later. Raises InputError for
        unusable tokens; a source that does not fit the spec is counted and logged, and nothing stored.
        """
        array = as_tokens(tokens)
        copying = Copying(source)
        ticket = StoreTicket()
        reason = "deadline"
        if self._stalled is None or self._stalled.done():  # else it would only wait behind that one
            try:
                ticket.future = self._executor.write(
                    lambda: self._store(array, namespace, copying, ticket, budget, made)
                )
                ticket.copied = copying.wait(self._store_deadline)
                self._stalled = None if ticket.copied else ticket.future
            except TierUnavailableError:
                reason = "error"
        if not ticket.copied:
            metrics.dropped_stores.labels(self.tiers[0].name if self.tiers else "none", reason).inc()
            text = (
                f"a store was not copied within store_deadline ({self._store_deadline:g} s), and given up; "
                "the first use of a codec compiles it, which takes some seconds, once"
                if reason == "deadline"
                else "a store came too late and was given up"
            )
            self._warn_once("store", reason, text)
        return ticket

    def _store(
        self,
        tokens: Tokens,
        namespace: Namespace,
        copying: Copying,
        ticket: StoreTicket,
        budget: Budget | None,
        made: Blended | None,
    ) -> None:
        try:
            source = copying.take()
            if source is not None and self.tiers and tokens.size:
                self._store_now(tokens, namespace, source, copying, ticket, budget, made)
        finally:
            copying.over()

    def _store_now(
        self,
        tokens: Tokens,
        namespace: Namespace,
        source: KVView,
        copying: Copying,
        ticket: StoreTicket,
        budget: Budget | None,
        made: Blended | None,
    ) -> None:
        if is_blend(namespace.state) and made is None:
            return
        first, *below = [
            self._coding.target(tier.name, namespace, budget=budget, made=made) for tier in self.tiers
        ]
        if first is None:  # those below store by the same lossy codec, then
            return
        items = sequence_items(tokens, first, self.shards, source, self.chunk_tokens, copying)
        wanted, done, ticket.bytes = self._write(self.tiers[0], items, first)
        ticket.objects = sum(done)
        complete = all(done)
        for tier, target in zip(self.tiers[1:], below, strict=True):
            if target is None:
                continue
            theirs = items
            if target.namespace != first.namespace:
                theirs = sequence_items(tokens, target, self.shards, source, self.chunk_tokens, copying)
            if complete or tier.remote:
                lane = tier.within(target.namespace.root())
                # A remote tier finds nothing by its tokens: nobody could find a last chunk that is not full.
                down = [
                    (item._replace(blob=NO_BLOB), here.address)  # the source must not be kept alive
                    for item, here in zip(theirs, items, strict=True)
                    if not tier.remote or item.length == self.chunk_tokens
                ]
                # so the sequence ends, there, with the last that is
                end = tokens.size // self.chunk_tokens * self.chunk_tokens if tier.remote else tokens.size
                new = max(1, len(wanted))  # what was here already is, most likely, there too
                if not self._executor.behind(
                    tier.name, new, partial(self._copy_down, lane, down, first, target, end)
                ):
                    metrics.dropped_stores.labels(tier.name, "queue").inc(new)
            else:  # the fastest tier has no room for all of it: straight from the source, then
                if theirs is items and target.coder is not first.coder:
                    theirs = sequence_items(tokens, target, self.shards, source, self.chunk_tokens, copying)
                self._write(tier, theirs, target)

    def _write(
        self, tier: Tier, items: list[WriteItem], target: Target
    ) -> tuple[list[WriteItem], list[bool], int]:
        """Write what a tier lacks of a sequence. What it lacked, what of that is there now, and its bytes."""
        began = time.perf_counter()
        wanted, sizes = items, dict[bytes, int]()

        def encoded(item: WriteItem) -> Blob | None:
            assert isinstance(item.blob, CountedBlob)
            try:
                made = item.blob.remade(_encode)
            except (InputError, *FAILURES) as error:
                self._failed(tier, "encode", error)
                metrics.dropped_stores.labels(tier.name, "error").inc()
                return None
            sizes[item.address] = made.size
            return made

        try:
            wanted = lacking(tier, items)
            if target.coder.in_place:
                done = tier.write(wanted, self._executor.io_map)
            else:
                groups = target.namespace.spec.groups
                each = [group.bytes_per_token for group in groups]
                done = write_encoded(tier, wanted, encoded, each, self._executor.io_map)
        except FAILURES as error:
            self._failed(tier, "store", error)
            return items, [False] * len(items), 0
        metrics.store_seconds.labels(tier.name).observe(time.perf_counter() - began)
        stored = [item for item, ok in zip(wanted, done, strict=True) if ok]
        if target.coder.in_place:
            return wanted, done, sum(item.blob.size for item in stored)
        return wanted, done, sum(sizes[item.address] for item in stored)

    def _copy_down(
        self, tier: Tier, items: list[tuple[WriteItem, bytes]], held: Target, target: Target, end: int
    ) -> None:
        """Cascade: write to a lower tier what it lacks of a sequence of `end` tokens, from the fastest one,
        which has each item at that address."""
        began = time.perf_counter()
        run = self._executor.lane_io_map(tier.name)
        try:
            wanted = lacking(tier, [item for item, _ in items])
            if target.coder.name == held.coder.name and target.namespace == held.namespace:
                gone = copy(self.tiers[0], tier, wanted, run)
            else:
                recoder = Recoder(target, self._coding.decoder, end)
                at = {item.address: one for item, one in items}
                gone = move(self.tiers[0], tier, wanted, recoder, self._failed, run, at)
            metrics.dropped_stores.labels(tier.name, "orphan").inc(gone)
        except FAILURES as error:
            self._failed(tier, "store", error)
            metrics.dropped_stores.labels(tier.name, "error").inc(len(items))
        metrics.store_seconds.labels(tier.name).observe(time.perf_counter() - began)


def _encode(blob: Blob) -> Blob:
    assert isinstance(blob, ChunkBlob)
    return blob.encoded()

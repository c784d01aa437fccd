"""Storing a sequence's KV: into the fastest tier at once, into the others behind it."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from kvass import metrics
from kvass.cache.blobs import NO_BLOB
from kvass.cache.executor import Copying
from kvass.cache.moving import FAILURES, copy, lacking, sequence_items
from kvass.cache.pool import KVView
from kvass.cache.reading import TokenIds
from kvass.cache.tiered import Tiered
from kvass.chunks import Tokens, as_tokens
from kvass.errors import TierUnavailableError
from kvass.keys import Namespace
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

    def store(self, tokens: TokenIds, namespace: Namespace, source: KVView) -> StoreTicket:
        """Keep a sequence's KV: whole chunks and the last partial one; what is there already is left.

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
                ticket.future = self._executor.write(lambda: self._store(array, namespace, copying, ticket))
                ticket.copied = copying.wait(self._store_deadline)
                self._stalled = None if ticket.copied else ticket.future
            except TierUnavailableError:
                reason = "error"
        if not ticket.copied:
            metrics.dropped_stores.labels(self.tiers[0].name if self.tiers else "none", reason).inc()
            self._warn_once("store", reason, "a store waited too long or came too late and was given up")
        return ticket

    def _store(self, tokens: Tokens, namespace: Namespace, copying: Copying, ticket: StoreTicket) -> None:
        try:
            source = copying.take()
            if source is not None and self.tiers and tokens.size:
                self._store_now(tokens, namespace, source, copying, ticket)
        finally:
            copying.over()

    def _store_now(
        self, tokens: Tokens, namespace: Namespace, source: KVView, copying: Copying, ticket: StoreTicket
    ) -> None:
        items = sequence_items(
            tokens, namespace, self.shards, source, self._codec, self.chunk_tokens, copying
        )
        wanted, done = self._write(self.tiers[0], items)
        ticket.objects = sum(done)
        ticket.bytes = sum(item.blob.size for item, ok in zip(wanted, done, strict=True) if ok)
        complete = all(done)
        bare = [item._replace(blob=NO_BLOB) for item in items]  # the source must not be kept alive
        for tier in self.tiers[1:]:
            if complete or tier.remote:
                below = tier.within(namespace.root())
                # A remote tier finds nothing by its tokens: nobody could find a last chunk that is not full.
                down = [item for item in bare if not tier.remote or item.length == self.chunk_tokens]
                new = max(1, len(wanted))  # what was here already is, most likely, there too
                if not self._executor.behind(tier.name, new, partial(self._copy_down, below, down)):
                    metrics.dropped_stores.labels(tier.name, "queue").inc(new)
            else:  # the fastest tier has no room for all of it: straight from the source, then
                self._write(tier, items)

    def _write(self, tier: Tier, items: list[WriteItem]) -> tuple[list[WriteItem], list[bool]]:
        """Write what a tier lacks of a sequence. What it lacked, and what of that is there now."""
        began = time.perf_counter()
        wanted = items
        try:
            wanted = lacking(tier, items)
            done = tier.write(wanted, self._executor.io_map)
        except FAILURES as error:
            self._failed(tier, "store", error)
            return items, [False] * len(items)
        metrics.store_seconds.labels(tier.name).observe(time.perf_counter() - began)
        return wanted, done

    def _copy_down(self, tier: Tier, items: list[WriteItem]) -> None:
        """Cascade: write to a lower tier what it lacks, from the fastest one."""
        began = time.perf_counter()
        try:
            gone = copy(self.tiers[0], tier, lacking(tier, items), self._executor.lane_io_map(tier.name))
            metrics.dropped_stores.labels(tier.name, "orphan").inc(gone)
        except FAILURES as error:
            self._failed(tier, "store", error)
            metrics.dropped_stores.labels(tier.name, "error").inc(len(items))
        metrics.store_seconds.labels(tier.name).observe(time.perf_counter() - began)

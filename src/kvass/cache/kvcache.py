"""KVCache: lookup, load, store, prefetch, pin, forget, explain over an ordered list of tiers."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvass import metrics
from kvass.cache.blobs import NO_BLOB
from kvass.cache.executor import Copying, Executor
from kvass.cache.finding import find
from kvass.cache.inspection import Explanation, StoredChunk, explanation, opener
from kvass.cache.loading import Loader, LoadResult, Ready
from kvass.cache.match import Match
from kvass.cache.moving import FAILURES, copy, lacking, promotions, sequence_items
from kvass.cache.pool import KVView, Pool
from kvass.chunks import Tokens, as_tokens
from kvass.clock import Clock, system_clock
from kvass.codecs.base import Codec
from kvass.codecs.raw import Raw
from kvass.config import Settings
from kvass.errors import ConfigError, CorruptObjectError, TierError, TierUnavailableError
from kvass.keys import Namespace, address, chain, parse_address
from kvass.tiers.base import Tier, Usage, WriteItem
from kvass.tiers.directory import DirectoryTier, on_tmpfs
from kvass.tiers.memory import MemoryTier

log = logging.getLogger("kvass.cache")

TokenIds = Sequence[int] | npt.NDArray[np.integer]

_EXIT_PATIENCE = 10.0
"""Seconds without progress after which an interpreter that ends leaves a cache as it is."""


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


_open: "weakref.WeakSet[KVCache]" = weakref.WeakSet()


class KVCache:
    """Keeps KV in tiers, fastest first. Safe for several threads; several processes may share tiers.

    Nothing here raises because of a tier: what cannot be read is a miss, what cannot be stored is
    dropped, both counted in `kvass.metrics`. Only unusable arguments raise (InputError).
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        chunk_tokens: int = 256,
        io_threads: int = 2,
        store_deadline: float = 5.0,
        clock: Clock = system_clock,
    ):
        """`tiers`: fastest first; closed with the cache."""
        self.tiers = list(tiers)
        self.chunk_tokens = chunk_tokens
        self.unavailable: dict[str, str] = {}
        self._store_deadline = store_deadline
        self._clock = clock
        self._executor = Executor(io_threads, self._keep_house)
        self._codec: Codec = Raw()
        self._warned: set[tuple[str, str]] = set()
        self._guard = threading.Lock()
        self._stalled: Future[None] | None = None
        self._pid = os.getpid()
        self._closed = False
        _open.add(self)

    @classmethod
    def open(cls, settings: Settings | None = None) -> Self:
        """A cache with the tiers that the settings name. A tier that cannot be used is left out, with a
        warning; `unavailable` says why. Raises ConfigError for contradictory settings."""
        settings = settings or Settings.load()
        if settings.host_bytes and settings.disk_bytes and settings.host_path == settings.disk_path:
            raise ConfigError("host_path and disk_path are the same directory; give each tier its own")
        tiers: list[Tier] = []
        unavailable = {}
        if settings.host_bytes:
            if on_tmpfs(settings.host_path):
                try:
                    tiers.append(DirectoryTier(settings.host_path, settings.host_bytes, name="host"))
                except TierError as error:
                    unavailable["host"] = str(error)
            else:
                unavailable["host"] = f"host_path {settings.host_path} is not on a tmpfs"
            if not tiers:
                log.warning(
                    "kvass: %s; memory of this process is used, which no other shares", unavailable["host"]
                )
                tiers.append(MemoryTier(settings.host_bytes))
        if settings.disk_bytes:
            try:
                tiers.append(DirectoryTier(settings.disk_path, settings.disk_bytes, name="disk"))
            except TierError as error:
                unavailable["disk"] = str(error)
                log.warning("kvass: no SSD tier: %s", error)
        cache = cls(
            tiers,
            chunk_tokens=settings.chunk_tokens,
            io_threads=settings.io_threads,
            store_deadline=settings.store_deadline,
        )
        cache.unavailable = unavailable
        return cache

    # -- lookup and load ------------------------------------------------------------------------------

    def _usable(self) -> list[Tier]:
        """The tiers, fastest first; none once the cache is closed, nor in a forked child, where its threads
        do not live and locks may be held for ever."""
        return [] if self._closed or self._pid != os.getpid() else self.tiers

    def lookup(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        *,
        limit: int | None = None,
        keys: list[bytes] | None = None,
        others: Sequence[Namespace] = (),
    ) -> Match:
        """The longest beginning of `tokens` that is stored, to the token, at most `limit` tokens.

        `keys`: the chain of the whole chunks, where the caller has it already. `others`: namespaces that
        the caller may read too, looked at where `namespace` does not have all; the longest match is
        returned, and names its own. Costs one index read a chunk and namespace. Never raises because of a
        tier. Raises InputError for unusable tokens.
        """
        began = time.perf_counter()
        array = as_tokens(tokens)
        limit = array.size if limit is None else max(0, min(limit, array.size))
        tiers = self._usable()
        match = find(tiers, self._failed, array, namespace, self.chunk_tokens, limit, keys)
        for other in others:
            if match.length < limit:
                more = find(tiers, self._failed, array, other, self.chunk_tokens, limit, None)
                match = more if more.length > match.length else match
        metrics.lookup_tokens.labels("hit").inc(match.length)
        metrics.lookup_tokens.labels("miss").inc(array.size - match.length)
        metrics.lookup_seconds.observe(time.perf_counter() - began)
        return match

    def load(
        self, match: Match, into: KVView, *, seconds: float | None = None, ready: Ready | None = None
    ) -> LoadResult:
        """Read, verify and hand over a match; several objects at once.

        Returns how many tokens are in place: all of the match, or fewer where an object turned out missing
        or corrupt or `seconds` were over. Behind them `into` may hold anything. `ready(n)` is called, in
        order, as soon as the first `n` tokens are in place; once, at the end, where a group has a window.
        Never raises because of a tier. Raises InputError where `into` does not fit the spec.
        """
        tiers = self._usable()
        if not tiers:
            return LoadResult(0, 0, 0, 0.0, {})
        loader = Loader(tiers, self._failed, self._executor, self._codec, match, into)
        try:
            result = loader.load(seconds, ready)
        except TierUnavailableError:  # the cache was closed meanwhile
            return LoadResult(0, 0, 0, 0.0, {})
        self._after_load(match, result)
        used = [tier.name for tier in tiers if tier.name in result.tiers]
        if used:
            metrics.load_seconds.labels(used[-1]).observe(result.seconds)
        for name, size in result.tiers.items():
            metrics.load_bytes.labels(name).inc(size)
        return result

    def _after_load(self, match: Match, result: LoadResult) -> None:
        """Note the use, and bring what came from a slower tier up."""
        used = [piece.address for piece in match.pieces(result.tokens)] if result.tokens else []
        if not used:
            return
        for tier in self.tiers:
            if tier.name in result.tiers:
                try:
                    tier.touch(used)
                except FAILURES as error:
                    self._failed(tier, "touch", error)
        if any(name != self.tiers[0].name for name in result.tiers):
            self._executor.background(lambda: self._copy_up(match, result.tokens))

    # -- store ----------------------------------------------------------------------------------------

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
        items = sequence_items(tokens, namespace, source, self._codec, self.chunk_tokens, copying)
        wanted, done = self._write(self.tiers[0], items)
        ticket.objects = sum(done)
        ticket.bytes = sum(item.blob.size for item, ok in zip(wanted, done, strict=True) if ok)
        complete = all(done)
        bare = [item._replace(blob=NO_BLOB) for item in items]  # the source must not be kept alive
        for tier in self.tiers[1:]:
            if complete:
                self._executor.background(partial(self._copy_down, tier, bare))
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
            copy(self.tiers[0], tier, lacking(tier, items), self._executor.background_io_map)
        except FAILURES as error:
            self._failed(tier, "store", error)
        metrics.store_seconds.labels(tier.name).observe(time.perf_counter() - began)

    def _copy_up(self, match: Match, length: int) -> None:
        """Promotion: copy what a load took from lower tiers to the fastest one."""
        try:
            for tier, items in promotions(self.tiers, match, length):
                copy(tier, self.tiers[0], items, self._executor.background_io_map)
        except FAILURES as error:
            self._failed(self.tiers[0], "promote", error)

    # -- prefetch, pin, forget ------------------------------------------------------------------------

    def prefetch(self, tokens: TokenIds, namespace: Namespace) -> Match:
        """Look a prompt up and bring what slower tiers have of it to the fastest, in the background."""
        match = self.lookup(tokens, namespace)
        if (match and any(tier for tier, _ in match.runs)) or (match.child and match.child[0]):
            self._executor.background(lambda: self._copy_up(match, match.length))
        return match

    def pin(self, tokens: TokenIds, namespace: Namespace, seconds: float) -> int:
        """Keep a prompt's stored objects from eviction for `seconds` (0: unpin), in every tier.

        Returns the tokens that are pinned. Their parents stay with them.
        """
        match = self.lookup(tokens, namespace)
        addresses = [piece.address for piece in match.pieces()]
        until = self._clock() + seconds if seconds else 0.0
        pinned = 0
        for tier in self._usable():
            try:
                pinned = max(pinned, tier.pin(addresses, until))
            except FAILURES as error:
                self._failed(tier, "pin", error)
        return match.length if pinned else 0

    def forget(self, tokens: TokenIds, namespace: Namespace, *, keep: int = 0) -> int:
        """Delete a prompt's stored chunks from the one that holds token `keep` on, with everything stored
        behind them, in every tier; objects deleted. Pins do not hold against this."""
        array = as_tokens(tokens)
        first = max(0, min(keep, array.size)) // self.chunk_tokens
        keys = chain(namespace.root(), array, self.chunk_tokens)
        parent = address(keys[first - 1] if first else namespace.root(), 0)
        whole = [address(keys[first], 0)] if first < len(keys) else []
        rest = array[first * self.chunk_tokens :][: self.chunk_tokens]
        self._executor.flush()
        gone = 0
        for tier in reversed(self._usable()):  # slowest first: nothing can be promoted from it any more
            try:
                gone += tier.delete(whole)
                while (child := tier.nearest_child(parent, rest)) and child.common in (
                    rest.size,
                    child.length,
                ):
                    went = tier.delete([child.address])
                    gone += went
                    if not went:
                        break
            except FAILURES as error:
                self._failed(tier, "forget", error)
        return gone

    def remove(self, text: str) -> int:
        """Delete one object by its address (as `entries` lists it) with everything behind it, in every
        tier; objects deleted. Raises InputError when the address is malformed."""
        one = parse_address(text)
        self._executor.flush()
        gone = 0
        for tier in reversed(self._usable()):
            try:
                gone += tier.delete([one]) if tier.contains([one])[0] else 0
            except FAILURES as error:
                self._failed(tier, "forget", error)
        return gone

    # -- looking --------------------------------------------------------------------------------------

    def explain(self, tokens: TokenIds, namespace: Namespace, *, context: int = 16) -> Explanation:
        """Why a prompt hits as far as it does: the first token that differs from the nearest stored text,
        and up to `context` tokens of both from there on. Scans the tiers where the texts part at a chunk's
        start, or where more is asked for than one chunk holds."""
        return explanation(self._usable(), self._failed, self.lookup(tokens, namespace), context)

    def context(self, tokens: TokenIds, namespace: Namespace) -> tuple[int, Pool]:
        """What is stored of a prompt, as arrays: how many tokens, and a pool that holds their KV.

        Layers with a window hold only what it still sees.
        """
        match = self.lookup(tokens, namespace)
        pool = Pool(namespace.spec, match.length)
        return self.load(match, pool).tokens, pool

    def entries(self, namespace: Namespace | None = None) -> Iterator[StoredChunk]:
        """All stored objects, tier by tier; only those of `namespace` where one is given."""
        for tier in self._usable():
            yield from self._entries(tier, namespace)

    def _entries(self, tier: Tier, namespace: Namespace | None = None) -> Iterator[StoredChunk]:
        root = namespace.root() if namespace else None
        try:
            for entry in tier.scan():
                if root is None or entry.root == root:
                    yield StoredChunk(tier.name, entry, opener(tier, entry))
        except FAILURES as error:
            self._failed(tier, "scan", error)

    def verify(self, progress: Callable[[StoredChunk], None] | None = None) -> tuple[int, list[str]]:
        """Read every object of every tier; those that fail are quarantined. Objects read, addresses bad."""
        count, bad = 0, []
        for tier in self._usable():
            for stored in self._entries(tier):
                count += 1
                try:
                    self._verify_one(tier, stored)
                except KeyError:
                    count -= 1  # evicted meanwhile
                except FAILURES as error:
                    self._failed(tier, "verify", error)
                    bad.append(stored.address)
                if progress is not None:
                    progress(stored)
        return count, bad

    @staticmethod
    def _verify_one(tier: Tier, stored: StoredChunk) -> None:
        try:
            stored.arrays()
        except CorruptObjectError:
            tier.quarantine(stored.entry.address)
            raise

    def stats(self) -> dict[str, Usage]:
        """Usage of each tier that answers."""
        found = {}
        for tier in self._usable():
            try:
                found[tier.name] = tier.usage()
            except FAILURES as error:
                self._failed(tier, "stats", error)
        return found

    # -- life -----------------------------------------------------------------------------------------

    def flush(self, seconds: float | None = None) -> None:
        """Wait until everything stored so far is visible in every tier that takes it. Raises TimeoutError
        after `seconds`."""
        self._executor.flush(seconds)

    def close(self, patience: float = 30.0) -> None:
        """Finish what is pending and close the tiers. More than once is fine.

        Where nothing moves on for `patience` seconds, as when a process that stands still holds a tier's
        lock, the rest is given up; the tiers stay open then until this process ends.
        """
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        if not self._executor.close(patience):
            log.warning("kvass: a tier stands still; what was not stored yet is given up")
            return
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep_house(self) -> None:
        for tier in self.tiers:
            try:
                tier.maintain()
            except FAILURES as error:
                self._failed(tier, "maintain", error)

    def _failed(self, tier: Tier, operation: str, error: BaseException) -> None:
        metrics.errors.labels(tier.name, operation).inc()
        self._warn_once(tier.name, operation, f"{operation} failed in the {tier.name} tier: {error}")

    def _warn_once(self, where: str, operation: str, message: str) -> None:
        with self._guard:
            if (where, operation) in self._warned:
                return
            self._warned.add((where, operation))
        log.warning("kvass: %s; treated as a miss, counted in kvass_errors_total from now on", message)


def _close_all() -> None:
    for cache in list(_open):
        cache.close(_EXIT_PATIENCE)


atexit.register(_close_all)

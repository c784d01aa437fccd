"""KVCache: lookup, load, store, prefetch, pin, forget, explain over an ordered list of tiers."""

import atexit
import contextlib
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
from kvass.cache.finding import find, look
from kvass.cache.inspection import Explanation, StoredChunk, explanation, opener
from kvass.cache.loading import Loader, LoadResult, Ready
from kvass.cache.match import Match
from kvass.cache.moving import FAILURES, copy, lacking, promotions, sequence_items
from kvass.cache.pool import KVView, Pool, Scratch
from kvass.cache.staging import stage
from kvass.chunks import Tokens, as_tokens
from kvass.clock import Clock, system_clock
from kvass.codecs.base import Codec
from kvass.codecs.raw import Raw
from kvass.config import Settings
from kvass.errors import ConfigError, CorruptObjectError, TierError, TierUnavailableError
from kvass.keys import Namespace, address, chain, next_key, parse_address
from kvass.tiers.base import Lease, Tier, Usage, WriteItem
from kvass.tiers.directory import DirectoryTier, on_tmpfs
from kvass.tiers.memory import MemoryTier
from kvass.tiers.remote import RemoteTier
from kvass.tiers.remotes import configured

log = logging.getLogger("kvass.cache")

TokenIds = Sequence[int] | npt.NDArray[np.integer]

_STAGE_SECONDS = 60.0
"""What a staging may take where nobody set a nearer deadline."""

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
        shards: tuple[int, ...] = (0,),
        exists_seconds: float = 0.2,
        lane_objects: int = 4096,
        clock: Clock = system_clock,
    ):
        """`tiers`: fastest first, remote ones last; closed with the cache. `shards`: the parts of each group
        (tensor-parallel ranks) that lookups must find and stores write. `exists_seconds`: what a lookup
        waits for remote tiers, all together. `lane_objects`: how many objects may wait for a lower tier."""
        self.tiers = list(tiers)
        self.chunk_tokens = chunk_tokens
        self.shards = shards
        self.unavailable: dict[str, str] = {}
        self._store_deadline = store_deadline
        self._clock = clock
        self._exists_seconds = exists_seconds
        self._local = [tier for tier in self.tiers if not tier.remote]
        self._executor = Executor(
            io_threads,
            self._keep_house,
            lanes=[tier.name for tier in self.tiers[1:]],
            lane_objects=lane_objects,
        )
        self._codec: Codec = Raw()
        self._warned: set[tuple[str, str]] = set()
        self._guard = threading.Lock()
        self._stalled: Future[None] | None = None
        self._pid = os.getpid()
        self._closed = False
        _open.add(self)

    @classmethod
    def open(
        cls,
        settings: Settings | None = None,
        *,
        chunk_tokens: int | None = None,
        shards: tuple[int, ...] = (0,),
    ) -> Self:
        """A cache with the tiers that the settings name. A tier of this machine that cannot be used is left
        out, with a warning; `unavailable` says why. Raises ConfigError for contradictory settings."""
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
        remotes = list(configured(settings))
        if remotes and not tiers:
            raise ConfigError(f"the {remotes[0][0]} tier needs the host tier; set host_bytes to more than 0")
        tiers += [
            RemoteTier(name, store, call_seconds=settings.remote_call_seconds, threads=settings.io_threads)
            for name, store in remotes
        ]
        cache = cls(
            tiers,
            chunk_tokens=chunk_tokens or settings.chunk_tokens,
            io_threads=settings.io_threads,
            store_deadline=settings.store_deadline,
            shards=shards,
            exists_seconds=settings.remote_exists_seconds,
            lane_objects=settings.remote_queue_objects,
        )
        cache.unavailable = unavailable
        return cache

    # -- lookup and load ------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        """Whether there are tiers on other machines."""
        return len(self._local) < len(self.tiers)

    def _usable(self) -> list[Tier]:
        """The tiers, fastest first; none once the cache is closed, nor in a forked child, where its threads
        do not live and locks may be held for ever."""
        return [] if self._closed or self._pid != os.getpid() else self.tiers

    def _here(self) -> list[Tier]:
        """Those of this machine."""
        return self._local if self._usable() else []

    def _within(self, namespace: Namespace, until: float | None = None) -> list[Tier]:
        """The tiers, for objects of one namespace, until that time (monotonic seconds)."""
        if not self.remote:
            return self._usable()
        root = namespace.root()
        return [tier.within(root, until) for tier in self._usable()]

    def lookup(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        *,
        limit: int | None = None,
        keys: list[bytes] | None = None,
        others: Sequence[Namespace] = (),
        local: bool = False,
    ) -> Match:
        """The longest beginning of `tokens` that is stored, to the token, at most `limit` tokens.

        `keys`: the chain of the whole chunks, where the caller has it already. `others`: namespaces that
        the caller may read too, looked at where `namespace` does not have all; the longest match is
        returned, and names its own. `local`: only the tiers of this machine are asked. Costs one index read
        a chunk and namespace, and a round trip to each remote tier where the nearer ones do not have all.
        Never raises because of a tier. Raises InputError for unusable tokens.
        """
        began = time.perf_counter()
        array = as_tokens(tokens)
        limit = array.size if limit is None else max(0, min(limit, array.size))
        until = time.monotonic() + self._exists_seconds
        match = self._find(array, namespace, limit, keys, until, local)
        for other in others:
            if match.length < limit:
                more = self._find(array, other, limit, None, until, local)
                match = more if more.length > match.length else match
        metrics.lookup_tokens.labels("hit").inc(match.length)
        metrics.lookup_tokens.labels("miss").inc(array.size - match.length)
        metrics.lookup_seconds.observe(time.perf_counter() - began)
        return match

    def _find(
        self,
        tokens: Tokens,
        namespace: Namespace,
        limit: int,
        keys: list[bytes] | None,
        until: float,
        local: bool,
    ) -> Match:
        tiers = self._here() if local else self._within(namespace, until)
        return find(tiers, self._failed, tokens, namespace, self.chunk_tokens, limit, keys, self.shards)

    def load(
        self, match: Match, into: KVView, *, seconds: float | None = None, ready: Ready | None = None
    ) -> LoadResult:
        """Read, verify and hand over a match; several objects at once.

        Returns how many tokens are in place: all of the match, or fewer where an object turned out missing
        or corrupt or `seconds` were over. Behind them `into` may hold anything. `ready(n)` is called, in
        order, as soon as the first `n` tokens are in place; once, at the end, where a group has a window.
        What is in remote tiers only is brought to the fastest tier first.
        Never raises because of a tier. Raises InputError where `into` does not fit the spec.
        """
        if not self._usable():
            return LoadResult(0, 0, 0, 0.0, {})
        began = time.monotonic()
        until = None if seconds is None else began + seconds
        try:
            if self._is_far(match):
                self._stage(match, until)
                match = match.anywhere()
                seconds = None if until is None else until - time.monotonic()
            tiers = self._within(match.namespace, until)
            loader = Loader(tiers, self._failed, self._executor, self._codec, match, into)
            result = loader.load(seconds, ready)
        except TierUnavailableError:  # the cache was closed meanwhile
            return LoadResult(0, 0, 0, 0.0, {})
        result = result._replace(seconds=time.monotonic() - began)
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
        if any(tier.name in result.tiers for tier in self._local[1:]):
            self._executor.background(lambda: self._copy_up(match, result.tokens))

    # -- promises to an engine ------------------------------------------------------------------------

    def stage(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        *,
        limit: int | None = None,
        seconds: Callable[[int], float],
    ) -> "Future[Match]":
        """Look a prompt up in all tiers and bring what only remote ones have to the fastest one, within
        `seconds(tokens of the hit)`. Gives what this machine's tiers hold then.

        Never raises because of a tier: a closed cache gives an empty match.
        """
        array = as_tokens(tokens)

        def job() -> Match:
            match = self.lookup(array, namespace, limit=limit)
            if self._is_far(match):
                self._stage(match, time.monotonic() + seconds(match.length))
                match = self.lookup(array, namespace, limit=limit, local=True)
            return match

        try:
            return self._executor.stage(job)
        except TierUnavailableError:
            none: Future[Match] = Future()
            none.set_result(self.lookup(array, namespace, limit=0))
            return none

    def _is_far(self, match: Match) -> bool:
        """Whether something of a match is in a remote tier only."""
        if not self.remote or not match:
            return False
        there: dict[bytes, bool] = {}
        look(self._here(), self._failed, match.anywhere().pieces(), there)
        return not all(there.values())

    def _stage(self, match: Match, until: float | None) -> None:
        until = time.monotonic() + _STAGE_SECONDS if until is None else until
        tiers = self._within(match.namespace, until)
        stage(tiers, self._failed, match, until, self._executor.staging_io_map)

    def hold(self, match: Match, seconds: float) -> Lease:
        """Keep a match's objects from eviction on this machine until the lease is closed or `seconds` are
        over. `Lease.addresses` says which are held: those that were evicted meanwhile are not."""
        wanted = [piece.address for piece in match.pieces()]
        leases = []
        for tier in self._here():
            try:
                leases.append(tier.lease(wanted, seconds))
            except FAILURES as error:
                self._failed(tier, "lease", error)
        held = {one for lease in leases for one in lease.addresses}

        def release() -> None:
            for lease in leases:
                lease.close()

        return Lease(sorted(held), release)

    def check(self, match: Match) -> Match:
        """The beginning of a match that this machine's tiers have and that passes verification now."""
        into = Scratch(match.namespace)
        loader = Loader(self._here(), self._failed, self._executor, self._codec, match.anywhere(), into)
        try:
            tokens = loader.load(None, None).tokens
        except TierUnavailableError:  # the cache was closed meanwhile
            tokens = 0
        return match if tokens == match.length else match.cut(tokens)

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
                if not self._executor.behind(tier.name, len(bare), partial(self._copy_down, below, bare)):
                    metrics.dropped_stores.labels(tier.name, "queue").inc(len(bare))
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
            copy(self.tiers[0], tier, lacking(tier, items), self._executor.lane_io_map(tier.name))
        except FAILURES as error:
            self._failed(tier, "store", error)
            metrics.dropped_stores.labels(tier.name, "error").inc(len(items))
        metrics.store_seconds.labels(tier.name).observe(time.perf_counter() - began)

    def _copy_up(self, match: Match, length: int) -> None:
        """Promotion: copy what a load took from lower tiers to the fastest one."""
        try:
            for tier, items in promotions(self._local, match, length):
                copy(tier, self.tiers[0], items, self._executor.background_io_map)
        except FAILURES as error:
            self._failed(self.tiers[0], "promote", error)

    # -- prefetch, pin, forget ------------------------------------------------------------------------

    def prefetch(self, tokens: TokenIds, namespace: Namespace) -> Match:
        """Look a prompt up and bring what slower tiers have of it to the fastest, in the background."""
        match = self.lookup(tokens, namespace)
        if self._is_far(match):
            with contextlib.suppress(TierUnavailableError):
                self._executor.stage(lambda: self._stage(match, None))
        elif (match and any(tier for tier, _ in match.runs)) or (match.child and match.child[0]):
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
        for tier in reversed(self._within(namespace)):  # slowest first: nothing can be promoted from it then
            try:
                if tier.remote:
                    gone += tier.delete(self._parts(array, namespace, keys, first))
                    continue
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

    def _parts(self, tokens: Tokens, namespace: Namespace, keys: list[bytes], first: int) -> list[bytes]:
        """Every object that a text has from its chunk `first` on: whole chunks and the last partial one."""
        tail = tokens[len(keys) * self.chunk_tokens :]
        last = keys[-1] if keys else namespace.root()
        wanted = [*keys[first:], *([next_key(last, tail.tobytes(), tail.size)] if tail.size else [])]
        groups = range(len(namespace.spec.groups))
        return [address(key, group, shard) for key in wanted for group in groups for shard in self.shards]

    def remove(self, text: str) -> int:
        """Delete one object by its address (as `entries` lists it) with everything behind it, in every
        tier; objects deleted. Raises InputError when the address is malformed."""
        one = parse_address(text)
        self._executor.flush()
        gone = 0
        for tier in reversed(self._usable()):
            try:
                gone += tier.delete([one]) if tier.remote or tier.contains([one])[0] else 0
            except FAILURES as error:
                self._failed(tier, "forget", error)
        return gone

    # -- looking --------------------------------------------------------------------------------------

    def explain(self, tokens: TokenIds, namespace: Namespace, *, context: int = 16) -> Explanation:
        """Why a prompt hits as far as it does: the first token that differs from the nearest stored text,
        and up to `context` tokens of both from there on. Looks at this machine's tiers, and scans them where
        the texts part at a chunk's start, or where more is asked for than one chunk holds."""
        match = self.lookup(tokens, namespace, local=True)
        return explanation(self._here(), self._failed, match, context)

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
        tier = tier.within(root) if root else tier
        try:
            for entry in tier.scan():
                if root is None or entry.root == root:
                    yield StoredChunk(tier.name, entry, opener(tier.within(entry.root), entry))
        except FAILURES as error:
            self._failed(tier, "scan", error)

    def verify(self, progress: Callable[[StoredChunk], None] | None = None) -> tuple[int, list[str]]:
        """Read every object of this machine's tiers; those that fail are quarantined. Objects read, addresses
        bad. What is in remote tiers is verified when it is staged."""
        count, bad = 0, []
        for tier in self._here():
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

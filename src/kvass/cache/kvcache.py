"""KVCache: lookup, load, store, prefetch, pin, forget, explain over an ordered list of tiers."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvass import metrics
from kvass.cache.blobs import NO_BLOB
from kvass.cache.executor import Copying, Executor
from kvass.cache.inspection import Difference, Explanation, StoredChunk, opener
from kvass.cache.match import Match, Piece
from kvass.cache.moving import FAILURES, copy, lacking, promotions, sequence_items, stored_tokens
from kvass.cache.pool import KVView, Pool
from kvass.chunks import Tokens, as_tokens
from kvass.clock import Clock, system_clock
from kvass.codecs.base import Codec
from kvass.codecs.raw import Raw
from kvass.codecs.registry import codec
from kvass.config import Settings
from kvass.container import Array, Header, Parsed, Reader, empty_arrays, read_arrays, read_header
from kvass.errors import ConfigError, CorruptObjectError, TierError
from kvass.keys import KEY_BYTES, Namespace, address, chain, parse_address
from kvass.provenance import EXACT
from kvass.tiers.base import Child, Tier, Usage, WriteItem
from kvass.tiers.directory import DirectoryTier, on_tmpfs
from kvass.tiers.memory import MemoryTier

log = logging.getLogger("kvass.cache")

TokenIds = Sequence[int] | npt.NDArray[np.integer]

_GALLOP = 64
"""Keys asked for at once while looking for the first that is missing."""


class LoadResult(NamedTuple):
    """What a load put in place: the first `tokens` tokens, `bytes` read and verified, by tier."""

    tokens: int
    bytes: int
    verified: int
    seconds: float
    tiers: dict[str, int]


@dataclass(slots=True)
class StoreTicket:
    """A store under way. The source is free already; `wait` until its objects are visible."""

    copied: bool
    _future: "Future[None]"
    bytes: int = 0
    objects: int = 0

    def wait(self, seconds: float | None = None) -> Self:
        """Wait until the fastest tier has the objects (lower tiers: `KVCache.flush`)."""
        self._future.result(seconds)
        return self


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
        self._closed = False

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

    # -- lookup ---------------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        *,
        limit: int | None = None,
        keys: list[bytes] | None = None,
    ) -> Match:
        """The longest beginning of `tokens` that is stored, to the token, at most `limit` tokens.

        `keys`: the chain of the whole chunks, where the caller has it already. Costs one index read a
        chunk. Never raises because of a tier. Raises InputError for unusable tokens.
        """
        began = time.perf_counter()
        array = as_tokens(tokens)
        limit = array.size if limit is None else max(0, min(limit, array.size))
        root = namespace.root()
        if keys is None:
            keys = chain(root, array[:limit], self.chunk_tokens)
        whole = limit // self.chunk_tokens
        primary = [key + address(b"", 0) for key in keys[:whole]]
        runs, found = [], 0
        for number, tier in enumerate(self.tiers):
            more = self._leading(tier, primary, found)
            if more:
                runs.append((number, more))
                found += more
        length, child = found * self.chunk_tokens, None
        if length < limit:
            parent = primary[found - 1] if found else address(root, 0)
            child = self._nearest(parent, array[length:limit][: self.chunk_tokens])
            length += child[1].common if child else 0
        match = Match(array, namespace, self.chunk_tokens, length, keys, tuple(runs), child)
        if len(namespace.spec.groups) > 1 or namespace.spec.groups[0].window is not None:
            match = self._with_all_groups(match)
        metrics.lookup_tokens.labels("hit").inc(match.length)
        metrics.lookup_tokens.labels("miss").inc(array.size - match.length)
        metrics.lookup_seconds.observe(time.perf_counter() - began)
        return match

    def _leading(self, tier: Tier, addresses: list[bytes], start: int) -> int:
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
            self._failed(tier, "lookup", error)
        return found

    def _nearest(self, parent: bytes, tokens: Tokens) -> tuple[int, Child] | None:
        best: tuple[int, Child] | None = None
        for number, tier in enumerate(self.tiers):
            try:
                child = tier.nearest_child(parent, tokens)
            except FAILURES as error:
                self._failed(tier, "lookup", error)
                continue
            if child is not None and (best is None or child.common > best[1].common):
                best = (number, child)
        return best

    def _with_all_groups(self, match: Match) -> Match:
        """Shorten a match until every group has the objects that its window still needs there."""
        while match.length:
            missing = [piece for piece in match.pieces() if not self._there(piece)]
            if not missing:
                return match
            match = match.cut(max(piece.start for piece in missing))
        return match

    def _there(self, piece: Piece) -> bool:
        for number, tier in enumerate(self.tiers):
            if number < piece.tier:
                continue
            try:
                if tier.contains([piece.address])[0]:
                    return True
            except FAILURES as error:
                self._failed(tier, "lookup", error)
        return False

    # -- load -----------------------------------------------------------------------------------------

    def load(
        self,
        match: Match,
        into: KVView,
        *,
        seconds: float | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> LoadResult:
        """Read, verify and hand over a match; several objects at once.

        Returns how many tokens are in place: all of the match, or fewer where an object turned out missing
        or corrupt or `seconds` were over. Behind them `into` may hold anything. `ready(n)`
        is called, in order, as soon as the first `n` tokens are in place.
        """
        began = time.perf_counter()
        length, total = match.length, 0
        have: set[tuple[int, int]] = set()
        by_tier: dict[str, int] = {}
        deadline = None if seconds is None else began + seconds
        while length:
            pieces = match.pieces(length, have)
            bad: list[int] = []
            announced = 0

            def one(piece: Piece) -> tuple[Piece, str, int]:
                if deadline is not None and time.perf_counter() > deadline:
                    return piece, "", 0
                return piece, *self._load_piece(match, piece, into)

            for piece, tier, size in self._executor.io_map(one, pieces):
                if not size:
                    bad.append(piece.start)
                    continue
                have.add((piece.chunk, piece.group))
                total += size
                by_tier[tier] = by_tier.get(tier, 0) + size
                if ready is not None and not bad and piece.start > announced:
                    announced = piece.start
                    ready(announced)
            if not bad:
                break
            length = min(bad)
        if ready is not None and length:
            ready(length)
        self._after_load(match, length, by_tier)
        took = time.perf_counter() - began
        metrics.load_seconds.observe(took)
        for name, size in by_tier.items():
            metrics.load_bytes.labels(name).inc(size)
        return LoadResult(length, total, total, took, by_tier)

    def _load_piece(self, match: Match, piece: Piece, into: KVView) -> tuple[str, int]:
        """Load one object from the first tier that has it whole: the tier's name and the bytes; 0: none."""
        for tier in self.tiers[piece.tier :]:
            try:
                with tier.open(piece.address) as reader:
                    return tier.name, self._read(match, piece, reader, into)
            except KeyError:
                continue
            except CorruptObjectError as error:
                self._failed(tier, "load", error)
                self._executor.background(partial(tier.quarantine, piece.address))
            except FAILURES as error:
                self._failed(tier, "load", error)
        return "", 0

    def _read(self, match: Match, piece: Piece, reader: Reader, into: KVView) -> int:
        """Read and verify one object, which must be exactly the one asked for. Bytes read."""
        parsed = read_header(reader)
        header = parsed.header
        group = match.namespace.spec.groups[piece.group]
        wanted = match.tokens[piece.start : piece.start + piece.used].tolist()
        if (
            (header.key, header.group, header.position)
            != (piece.address[:KEY_BYTES].hex(), piece.group, piece.start)
            or len(header.tokens) != piece.stored
            or header.tokens[: piece.used] != wanted
            or header.namespace.spec.groups[piece.group] != group
            or header.provenance != EXACT
        ):
            raise CorruptObjectError("object is not the one that its address says")
        targets = into.arrays(piece.group, piece.start, piece.start + piece.used)
        coder = self._codec_of(header)
        if coder.in_place and piece.used == piece.stored:
            coder.decode(_shapes_only(parsed), group, piece.stored)
            return read_arrays(reader, parsed, targets)
        stored = empty_arrays(parsed)
        size = read_arrays(reader, parsed, stored)
        for name, array in coder.decode(stored, group, piece.stored).items():
            targets[name][:] = array[:, : piece.used]
        return size

    def _codec_of(self, header: Header) -> Codec:
        if len(header.codec) != 1:
            raise CorruptObjectError("object has a codec chain that this version cannot read")
        if header.codec[0].name == self._codec.name:
            return self._codec
        try:
            return codec(header.codec[0].name)
        except ConfigError as error:
            raise CorruptObjectError(str(error)) from error

    def _after_load(self, match: Match, length: int, by_tier: dict[str, int]) -> None:
        """Note the use, and bring what came from a slower tier up."""
        used = [piece.address for piece in match.pieces(length)] if length else []
        if not used:
            return
        for tier in self.tiers:
            if tier.name in by_tier:
                try:
                    tier.touch(used)
                except FAILURES as error:
                    self._failed(tier, "touch", error)
        if any(name != self.tiers[0].name for name in by_tier):
            self._executor.background(lambda: self._copy_up(match, length))

    # -- store ----------------------------------------------------------------------------------------

    def store(self, tokens: TokenIds, namespace: Namespace, source: KVView) -> StoreTicket:
        """Keep a sequence's KV: whole chunks and the last partial one; what is there already is left.

        Returns once the source was copied (or the store given up, after `store_deadline`): the source may
        then be reused. The objects become visible soon after, in lower tiers later.
        """
        array = as_tokens(tokens)
        copying = Copying()
        ticket: StoreTicket

        def job() -> None:
            try:
                self._store(array, namespace, source, copying, ticket)
            finally:
                copying.over()

        began = threading.Event()

        def wait_for_ticket() -> None:
            began.wait()
            job()

        ticket = StoreTicket(False, self._executor.write(wait_for_ticket))
        began.set()
        ticket.copied = copying.wait(self._store_deadline)
        if not ticket.copied:
            metrics.dropped_stores.labels(self.tiers[0].name if self.tiers else "none", "deadline").inc()
            self._warn_once("store", "deadline", "a store waited too long and was given up")
        return ticket

    def _store(
        self, tokens: Tokens, namespace: Namespace, source: KVView, copying: Copying, ticket: StoreTicket
    ) -> None:
        if not self.tiers or not tokens.size:
            return
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
            for number, items in promotions(self.tiers, match, length).items():
                copy(self.tiers[number], self.tiers[0], items, self._executor.background_io_map)
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
        for tier in self.tiers:
            try:
                pinned = max(pinned, tier.pin(addresses, until))
            except FAILURES as error:
                self._failed(tier, "pin", error)
        return match.length if pinned else 0

    def forget(self, tokens: TokenIds, namespace: Namespace, *, keep: int = 0) -> int:
        """Delete a prompt's stored chunks from the one that holds token `keep` on, with everything stored
        behind them, in every tier; objects deleted. Pins do not hold against this."""
        array = as_tokens(tokens)
        root = namespace.root()
        first = min(keep, array.size) // self.chunk_tokens
        keys = chain(root, array, self.chunk_tokens)
        parent = address(keys[first - 1], 0) if first else address(root, 0)
        self._executor.flush()
        gone = 0
        for tier in self.tiers:
            try:
                if first < len(keys):
                    gone += tier.delete([address(keys[first], 0)])
                    continue
                rest = array[first * self.chunk_tokens :]
                while (child := tier.nearest_child(parent, rest)) and child.common == rest.size:
                    gone += tier.delete([child.address])
                if child is not None and child.common == child.length:
                    gone += tier.delete([child.address])
            except FAILURES as error:
                self._failed(tier, "forget", error)
        return gone

    def remove(self, text: str) -> int:
        """Delete one object by its address (as `entries` lists it) with everything behind it, in every
        tier; objects deleted. Raises InputError when the address is malformed."""
        one = parse_address(text)
        self._executor.flush()
        gone = 0
        for tier in self.tiers:
            try:
                gone += tier.delete([one]) if tier.contains([one])[0] else 0
            except FAILURES as error:
                self._failed(tier, "forget", error)
        return gone

    # -- looking --------------------------------------------------------------------------------------

    def explain(self, tokens: TokenIds, namespace: Namespace, *, context: int = 16) -> Explanation:
        """Why a prompt hits as far as it does: the first token that differs from the nearest stored text,
        and up to `context` tokens of both from there on."""
        match = self.lookup(tokens, namespace)
        size, hit = match.tokens.size, match.length
        if hit == size:
            return Explanation(size, hit, "everything is stored", None)
        chunks = sum(count for _, count in match.runs)
        stored = self._text_behind(match, chunks)
        if stored is None and not hit:
            return Explanation(size, hit, "nothing is stored that begins like this prompt", None)
        at = hit - chunks * self.chunk_tokens
        if stored is None or at >= stored.size:
            return Explanation(size, hit, "what is stored ends here", None)
        difference = Difference(
            hit, match.tokens[hit : hit + context].tolist(), stored[at : at + context].tolist()
        )
        return Explanation(size, hit, f"token {hit} differs from what is stored", difference)

    def _text_behind(self, match: Match, chunks: int) -> Tokens | None:
        """Tokens of the stored chunk that agrees longest with the prompt after `chunks` whole chunks."""
        root = address(match.namespace.root(), 0)
        parent = address(match.keys[chunks - 1], 0) if chunks else root
        rest = match.tokens[chunks * self.chunk_tokens :][: self.chunk_tokens]
        nearest = match.child or self._nearest(parent, rest)
        if nearest is None:
            return None
        number, child = nearest
        piece = Piece(chunks, 0, child.address, 0, child.length, child.common, number)
        return stored_tokens(self.tiers[number], piece)

    def context(self, tokens: TokenIds, namespace: Namespace) -> tuple[int, Pool]:
        """What is stored of a prompt, as arrays: how many tokens, and a pool that holds their KV.

        Layers with a window hold only what it still sees.
        """
        match = self.lookup(tokens, namespace)
        pool = Pool(namespace.spec, match.length)
        return self.load(match, pool).tokens, pool

    def entries(self, namespace: Namespace | None = None) -> Iterator[StoredChunk]:
        """All stored objects, tier by tier; only those of `namespace` where one is given."""
        root = namespace.root() if namespace else None
        for tier in self.tiers:
            try:
                for entry in tier.scan():
                    if root is None or entry.root == root:
                        yield StoredChunk(tier.name, entry, opener(tier, entry.address))
            except FAILURES as error:
                self._failed(tier, "scan", error)

    def verify(self, progress: Callable[[StoredChunk], None] | None = None) -> tuple[int, list[str]]:
        """Read every object of every tier; those that fail are quarantined. Objects read, addresses bad."""
        count, bad = 0, []
        for stored in self.entries():
            count += 1
            try:
                stored.arrays()
            except KeyError:
                count -= 1  # evicted meanwhile
            except CorruptObjectError as error:
                tier = next(tier for tier in self.tiers if tier.name == stored.tier)
                self._failed(tier, "verify", error)
                bad.append(stored.address)
                tier.quarantine(stored.entry.address)
            if progress is not None:
                progress(stored)
        return count, bad

    def stats(self) -> dict[str, Usage]:
        """Usage of each tier that answers."""
        found = {}
        for tier in self.tiers:
            try:
                found[tier.name] = tier.usage()
            except FAILURES as error:
                self._failed(tier, "stats", error)
        return found

    # -- life -----------------------------------------------------------------------------------------

    def flush(self, seconds: float | None = None) -> None:
        """Wait until everything stored so far is visible in every tier that takes it."""
        self._executor.flush(seconds)

    def close(self) -> None:
        """Finish what is pending and close the tiers. More than once is fine."""
        if self._closed:
            return
        self._closed = True
        self._executor.close()
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


def _shapes_only(parsed: Parsed) -> dict[str, Array]:
    """Arrays without memory behind them, to hold shapes and dtypes against the spec before reading."""
    return {
        name: np.broadcast_to(np.empty((), stored.dtype), stored.shape)
        for name, stored in parsed.arrays.items()
    }

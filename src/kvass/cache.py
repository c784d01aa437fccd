"""KVCache: lookup, load, store, prefetch, pin, forget, explain over an ordered list of tiers."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvass import metrics
from kvass.chunks import Tokens, as_tokens, common_prefix
from kvass.clock import Clock, system_clock
from kvass.codecs.base import Codec
from kvass.codecs.raw import Raw
from kvass.codecs.registry import codec
from kvass.config import Settings
from kvass.container import (
    Array,
    Blob,
    Buffer,
    Encoded,
    Header,
    Parsed,
    Reader,
    empty_arrays,
    read_arrays,
    read_header,
)
from kvass.errors import ConfigError, CorruptObjectError, TierError
from kvass.executor import Copying, Executor
from kvass.keys import (
    FORMAT_VERSION,
    Namespace,
    address,
    address_text,
    chain,
    content_key,
    next_key,
    parse_address,
)
from kvass.pool import KVView, Pool
from kvass.provenance import EXACT
from kvass.tiers.base import Child, Entry, Tier, Usage, WriteItem
from kvass.tiers.directory import DirectoryTier, on_tmpfs
from kvass.tiers.memory import MemoryTier

log = logging.getLogger("kvass.cache")

TokenIds = Sequence[int] | npt.NDArray[np.integer]

_GALLOP = 64
"""Keys asked for at once while looking for the first that is missing."""
_COPY_BYTES = 1 << 20
_FAILURES = (TierError, CorruptObjectError, OSError)


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored of a prompt: its first `length` tokens, in whole chunks and the beginning of one more.

    `runs`: (index of the tier, chunks) in order; `child`: the chunk whose beginning is used, and its tier.
    """

    tokens: Tokens
    namespace: Namespace
    chunk_tokens: int
    length: int
    keys: list[bytes] = field(repr=False)
    runs: tuple[tuple[int, int], ...]
    child: tuple[int, Child] | None

    def __bool__(self) -> bool:
        return self.length > 0


class _Piece(NamedTuple):
    """One object to be loaded: its chunk, group, place in the sequence, stored and used tokens."""

    chunk: int
    group: int
    address: bytes
    start: int
    stored: int
    used: int
    tier: int


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


class Difference(NamedTuple):
    """Where a prompt and the nearest stored text part: ids of both from there on."""

    position: int
    prompt: list[int]
    stored: list[int]


class Explanation(NamedTuple):
    """Why a prompt hit as far as it did."""

    tokens: int
    hit: int
    reason: str
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One stored object as a researcher sees it: header, and arrays verified when they are read."""

    tier: str
    entry: Entry
    _open: Callable[[], tuple[Parsed, dict[str, Array]]]

    @property
    def address(self) -> str:
        """The object's address, for `show` and `rm`."""
        return address_text(self.entry.address)

    def header(self) -> Header:
        """What the object says of itself. Raises CorruptObjectError."""
        return self._open()[0].header

    def arrays(self) -> dict[str, Array]:
        """`k`, `v` `[layers, tokens, kv_heads, dim]`. Raises CorruptObjectError."""
        return self._open()[1]


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
            keys = chain(root, array[: limit + self.chunk_tokens], self.chunk_tokens)
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
        except _FAILURES as error:
            self._failed(tier, "lookup", error)
        return found

    def _nearest(self, parent: bytes, tokens: Tokens) -> tuple[int, Child] | None:
        best: tuple[int, Child] | None = None
        for number, tier in enumerate(self.tiers):
            try:
                child = tier.nearest_child(parent, tokens)
            except _FAILURES as error:
                self._failed(tier, "lookup", error)
                continue
            if child is not None and (best is None or child.common > best[1].common):
                best = (number, child)
        return best

    def _with_all_groups(self, match: Match) -> Match:
        """Shorten a match until every group has the objects that its window still needs there."""
        while match.length:
            missing = [piece for piece in self._pieces(match, match.length, ()) if not self._there(piece)]
            if not missing:
                return match
            match = self._shortened(match, max(piece.start for piece in missing))
        return match

    def _there(self, piece: _Piece) -> bool:
        for number, tier in enumerate(self.tiers):
            if number < piece.tier:
                continue
            try:
                if tier.contains([piece.address])[0]:
                    return True
            except _FAILURES as error:
                self._failed(tier, "lookup", error)
        return False

    def _shortened(self, match: Match, length: int) -> Match:
        """The same match, cut at a chunk's start."""
        left, runs = length // self.chunk_tokens, []
        for tier, chunks in match.runs:
            taken = min(chunks, left)
            if taken:
                runs.append((tier, taken))
            left -= taken
        return Match(match.tokens, match.namespace, match.chunk_tokens, length, match.keys, tuple(runs), None)

    def _pieces(self, match: Match, length: int, have: Sequence[tuple[int, int]]) -> list[_Piece]:
        """Objects that a hit of `length` tokens needs and that are not in `have` (chunk, group)."""
        size = match.chunk_tokens
        tiers = [tier for tier, chunks in match.runs for _ in range(chunks)]
        found = []
        for chunk in range(-(-length // size)):
            start = chunk * size
            used = min(size, length - start)
            if chunk < len(tiers):
                key, stored, tier = match.keys[chunk], size, tiers[chunk]
            else:
                assert match.child is not None
                tier, child = match.child
                key, stored = child.address[:32], child.length
            for number, group in enumerate(match.namespace.spec.groups):
                if start + used > group.first_needed(length) and (chunk, number) not in have:
                    found.append(_Piece(chunk, number, address(key, number), start, stored, used, tier))
        return found

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
            pieces = self._pieces(match, length, tuple(have))
            bad: list[int] = []
            announced = 0

            def one(piece: _Piece) -> tuple[_Piece, str, int]:
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

    def _load_piece(self, match: Match, piece: _Piece, into: KVView) -> tuple[str, int]:
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
            except _FAILURES as error:
                self._failed(tier, "load", error)
        return "", 0

    def _read(self, match: Match, piece: _Piece, reader: Reader, into: KVView) -> int:
        """Read and verify one object, which must be exactly the one asked for. Bytes read."""
        parsed = read_header(reader)
        header = parsed.header
        group = match.namespace.spec.groups[piece.group]
        wanted = match.tokens[piece.start : piece.start + piece.used].tolist()
        if (
            (header.key, header.group, header.position)
            != (piece.address[:32].hex(), piece.group, piece.start)
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
        used = [piece.address for piece in self._pieces(match, length, ())] if length else []
        if not used:
            return
        for tier in self.tiers:
            if tier.name in by_tier:
                try:
                    tier.touch(used)
                except _FAILURES as error:
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
        began = time.perf_counter()
        items = self._items(tokens, namespace, source, copying)
        if not items or not self.tiers:
            return
        first = self.tiers[0]
        complete = False
        try:
            missing = self._missing(first, items)
            done = first.write(missing, self._executor.io_map)
            complete = all(done)
            ticket.objects = sum(done)
            ticket.bytes = sum(item.blob.size for item, ok in zip(missing, done, strict=True) if ok)
            metrics.store_seconds.labels(first.name).observe(time.perf_counter() - began)
        except _FAILURES as error:
            self._failed(first, "store", error)
        bare = [item._replace(blob=_NO_BLOB) for item in items]  # the source must not be kept alive
        for tier in self.tiers[1:]:
            if complete:
                self._executor.background(partial(self._copy_down, tier, bare))
            else:  # the fastest tier has no room for all of it: straight from the source, then
                self._write_missing(tier, items)

    def _items(
        self, tokens: Tokens, namespace: Namespace, source: KVView, copying: Copying
    ) -> list[WriteItem]:
        """All objects of a sequence, in order."""
        size, root = self.chunk_tokens, namespace.root()
        keys = chain(root, tokens, size)
        if tokens.size % size:
            tail = tokens[len(keys) * size :]
            keys.append(next_key(keys[-1] if keys else root, tail.tobytes(), tail.size))
        items = []
        for chunk, key in enumerate(keys):
            part = tokens[chunk * size : (chunk + 1) * size]
            for number in range(len(namespace.spec.groups)):
                parent = address(keys[chunk - 1], number) if chunk else None
                blob = _ChunkBlob(
                    self._codec, namespace, key, parent, root, number, chunk * size, part, source
                )
                items.append(
                    WriteItem(address(key, number), parent, root, chunk * size, part.size,
                              part if number == 0 else None, copying.wrap(blob))
                )  # fmt: skip
        return items

    def _missing(self, tier: Tier, items: list[WriteItem]) -> list[WriteItem]:
        """Items that a tier lacks; a tail that lies within a longer stored chunk is not lacking."""
        there = tier.contains([item.address for item in items])
        lacking = [item for item, ok in zip(items, there, strict=True) if not ok]
        last = items[-1]
        if lacking and last.length < self.chunk_tokens:
            primary = next(item for item in items if item.position == last.position)
            assert primary.tokens is not None
            child = tier.nearest_child(primary.parent or address(primary.root, 0), primary.tokens)
            if child is not None and child.common == primary.length:
                lacking = [item for item in lacking if item.position != last.position]
        return lacking

    def _write_missing(self, tier: Tier, items: list[WriteItem]) -> None:
        try:
            tier.write(self._missing(tier, items), self._executor.io_map)
        except _FAILURES as error:
            self._failed(tier, "store", error)

    def _copy_down(self, tier: Tier, items: list[WriteItem]) -> None:
        """Cascade: write to a lower tier what it lacks, from the fastest one."""
        began = time.perf_counter()
        try:
            missing = self._missing(tier, items)
        except _FAILURES as error:
            self._failed(tier, "store", error)
            return
        self._copy(self.tiers[0], tier, missing)
        metrics.store_seconds.labels(tier.name).observe(time.perf_counter() - began)

    def _copy_up(self, match: Match, length: int) -> None:
        """Promotion: copy what a load took from lower tiers to the fastest one."""
        root = match.namespace.root()
        pieces = self._pieces(match, length, ())
        size, fastest = match.chunk_tokens, self.tiers[0]
        for number, tier in enumerate(self.tiers[1:], 1):
            items = []
            for piece in pieces:
                if piece.tier != number:
                    continue
                parent = address(match.keys[piece.chunk - 1], piece.group) if piece.chunk else None
                stored = match.tokens[piece.start : piece.start + size] if piece.stored == size else None
                if piece.used < piece.stored:
                    stored = self._stored_tokens(tier, piece)
                    if stored is None:
                        continue
                elif stored is None:
                    stored = match.tokens[piece.start : piece.start + piece.stored]
                items.append(
                    WriteItem(piece.address, parent, root, piece.start, piece.stored,
                              stored if piece.group == 0 else None, _NO_BLOB)
                )  # fmt: skip
            try:
                there = fastest.contains([item.address for item in items])
            except _FAILURES as error:
                self._failed(fastest, "promote", error)
                return
            self._copy(tier, fastest, [item for item, ok in zip(items, there, strict=True) if not ok])

    def _stored_tokens(self, tier: Tier, piece: _Piece) -> Tokens | None:
        try:
            with tier.open(piece.address) as reader:
                return as_tokens(read_header(reader).header.tokens)
        except (KeyError, *_FAILURES):
            return None

    def _copy(self, source: Tier, target: Tier, items: list[WriteItem]) -> None:
        """Copy objects between tiers byte by byte; whoever reads them verifies them."""
        items = [item._replace(blob=_TierBlob(source, item.address)) for item in items]
        try:
            items = [item for item in items if item.blob.size]
            target.write(items, self._executor.background_io_map)
        except (KeyError, *_FAILURES) as error:
            self._failed(target, "copy", error)

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
        addresses = [piece.address for piece in self._pieces(match, match.length, ())]
        until = self._clock() + seconds if seconds else 0.0
        pinned = 0
        for tier in self.tiers:
            try:
                pinned = max(pinned, tier.pin(addresses, until))
            except _FAILURES as error:
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
            except _FAILURES as error:
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
            except _FAILURES as error:
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
        piece = _Piece(chunks, 0, child.address, 0, child.length, child.common, number)
        return self._stored_tokens(self.tiers[number], piece)

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
                        yield StoredChunk(tier.name, entry, _opener(tier, entry.address))
            except _FAILURES as error:
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
            except _FAILURES as error:
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
            except _FAILURES as error:
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


def _opener(tier: Tier, one: bytes) -> Callable[[], tuple[Parsed, dict[str, Array]]]:
    def opened() -> tuple[Parsed, dict[str, Array]]:
        with tier.open(one) as reader:
            parsed = read_header(reader)
            stored = empty_arrays(parsed)
            read_arrays(reader, parsed, stored)
        header = parsed.header
        if address(bytes.fromhex(header.key), header.group, header.shard) != one:
            raise CorruptObjectError("object is not the one that its address says")
        group = header.namespace.spec.groups[header.group]
        return parsed, codec(header.codec[0].name).decode(stored, group, len(header.tokens))

    return opened


class _ChunkBlob:
    """A chunk of the source, encoded when it is written: the source is not touched before."""

    def __init__(
        self, coder: Codec, namespace: Namespace, key: bytes, parent: bytes | None, root: bytes, group: int,
        position: int, tokens: Tokens, source: KVView,
    ):  # fmt: skip
        arrays = source.arrays(group, position, position + tokens.size)
        header = Header(
            digest="", format=FORMAT_VERSION, key=key.hex(), group=group, shard=0,
            parent=address_text(parent) if parent else "",
            content_key=content_key(root, tokens.tobytes()).hex(), namespace=namespace,
            position=position, tokens=tokens.tolist(), codec=[coder.step()], provenance=EXACT, digests={},
        )  # fmt: skip
        self._encoded = Encoded(header, coder.encode(arrays, namespace.spec.groups[group]))
        self.size = self._encoded.size

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        return self._encoded.pieces()


class _TierBlob:
    """An object of one tier on its way into another."""

    def __init__(self, tier: Tier, one: bytes):
        self._tier = tier
        self._address = one
        try:
            with tier.open(one) as reader:
                self.size = reader.size
        except (KeyError, *_FAILURES):
            self.size = 0

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        buffer = memoryview(bytearray(min(_COPY_BYTES, self.size)))
        try:
            with self._tier.open(self._address) as reader:
                for offset in range(0, self.size, len(buffer)):
                    piece = buffer[: min(len(buffer), self.size - offset)]
                    reader.read_into(offset, [piece])
                    yield offset, [piece]
        except KeyError:
            raise TierError("the object was evicted before it was copied") from None


class _Nothing:
    size = 0

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        return iter(())


_NO_BLOB: Blob = _Nothing()

__all__ = [
    "Difference",
    "Explanation",
    "KVCache",
    "LoadResult",
    "Match",
    "StoreTicket",
    "StoredChunk",
    "common_prefix",
]

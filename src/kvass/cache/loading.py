"""Loading a match: each object from the first tier that has it whole, verified, straight into its place."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvass.cache.executor import Executor
from kvass.cache.finding import Failed
from kvass.cache.match import Match, Piece
from kvass.cache.moving import FAILURES, check_size, quarantine
from kvass.cache.pool import KVView, check_fit
from kvass.cache.recoding import decoded
from kvass.chunks import as_tokens
from kvass.codecs.base import Chunk, Codec
from kvass.codecs.registry import NotDecodableError
from kvass.container import Array, Header, Parsed, Reader, empty_arrays, read_arrays, read_header
from kvass.errors import CorruptObjectError
from kvass.keys import address, address_text, next_key, split_address
from kvass.provenance import Blended, Lossy
from kvass.spec import LayerGroup, numpy_dtype
from kvass.tiers.base import Tier

Ready = Callable[[int], None]


class LoadResult(NamedTuple):
    """What a load put in place: the first `tokens` tokens, `bytes` read and verified, by tier.

    The first `exact_tokens` of them are exact state; what follows is not. `given_up`: how many more could be
    read, but were coded for standing further from an end than they do here. `made`: of what was blended, how
    the part was made of which the fewest tokens were computed anew.
    """

    tokens: int
    bytes: int
    verified: int
    seconds: float
    tiers: dict[str, int]
    exact_tokens: int = 0
    given_up: int = 0
    made: Blended | None = None


class _Loaded(NamedTuple):
    """One object that was loaded: the tier it came from, and the bytes; 0: none has it. `end`: where the
    sequence ended for which it was coded, as far as its codec cares. `made`: how, if it was blended."""

    piece: Piece
    tier: str = ""
    size: int = 0
    end: int = 0
    made: Blended | None = None


class Loader:
    """Reads the objects of one match, of one namespace, into a view."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        failed: Failed,
        executor: Executor,
        decoder: Callable[[Header], Codec],
        match: Match,
        into: KVView,
        *,
        far: bool = False,
        start: int = 0,
        guard: int = 0,
    ):
        """`decoder`: see `Coding.decoder`; `far`: some of it is read from other machines, on threads that
        nothing of this one waits for; `start`: tokens, of whole chunks, that are in place already; `guard`:
        how many are given up behind them where something was coded for an end further on."""
        self._tiers = tiers
        self._failed = failed
        self._executor = executor
        self._decoder = decoder
        self._match = match
        self._root = match.namespace.root()
        self._into = into
        self._far = far
        self._start = start
        self._guard = guard

    def load(self, seconds: float | None, ready: Ready | None) -> LoadResult:
        """See `KVCache.load`. When it ends, by an exception too, no thread writes to the view any more."""
        began = time.perf_counter()
        deadline = None if seconds is None else began + seconds
        match, length, announced = self._match, self._match.length, self._start
        windowed = any(group.window is not None for group in match.namespace.spec.groups)
        have: dict[bytes, _Loaded] = {}
        given_up = 0
        by_tier: dict[str, int] = {}
        while length > self._start:
            pieces = match.pieces(length, have)
            places = [(piece, self._targets(piece)) for piece in pieces if piece.start >= self._start]
            bad: list[int] = []
            spread: Callable[..., Iterable[_Loaded]]
            if self._far:
                spread = self._executor.staging_io_map
            else:
                spread = self._executor.io_map if ready is None else self._executor.io_stream
            for one in spread(partial(self._one, deadline), places):
                if not one.size:
                    bad.append(one.piece.start)
                    continue
                have[one.piece.address] = one
                by_tier[one.tier] = by_tier.get(one.tier, 0) + one.size
                # With windows, a shorter hit needs other pieces: nothing is certain before the end.
                sure = one.piece.start - self._guard
                if ready is not None and not bad and not windowed and sure > announced:
                    announced = sure
                    ready(announced)
            if bad:
                length, given_up = min(bad), 0
            elif given_up or not self._goes_on(have.values(), length):
                break
            else:
                given_up = min(self._guard, length - self._start)
                length -= given_up  # where windows then begin earlier, their pieces are still to be loaded
        if ready is not None and length > announced:
            ready(length)
        total = sum(by_tier.values())
        made = [one.made for one in have.values() if one.made is not None]
        least = min(made, key=lambda one: one.chosen, default=None)
        seconds = time.perf_counter() - began
        return LoadResult(length, total, total, seconds, by_tier, given_up=given_up, made=least)

    def _goes_on(self, loaded: Iterable[_Loaded], length: int) -> bool:
        """Whether something of a hit's last tokens was coded for a sequence that went on behind them: by more
        than the one token that an engine always leaves."""
        last = range(length - self._guard, length)
        return any(
            one.end > length + 1
            and one.piece.start < last.stop
            and one.piece.start + one.piece.used > last.start
            for one in loaded
        )

    def _one(self, deadline: float | None, place: tuple[Piece, dict[str, Array]]) -> _Loaded:
        """Load one object from the first tier that has it whole."""
        piece, targets = place
        if deadline is not None and time.perf_counter() > deadline:
            return _Loaded(piece)
        for tier in self._tiers[piece.tier :]:
            try:
                with tier.open(piece.address) as reader:
                    return _Loaded(piece, tier.name, *self._read(piece, reader, targets))
            except KeyError:
                continue
            except NotDecodableError as error:
                self._failed(tier, "load", error)
            except CorruptObjectError as error:
                self._failed(tier, "load", error)
                if not tier.remote:  # there, one machine's bad way to it must not cost all others an object
                    self._executor.background(partial(quarantine, tier, piece.address, self._failed))
            except FAILURES as error:
                self._failed(tier, "load", error)
        return _Loaded(piece)

    def _targets(self, piece: Piece) -> dict[str, Array]:
        arrays = self._into.arrays(piece.group, piece.start, piece.start + piece.used)
        namespace = self._match.namespace
        check_fit(arrays, namespace.arrays, namespace.spec.groups[piece.group], piece.used)
        return arrays

    def _read(
        self, piece: Piece, reader: Reader, targets: dict[str, Array]
    ) -> tuple[int, int, Blended | None]:
        """Read and verify one object, which must be exactly the one asked for. Bytes read, the end for which
        it was coded, and how it was blended."""
        parsed = read_header(reader)
        check_object(self._match, self._root, piece, parsed.header)
        group = self._match.namespace.spec.groups[piece.group]
        check_size(parsed.size, group.bytes_per_token, piece.stored)
        coder = self._decoder(parsed.header)
        done, end = parsed.header.provenance, piece.start + piece.stored
        made = done if isinstance(done, Blended) else None
        if isinstance(done, Lossy):
            end += done.behind
        if coder.in_place:
            check_arrays(parsed, piece, group, targets)
            if piece.used == piece.stored:
                return read_arrays(reader, parsed, targets), end, made
        stored = empty_arrays(parsed)
        size = read_arrays(reader, parsed, stored)
        chunk = Chunk(group, piece.group, piece.start, piece.stored)
        arrays = decoded(stored, coder, chunk, list(targets))
        for name, target in targets.items():
            target[:] = arrays[name][:, : piece.used]
        return size, end, made


def check_object(match: Match, root: bytes, piece: Piece, header: Header) -> None:
    """The object must say of itself what was looked up, and its key must be that of its text: whatever an
    index says, nothing is loaded that stands behind other tokens or in another namespace, whose `root` it is.

    Raises CorruptObjectError.
    """
    key, group, shard = split_address(piece.address)
    previous = match.keys[piece.chunk - 1] if piece.chunk else root
    parent = address_text(address(previous, group, shard)) if piece.chunk else ""
    tokens = as_tokens(header.tokens)
    wanted = match.tokens[piece.start : piece.start + piece.used]
    if (
        (header.key, header.group, header.shard, header.parent) != (key.hex(), group, shard, parent)
        or (header.position, tokens.size) != (piece.start, piece.stored)
        or not np.array_equal(tokens[: piece.used], wanted)
        or next_key(previous, tokens.tobytes(), tokens.size) != key
        or (header.namespace != match.namespace and header.namespace.root() != root)
    ):
        raise CorruptObjectError("object is not the one that its address says")


def check_arrays(parsed: Parsed, piece: Piece, group: LayerGroup, names: Iterable[str]) -> None:
    """What a codec stores in place must be the canonical arrays. Raises CorruptObjectError."""
    dtype = numpy_dtype(group.dtype)
    wanted = {name: (group.shape(name, piece.stored), dtype) for name in names}
    if {name: (held.shape, held.dtype) for name, held in parsed.arrays.items()} != wanted:
        raise CorruptObjectError("object's arrays are not what the spec says")

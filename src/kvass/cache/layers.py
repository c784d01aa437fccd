"""Reading a match layer by layer: its objects stay open, and each layer is verified as it is read."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np

from kvass.cache.executor import Executor
from kvass.cache.finding import Failed
from kvass.cache.loading import check_arrays, check_object
from kvass.cache.match import Match, Piece
from kvass.cache.moving import FAILURES, check_size, quarantine
from kvass.cache.recoding import decoded
from kvass.codecs.base import Chunk, Codec
from kvass.codecs.registry import NotDecodableError
from kvass.container import Array, Header, Parsed, Reader, empty_arrays, read_arrays, read_header, read_row
from kvass.errors import CorruptObjectError, TierError
from kvass.spec import numpy_dtype
from kvass.tiers.base import Tier


class _Open(NamedTuple):
    piece: Piece
    tier: Tier
    reader: Reader
    parsed: Parsed
    coder: Codec


class Layers:
    """What is stored of a prompt, exact state of one namespace. For one thread at a time.

    Where a codec keeps arrays as they are, a layer costs its own bytes; of any other the first layer costs
    the whole object. `read` counts bytes, by tier; `failed`: something could not be had.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        failed: Failed,
        executor: Executor,
        decoder: Callable[[Header], Codec],
        match: Match,
        until: float | None,
    ):
        """As a `Loader`; `until`: nothing is read after that time (monotonic seconds)."""
        self._tiers = tiers
        self._failed = failed
        self._executor = executor
        self._decoder = decoder
        self._match = match
        self._until = until
        self._open: list[_Open] = []
        self._whole: dict[bytes, dict[str, Array]] = {}
        self._root = match.namespace.root()
        self.read: dict[str, int] = {}
        self.failed = False

    def open(self, stack: ExitStack, start: int = 0) -> bool:
        """Open the objects of token `start` and of those behind it, each in the first tier that has it whole;
        False where one cannot be had."""
        wanted = [piece for piece in self._match.pieces() if piece.start + piece.used > start]
        return all(self._opened(piece, stack) for piece in wanted)

    def _opened(self, piece: Piece, stack: ExitStack) -> bool:
        for tier in self._tiers[piece.tier :]:
            try:
                with ExitStack() as own:
                    reader = own.enter_context(tier.open(piece.address))
                    self._open.append(_Open(piece, tier, reader, *self._checked(piece, reader)))
                    stack.enter_context(own.pop_all())
                return True
            except KeyError:
                continue
            except (*FAILURES, NotDecodableError) as error:
                self._note(tier, piece, error)
        return False

    def _checked(self, piece: Piece, reader: Reader) -> tuple[Parsed, Codec]:
        namespace = self._match.namespace
        group = namespace.spec.groups[piece.group]
        parsed = read_header(reader)
        check_object(self._match, self._root, piece, parsed.header)
        check_size(parsed.size, group.bytes_per_token, piece.stored)
        coder = self._decoder(parsed.header)
        if coder.in_place:
            check_arrays(parsed, piece, group, namespace.arrays)
        return parsed, coder

    def _note(self, tier: Tier, piece: Piece, error: BaseException) -> None:
        self.failed = True
        self._failed(tier, "load", error)
        if isinstance(error, CorruptObjectError) and not tier.remote:
            self._executor.background(partial(quarantine, tier, piece.address, self._failed))

    def rows(self, layer: int, name: str, start: int, stop: int) -> Array:
        """`k` or `v` of tokens `start` to `stop` in one of the model's layers, `[tokens, heads, dim]`.

        Raises TierError where time is over or a window has passed over one of the tokens,
        CorruptObjectError where a digest fails, OSError.
        """
        spec = self._match.namespace.spec
        number, place = spec.places[layer]
        group = spec.groups[number]
        found = np.empty(group.shape(name, stop - start)[1:], numpy_dtype(group.dtype))
        there = 0
        for one in self._open:
            first, last = max(start, one.piece.start), min(stop, one.piece.start + one.piece.used)
            if one.piece.group != number or first >= last:
                continue
            if self._until is not None and time.monotonic() > self._until:
                self.failed = True
                raise TierError("a load layer by layer took longer than it may")
            try:
                row = self._row(one, name, place)
            except FAILURES as error:
                self._note(one.tier, one.piece, error)
                raise
            found[first - start : last - start] = row[first - one.piece.start : last - one.piece.start]
            there += last - first
        if there < stop - start:
            self.failed = True
            raise TierError("a window has passed over the beginning of what is asked for")
        return found

    def _row(self, one: _Open, name: str, place: int) -> Array:
        piece, size = one.piece, 0
        if one.coder.in_place:
            row = read_row(one.reader, one.parsed, name, place)
            size = row.nbytes
        else:
            if piece.address not in self._whole:
                stored = empty_arrays(one.parsed)
                size = read_arrays(one.reader, one.parsed, stored)
                namespace = self._match.namespace
                chunk = Chunk(namespace.spec.groups[piece.group], piece.group, piece.start, piece.stored)
                self._whole[piece.address] = decoded(stored, one.coder, chunk, namespace.arrays)
            row = self._whole[piece.address][name][place]
        self.read[one.tier.name] = self.read.get(one.tier.name, 0) + size
        return row

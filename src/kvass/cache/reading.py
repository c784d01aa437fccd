"""Loading what is stored of prompts, and promising it to engines."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kvass import metrics
from kvass.cache.finding import look
from kvass.cache.layers import Layers
from kvass.cache.loading import Loader, LoadResult, Ready
from kvass.cache.looking import Looking, TokenIds
from kvass.cache.match import Match
from kvass.cache.moving import FAILURES, copy, promotions
from kvass.cache.pool import KVView, Scratch
from kvass.cache.recoding import move
from kvass.cache.staging import stage
from kvass.chunks import as_tokens
from kvass.errors import TierUnavailableError
from kvass.keys import Namespace
from kvass.provenance import EXACT, codec_of_class
from kvass.quality import Budget
from kvass.tiers.base import Lease, Tier

STAGE_SECONDS = 60.0
"""What a staging may take where nobody set a nearer deadline."""


class Reading(Looking):
    """The half of a cache that reads: load, prefetch; stage, hold and check for promises."""

    def load(
        self,
        match: Match,
        into: KVView,
        *,
        seconds: float | None = None,
        ready: Ready | None = None,
        start: int = 0,
    ) -> LoadResult:
        """Read, verify and hand over a match; several objects at once.

        Returns how many tokens are in place: all of the match, or fewer where an object turned out missing
        or corrupt or `seconds` were over, or where lossy state was coded for a sequence that went on further:
        of that the last 256 tokens are given up (`LoadResult.given_up`). Behind them `into` may hold
        anything. `ready(n)` is called, in order, as soon as the first `n` tokens are in place; once, at the
        end, where a group has a window. What is in remote tiers only is brought to the fastest tier first.
        `start`: tokens of whole chunks, of an exact match, that are not wanted: they are neither read nor
        written, count as in place, and what is behind them is not promoted.
        Never raises because of a tier. Raises InputError where `into` does not fit the spec.
        """
        nothing = LoadResult(0, 0, 0, 0.0, {})
        if not self._usable():
            return nothing
        codec = codec_of_class(match.namespace.state)
        if codec is not None and not self._coding.may(match.namespace, codec, "load", match.budget):
            return self.load(match.beneath, into, seconds=seconds, ready=ready) if match.beneath else nothing
        began = time.monotonic()
        until = None if seconds is None else began + seconds
        try:
            far = self._is_far(match)
            if far:
                # some time is left for reading what could be brought
                self._stage(match, None if until is None or seconds is None else until - seconds / 5)
                match = match.anywhere()
                far = self._is_far(match)
            tiers = partial(self._within, until=until)
            result = self._load(match, into, until, ready, tiers, far=far, start=start)
        except TierUnavailableError:  # the cache was closed meanwhile
            return nothing
        result = result._replace(seconds=time.monotonic() - began)
        self._after_load(match, result, promote=not start)
        used = [tier.name for tier in self.tiers if tier.name in result.tiers]
        if used:
            metrics.load_seconds.labels(used[-1]).observe(result.seconds)
        for name, size in result.tiers.items():
            metrics.load_bytes.labels(name).inc(size)
        return result

    def _load(
        self,
        match: Match,
        into: KVView,
        until: float | None,
        ready: Ready | None,
        tiers: Callable[[Namespace], list[Tier]],
        *,
        far: bool = False,
        start: int = 0,
    ) -> LoadResult:
        """Load what is exact of a match, then what is not, until that time (monotonic seconds)."""

        def read(part: Match, start: int, tell: Ready | None) -> LoadResult:
            decoder = self._coding.reader(part.budget)
            loader = Loader(
                tiers(part.namespace), self._failed, self._executor, decoder, part, into,
                far=far, start=start, guard=self._coding.guard(part.namespace),
            )  # fmt: skip
            return loader.load(None if until is None else until - time.monotonic(), tell)

        below = match.beneath
        if not below:
            result = read(match, start, ready)
            return result._replace(exact_tokens=result.tokens if match.namespace.state == EXACT.kind else 0)
        # with windows, how much is in place is certain at the end only
        windowed = any(group.window is not None for group in match.namespace.spec.groups)
        exact = read(below, 0, None if windowed else ready)
        more = read(replace(match, beneath=below.cut(exact.tokens)), exact.tokens, ready)
        if windowed and ready is not None and more.tokens == exact.tokens > 0:
            ready(exact.tokens)
        size = exact.bytes + more.bytes
        names = exact.tiers.keys() | more.tiers.keys()
        by_tier = {name: exact.tiers.get(name, 0) + more.tiers.get(name, 0) for name in names}
        return more._replace(bytes=size, verified=size, tiers=by_tier, exact_tokens=exact.tokens)

    @contextlib.contextmanager
    def layers(
        self, match: Match, *, start: int = 0, seconds: float | None = None
    ) -> Iterator[Layers | None]:
        """A match from token `start` on, to be read layer by layer while this lasts, by one thread at a time;
        None where not all of it can be opened, or it is not exact state of one part in canonical layout.

        Objects stay readable meanwhile, those that are evicted too. What is in remote tiers only is brought
        to the fastest tier first. Never raises because of a tier; `Layers.rows` does.
        """
        space = match.namespace
        plain = space.state == EXACT.kind and space.layout == "canonical" and len(match.shards) == 1
        if not self._usable() or not match or not plain:
            yield None
            return
        until = None if seconds is None else time.monotonic() + seconds
        if self._is_far(match):
            self._stage(match, until)
            match = match.anywhere()
        with contextlib.ExitStack() as stack:
            tiers = self._within(space, until)
            found = Layers(tiers, self._failed, self._executor, self._coding.decoder, match, until)
            if not found.open(stack, start):
                yield None
                return
            began = time.monotonic()
            yield found
        size = sum(found.read.values())
        for name, count in found.read.items():
            metrics.load_bytes.labels(name).inc(count)
        if size and not found.failed:
            took = time.monotonic() - began
            done = LoadResult(match.length, size, size, took, found.read, match.length)
            self._after_load(match, done, promote=not start)

    def _after_load(self, match: Match, result: LoadResult, *, promote: bool) -> None:
        """Note the use, and bring what came from a slower tier up; with what was given up, for without it
        the next load could not tell where the sequence ends. Where nothing is left, nothing was of use."""
        if not result.tokens:
            return
        read = result.tokens + result.given_up
        pieces = [piece for length in {result.tokens, read} for piece in match.pieces(length)]
        used = list(dict.fromkeys(piece.address for piece in pieces))
        for tier in self.tiers:
            if tier.name in result.tiers:
                try:
                    tier.touch(used)
                except FAILURES as error:
                    self._failed(tier, "touch", error)
        if promote and any(tier.name in result.tiers for tier in self._local[1:]):
            self._executor.background(lambda: self._copy_up(match, read))

    def _copy_up(self, match: Match, length: int) -> None:
        """Promotion: copy what a load took from lower tiers to the fastest one."""
        run = self._executor.background_io_map
        fastest = self.tiers[0]
        try:
            for layer in match.layers():
                recoder = self._coding.recoder(fastest.name, layer.namespace)
                if recoder is None:
                    continue
                found = promotions(self._local, self._failed, layer, min(length, layer.length))
                for tier, items in found:
                    if self._coding.alike(tier.name, fastest.name, layer.namespace):
                        copy(tier, fastest, items, run)
                    else:
                        move(tier, fastest, items, recoder, self._failed, run)
        except FAILURES as error:
            self._failed(fastest, "promote", error)

    def prefetch(self, tokens: TokenIds, namespace: Namespace) -> Match:
        """Look a prompt up and bring what slower tiers have of it to the fastest, in the background."""
        match = self.lookup(tokens, namespace)
        if self._is_far(match):
            until = time.monotonic() + STAGE_SECONDS
            with contextlib.suppress(TierUnavailableError):
                self._executor.stage(lambda: self._stage(match, until))
        elif (match and any(tier for tier, _ in match.runs)) or (match.child and match.child[0]):
            self._executor.background(lambda: self._copy_up(match, match.length))
        return match

    # -- promises to an engine ------------------------------------------------------------------------

    def stage(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        *,
        limit: int | None = None,
        seconds: Callable[[int], float],
        approximate: Sequence[Namespace] = (),
        budget: Budget | None = None,
    ) -> "Future[Match]":
        """Look a prompt up in all tiers and bring what only remote ones have to the fastest one, within
        `seconds(tokens of the hit)`. Gives what this machine's tiers hold then. `approximate` and `budget` as
        in `lookup`.

        Never raises because of a tier: a closed cache gives an empty match.
        """
        array = as_tokens(tokens)
        began = time.monotonic()

        def job() -> Match:
            match = self.lookup(array, namespace, limit=limit, approximate=approximate, budget=budget)
            if self._is_far(match):
                self._stage(match, began + seconds(match.length))
                keys = match.keys if match.namespace is namespace else None
                most = match.length
                match = self._find(array, namespace, most, keys, 0.0, local=True)
                if approximate:
                    match = self._longer(match, approximate, budget, most, 0.0, True)
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
        until = time.monotonic() + STAGE_SECONDS if until is None else until
        for layer in match.layers():
            tiers = self._within(layer.namespace, until)
            with self._turns.wait(layer.namespace.root() + b"".join(layer.keys[:1]), until) as mine:
                if mine and self._is_far(layer):
                    stage(
                        tiers, self._failed, layer, until, self._executor.staging_io_map,
                        lambda: not self._closed, self._coding,
                    )  # fmt: skip

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
        """The beginning of a match that this machine's tiers have and that passes verification now. A load
        may still give some of it up (`LoadResult.given_up`)."""
        into = Scratch(match.namespace)
        try:
            result = self._load(match.anywhere(), into, None, None, lambda _: self._here())
            tokens = result.tokens + result.given_up
        except TierUnavailableError:  # the cache was closed meanwhile
            tokens = 0
        return match if tokens == match.length else match.cut(tokens)

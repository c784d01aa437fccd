"""Looking prompts up, loading what is stored of them, and promising it to engines."""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from kvass import metrics
from kvass.cache.finding import find, look
from kvass.cache.loading import Loader, LoadResult, Ready
from kvass.cache.match import Match
from kvass.cache.moving import FAILURES, copy, promotions
from kvass.cache.pool import KVView, Scratch
from kvass.cache.staging import stage
from kvass.cache.tiered import Tiered
from kvass.chunks import Tokens, as_tokens
from kvass.errors import TierUnavailableError
from kvass.keys import Namespace
from kvass.tiers.base import Lease

TokenIds = Sequence[int] | npt.NDArray[np.integer]

STAGE_SECONDS = 60.0
"""What a staging may take where nobody set a nearer deadline."""


class Reading(Tiered):
    """The half of a cache that reads: lookup, load, prefetch; stage, hold and check for promises."""

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
            far = self._is_far(match)
            if far:
                # some time is left for reading what could be brought
                self._stage(match, None if until is None or seconds is None else until - seconds / 5)
                match = match.anywhere()
                seconds = None if until is None else until - time.monotonic()
                far = self._is_far(match)
            tiers = self._within(match.namespace, until)
            loader = Loader(tiers, self._failed, self._executor, self._codec, match, into, far=far)
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

    def _copy_up(self, match: Match, length: int) -> None:
        """Promotion: copy what a load took from lower tiers to the fastest one."""
        try:
            for tier, items in promotions(self._local, self._failed, match, length):
                copy(tier, self.tiers[0], items, self._executor.background_io_map)
        except FAILURES as error:
            self._failed(self.tiers[0], "promote", error)

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
    ) -> "Future[Match]":
        """Look a prompt up in all tiers and bring what only remote ones have to the fastest one, within
        `seconds(tokens of the hit)`. Gives what this machine's tiers hold then.

        Never raises because of a tier: a closed cache gives an empty match.
        """
        array = as_tokens(tokens)
        began = time.monotonic()

        def job() -> Match:
            match = self.lookup(array, namespace, limit=limit)
            if self._is_far(match):
                self._stage(match, began + seconds(match.length))
                match = self._find(array, namespace, match.length, match.keys, 0.0, local=True)
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
        tiers = self._within(match.namespace, until)
        with self._turns.wait(match.namespace.root() + b"".join(match.keys[:1]), until) as mine:
            if mine and self._is_far(match):
                run = self._executor.staging_io_map
                stage(tiers, self._failed, match, until, run, lambda: not self._closed)

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

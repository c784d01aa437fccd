"""Looking prompts up: what is stored of them as exact state, and as such of which a request allows more."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvass import metrics
from kvass.cache.finding import find
from kvass.cache.match import Match
from kvass.cache.tiered import Tiered
from kvass.chunks import Tokens, as_tokens
from kvass.errors import InputError
from kvass.keys import Namespace, lossy_namespace
from kvass.provenance import EXACT, codec_of_class
from kvass.quality import BlendMeasured, Budget

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class Looking(Tiered):
    """`lookup`, and which approximations it may be asked for."""

    def lookup(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        *,
        limit: int | None = None,
        keys: list[bytes] | None = None,
        others: Sequence[Namespace] = (),
        local: bool = False,
        approximate: Sequence[Namespace] = (),
        budget: Budget | None = None,
    ) -> Match:
        """The longest beginning of `tokens` that is stored, to the token, at most `limit` tokens.

        `keys`: the chain of the whole chunks, where the caller has it already. `others`: namespaces that
        the caller may read too, looked at where `namespace` does not have all; the longest match is
        returned, and names its own. `local`: only the tiers of this machine are asked. Costs one index read
        a chunk and namespace, and a round trip to each remote tier where the nearer ones do not have all.

        `approximate`: lossy namespaces that the request allows (see `approximations`), in the order in which
        they are tried where exact state ends early; those that no certificate covers within `budget` (the
        settings' by default) are ignored. A longer match of one names that namespace; what is exact is
        `beneath` it, and is loaded from there.
        Never raises because of a tier. Raises InputError for unusable tokens, or an exact namespace that is
        given as an approximation.
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
        if approximate:
            match = self._longer(match, approximate, budget, limit, until, local)
        metrics.lookup_tokens.labels("hit").inc(match.length)
        metrics.lookup_tokens.labels("miss").inc(array.size - match.length)
        metrics.lookup_seconds.observe(time.perf_counter() - began)
        return match

    def _longer(
        self,
        exact: Match,
        approximate: Sequence[Namespace],
        budget: Budget | None,
        limit: int,
        until: float,
        local: bool,
    ) -> Match:
        """The longest match of lossy state over an exact one, or that where none is longer."""
        match = exact
        for space in approximate:
            if space.state == EXACT.kind:
                raise InputError("a namespace of exact state is no approximation; see KVCache.approximations")
            codec = codec_of_class(space.state)
            # of a blend each object says how it was made, and is asked for when it is loaded
            if match.length < limit and (codec is None or self._coding.may(space, codec, "lookup", budget)):
                more = self._find(exact.tokens, space, limit, None, until, local)
                match = more.over(exact, budget) if more.length > match.length else match
        return match

    def approximations(self, namespace: Namespace, budget: Budget | None = None) -> list[Namespace]:
        """The lossy namespaces of that exact one's model that a certificate covers within the budget, the
        most faithful first: for `lookup`'s `approximate`."""
        gate = self._coding.gate
        names = gate.allowed(namespace, budget or self._coding.budget) if gate else []
        return [lossy_namespace(namespace, name) for name in names]

    def repairs(self, namespace: Namespace, method: str, budget: Budget | None = None) -> list[BlendMeasured]:
        """What was measured of a way to repair prompts of moved segments, as far as a certificate of that
        namespace's model covers it within the budget. Where there is nothing, that is counted and said once.
        """
        gate, held = self._coding.gate, budget or self._coding.budget
        certificate = gate.blends(namespace) if gate else None
        found = certificate.methods(method) if certificate else []
        allowed = [
            one for one in found if certificate and certificate.verdict(method, one.chosen, held).allowed
        ]
        if not allowed:
            self._coding.may_blend(namespace, method, 1.0, "reuse", held)
        return allowed

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

"""One request under way: loads what is stored of its prompt, computes the rest, writes token by token."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch

from kvass import metrics
from kvass.cache import Match, StoreTicket
from kvass.chunks import Tokens
from kvass.engines.transformers.blending import Blend, blend
from kvass.engines.transformers.hosting import Host
from kvass.engines.transformers.identity import Identity
from kvass.engines.transformers.layers import kv_spec
from kvass.engines.transformers.pool_cache import Interrupted, PoolCache
from kvass.engines.transformers.sampling import Sampler, Sampling
from kvass.engines.transformers.text import TextStream
from kvass.errors import KvassError
from kvass.keys import Namespace, approximate_namespace, blend_namespace, tenant_digest
from kvass.provenance import EXACT, Blended, blend_class, is_blend, kind_of_class
from kvass.quality import Budget
from kvass.reuse.plan import Reuse

log = logging.getLogger("kvass.engines")

PromptLogits = Callable[[int, torch.Tensor], None]
"""Called with a position and the logits `[n, vocabulary]` behind the `n` prompt tokens from there on."""


@dataclass(slots=True)
class Usage:
    """What one request cost. `cached_tokens` were loaded, bytes by tier in `tiers`.

    The first `exact_tokens` of those were exact state. `provenance`: what the answer was computed upon,
    `exact`, the class of the lossy state that was loaded, such as `lossy-q2`, or `blend`: `reused_tokens`
    were read elsewhere, moved, and repaired by computing `recomputed_fraction` of their layers anew, now or
    when the state was made that was loaded. `finish_reason`: `stop`, `length` or `cancelled` (also where the
    iterator was closed).
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    exact_tokens: int = 0
    reused_tokens: int = 0
    recomputed_fraction: float = 0.0
    provenance: str = EXACT.kind
    completion_tokens: int = 0
    loaded_bytes: int = 0
    verified_bytes: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    ticket: StoreTicket | None = None
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token, the text that it settled, and the logits `[vocabulary]` behind it."""

    token: int
    text: str
    logits: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose KV a request may use. It is kept under `salt` alone; under `public` it may be found too.

    `load`: use what is stored; `keep`: store what is computed. `lossy`: use state of lossy codecs too, where
    exact state ends, as far as certificates cover them within `budget` (None: that of the cache's settings).
    `reuse`: use what was read elsewhere too, under the same budget; None: beginnings of prompts only.
    `digests`: in place of salts, `salt` and `public` are what stands for them in a namespace
    (`kvass.keys.tenant_digest`), as who was never told the salts has it.
    """

    salt: str = field(default="", repr=False)
    public: tuple[str, ...] = field(default=(), repr=False)
    load: bool = True
    keep: bool = True
    lossy: bool = False
    budget: Budget | None = None
    reuse: Reuse | None = None
    digests: bool = False


class Answering:
    """One request. `advance` does one unit of work; `close` stores what was computed. For one thread."""

    def __init__(
        self,
        host: Host,
        tokens: Tokens,
        sampling: Sampling,
        usage: Usage,
        scope: Scope,
        cancelled: threading.Event,
        prompt_logits: PromptLogits | None = None,
    ):
        """`cancelled`: setting it ends even a forward call that runs, between two layers.
        `prompt_logits`: wants the logits of every prompt token, so that nothing is loaded."""
        self.tokens = tokens
        self.usage = usage
        self.finished = False
        self._host = host
        self._sampling = sampling
        self._cancelled = cancelled
        self._scope = scope if prompt_logits is None else replace(scope, load=False)
        self._prompt_logits = prompt_logits
        self._identity: Identity | None = None
        self._held: PoolCache | None = None
        self._staging: Future[Match] | None = None
        self._written: list[int] = []
        self._stored = 0
        self._state: str = EXACT.kind
        self._made: Blended | None = None
        self.blended: Blend | None = None
        self._logits: torch.Tensor | None = None
        self._room = host.room(tokens, sampling.max_tokens)
        self._began = 0.0
        usage.prompt_tokens, usage.finish_reason = tokens.size, ""
        usage.exact_tokens, usage.provenance = 0, EXACT.kind
        usage.reused_tokens, usage.recomputed_fraction = 0, 0.0
        usage.cached_tokens = usage.loaded_bytes = usage.verified_bytes = usage.completion_tokens = 0
        usage.load_seconds, usage.prefill_seconds, usage.tiers = 0.0, 0.0, {}

    @property
    def scope(self) -> Scope:
        """What it may load and keep."""
        return self._scope

    @property
    def read(self) -> int:
        """Prompt tokens whose KV is there."""
        return min(self._held.computed, self.tokens.size) if self._held is not None else 0

    def cached_within(self, start: int, stop: int) -> int:
        """How many tokens of a span of the prompt were not read but loaded, or moved there."""
        if self.blended is None:
            return max(0, min(stop, self.usage.cached_tokens) - start)
        exact, segments = self.blended.prompt.exact, self.blended.prompt.segments
        return sum(max(0, min(stop, b) - max(start, a)) for a, b in [(0, exact), *segments])

    def stage(self) -> "Future[Match] | None":
        """Have what only remote tiers hold of the prompt brought here, in the background; `begin` then waits
        for nothing. None where there is nothing to wait for."""
        cache, scope = self._host.cache, self._scope
        if self._staging is None and cache is not None and cache.remote and scope.load:
            identity = self._host.identified()
            if identity is not None:
                own = self._namespace(identity, scope.salt)
                self._staging = cache.stage(
                    self.tokens, own, limit=self.tokens.size - 1, seconds=self._host.pace.seconds,
                    approximate=self._allowed([own]), budget=scope.budget,
                )  # fmt: skip
        return self._staging

    def begin(self) -> None:
        """Load what is stored of the prompt but for its last token, which has to be computed."""
        self._began = time.perf_counter()
        self._identity = self._host.identified()
        spec = self._identity.namespace.spec if self._identity else kv_spec(self._host.model)
        pool = self._host.borrow(spec, self.tokens.size + self._room)
        self._held = PoolCache(pool, self._cancelled.is_set)
        self._sampler = Sampler(self._sampling, self._host.model.device)
        tokenizer = self._host.tokenizer
        self._stream = TextStream(tokenizer, self._sampling.stop) if tokenizer is not None else None
        self._load(self._held)
        if self._scope.reuse is not None and self._scope.load:
            self._reuse(self._held, self._scope.reuse)

    def advance(self) -> Step | None:
        """Compute one slice of the prompt, or the next token; None where that was no token yet, or where
        the request was cancelled meanwhile."""
        if self._held is None:
            self.begin()
        try:
            return self._advance()
        except Interrupted:
            return None

    def _advance(self) -> Step | None:
        held = self._held
        assert held is not None
        logits: torch.Tensor | None
        if self._logits is not None or held.computed < self.tokens.size:
            logits = self._read(held)
            if logits is not None and not self._room:
                self._finish("length")
                return None
        else:
            logits = self._host.forward([self._written[-1]], held)[-1]
        return None if logits is None else self._step(logits)

    def _read(self, held: PoolCache) -> torch.Tensor | None:
        """Read on; the logits `[vocabulary]` of the prompt's last token once these are there."""
        if self._logits is not None:  # of a blend: all was read at once
            logits, self._logits = self._logits, None
            return logits
        began, start = time.perf_counter(), held.computed
        found = self._slice(held)
        spent = time.perf_counter() - began
        self.usage.prefill_seconds += spent
        self._host.pace.learn(held.computed - start, spent)
        return found

    def _slice(self, held: PoolCache) -> torch.Tensor | None:
        """One slice; the logits `[vocabulary]` of the prompt's last token once that was computed."""
        start = held.computed
        end = min(self.tokens.size, start + self._host.slice_at(start, self.tokens.size))
        every = self._prompt_logits is not None
        logits = self._host.forward(self.tokens[start:end].tolist(), held, every=every)
        if self._prompt_logits is not None:
            self._prompt_logits(start, logits)
        return logits[-1] if end == self.tokens.size else None

    def _step(self, logits: torch.Tensor) -> Step:
        token = self._sampler(logits)
        self._written.append(token)
        self.usage.completion_tokens = len(self._written)
        if len(self._written) == 1:
            self.usage.first_token_seconds = time.perf_counter() - self._began
        text = self._stream.push(token) if self._stream is not None else ""
        if token in self._host.stop_ids(self._sampling) or (
            self._stream is not None and self._stream.stopped
        ):
            self._finish("stop")
        elif len(self._written) >= self._room:
            self._finish("length")
        if self.finished and self._stream is not None:
            text += self._stream.finish()
        return Step(token, text, logits)

    def _finish(self, reason: str) -> None:
        self.usage.finish_reason = reason
        self.finished = True

    # -- what is stored -------------------------------------------------------------------------------

    def _namespace(self, identity: Identity, salt: str) -> Namespace:
        tenant = salt if self._scope.digests else tenant_digest(salt)
        return msgspec.structs.replace(identity.namespace, tenant=tenant)

    def _target(self, identity: Identity) -> Namespace:
        """Where what is computed now belongs: with exact state, or with that upon which it is computed."""
        own = self._namespace(identity, self._scope.salt)
        return own if self._state == EXACT.kind else approximate_namespace(own, self._state)

    def _allowed(self, namespaces: list[Namespace]) -> list[Namespace]:
        """The namespaces of approximate state that the request may read."""
        cache, scope = self._host.cache, self._scope
        if cache is None:
            return []
        found = [blend_namespace(one, self.tokens) for one in namespaces] if scope.reuse else []
        if scope.lossy:
            found += [one for space in namespaces for one in cache.approximations(space, scope.budget)]
        return found

    def _load(self, held: PoolCache) -> None:
        cache, identity, scope, usage = self._host.cache, self._identity, self._scope, self.usage
        if cache is None or identity is None or not scope.load:
            return
        own, *public = (self._namespace(identity, salt) for salt in (scope.salt, *scope.public))
        match = cache.lookup(
            self.tokens, own, limit=self.tokens.size - 1, others=public, local=self._staging is not None,
            approximate=self._allowed([own, *public]), budget=scope.budget,
        )  # fmt: skip
        if not match:
            return
        loaded = cache.load(match, held.pool, seconds=self._host.pace.seconds(match.length))
        held.set_loaded(loaded.tokens, match.chunk_tokens)
        self._host.loads.learn(loaded.tokens, loaded.seconds)
        upon = match.upon(loaded.tokens, loaded.exact_tokens)
        self._state, usage.provenance = upon.state, kind_of_class(upon.state)
        self._made = loaded.made if is_blend(upon.state) else None
        if self._made is not None:
            usage.recomputed_fraction = self._made.fraction
            usage.reused_tokens = loaded.tokens - loaded.exact_tokens
        usage.cached_tokens, usage.exact_tokens, usage.tiers = (
            loaded.tokens, loaded.exact_tokens, loaded.tiers
        )  # fmt: skip
        usage.loaded_bytes, usage.verified_bytes = loaded.bytes, loaded.verified
        usage.load_seconds = loaded.seconds
        self._stored = loaded.tokens
        if upon != self._target(identity):
            self._take_over(loaded.tokens, match)

    def _reuse(self, held: PoolCache, reuse: Reuse) -> None:
        """Where exact state ends, use what was read elsewhere; the rest of the prompt is computed with it."""
        identity, exact = self._identity, held.computed
        if identity is None or self._state != EXACT.kind:
            return
        own = self._namespace(identity, self._scope.salt)
        try:
            done = blend(
                self._host, held, self.tokens, exact, own, reuse, self._scope.budget, self._cancelled.is_set
            )
        except KvassError as error:
            metrics.errors.labels("cache", "reuse").inc()
            log.warning("kvass: a prompt was not put together of what was read elsewhere: %s", error)
            return
        if done is None:
            return
        held.set_computed(self.tokens.size)
        self.blended = done
        self._logits, self._made = done.logits, done.made
        self._state = blend_class(self.tokens.tobytes())
        self._stored = 0
        usage = self.usage
        usage.provenance, usage.exact_tokens = kind_of_class(self._state), exact
        usage.reused_tokens, usage.recomputed_fraction = len(done.prompt.reused), done.made.fraction
        usage.cached_tokens = exact + usage.reused_tokens
        usage.prefill_seconds += done.seconds

    def _take_over(self, loaded: int, match: Match) -> None:
        """What was found in public state is kept again under the tenant's own root, for chains do not cross
        roots; not where a window left out what that would need."""
        whole = all(group.first_needed(loaded) < match.chunk_tokens for group in match.namespace.spec.groups)
        if whole:
            self._stored = 0
        else:
            self._scope = replace(self._scope, keep=False)

    def keep(self) -> StoreTicket | None:
        """Store whatever was computed so far: the prompt, and the answer but for its last token."""
        cache, identity, held = self._host.cache, self._identity, self._held
        if cache is None or identity is None or held is None or not self._scope.keep:
            return None
        computed = held.computed
        if computed <= self._stored:
            return None
        now = self._host.identified()
        if now is None or now.namespace != identity.namespace:
            return None  # the weights changed while the answer was under way: this KV is of neither
        everything = np.concatenate([self.tokens, np.array(self._written, np.int32)])[:computed]
        budget = None if self._state == EXACT.kind else self._scope.budget
        self.usage.ticket = cache.store(
            everything, self._target(identity), held, budget=budget, made=self._made
        )
        self._stored = computed
        return self.usage.ticket

    def close(self, *, keep: bool = True) -> None:
        """Store what was computed (unless in doubt) and give the memory back. More than once is fine."""
        self.usage.finish_reason = self.usage.finish_reason or "cancelled"
        self.finished = True
        held = self._held
        if held is None:
            return
        try:
            if keep:
                self.keep()
        finally:
            self._held = None
            self._host.give_back(held.pool)

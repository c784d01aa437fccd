"""Drives a transformers model through a cache: sliced prefill, decode, streaming; for servers and scripts."""

import inspect
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvass.cache import KVCache, StoreTicket, TokenIds
from kvass.chunks import Tokens, as_tokens
from kvass.engines.transformers.adapters import plain_model
from kvass.engines.transformers.identity import Identity, identify, kv_spec
from kvass.engines.transformers.pool_cache import PoolCache, TorchPool
from kvass.engines.transformers.sampling import Sampler, Sampling
from kvass.engines.transformers.text import TextStream
from kvass.engines.transformers.turns import Turns
from kvass.errors import InputError, UnsupportedModelError
from kvass.keys import Namespace
from kvass.spec import KVSpec

log = logging.getLogger("kvass.engines")

_POOL_STEP = 1024

_PATIENCE_SECONDS = 5.0
"""How long a consumer may look at a token while another request waits for its turn."""


@dataclass(slots=True)
class Usage:
    """What one request cost. `cached_tokens` were loaded, bytes by tier in `tiers`.

    `finish_reason`: `stop`, `length` or `cancelled` (also where the iterator was closed).
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    loaded_bytes: int = 0
    verified_bytes: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    ticket: StoreTicket | None = None
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token, the text that it settled, and the logits `[vocabulary]` behind it."""

    token: int
    text: str
    logits: torch.Tensor = field(repr=False)


class Engine:
    """One model, one cache, one request at a time (others wait; see `Turns` for who is left hanging).

    Prefill runs in slices of `slice_tokens`, between which a request can be cancelled; the slices are part
    of the schedule of forward calls, on which the last bits of bf16 results depend. Without a cache it
    is the plain engine, on the same path.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache | None,
        *,
        tokenizer: Any = None,
        tenant_salt: str = "",
        epoch: str = "",
        slice_tokens: int | None = 512,
    ):
        """`model`: of transformers, also within peft. `slice_tokens` None: prefill in one call.
        `epoch`: see `identify`.

        Raises UnsupportedModelError for a model that kvass does not handle yet, before anything is stored.
        """
        self.model = plain_model(model).eval()  # type: ignore[no-untyped-call]
        if self.model.device.type != "cpu":
            raise UnsupportedModelError(
                f"the model is on {self.model.device}; kvass' transformers engine handles the CPU so far"
            )
        self.cache = cache
        self.tokenizer = tokenizer
        self.slice_tokens = slice_tokens
        self._tenant_salt = tenant_salt
        self._epoch = epoch
        self._turns = Turns(_PATIENCE_SECONDS)
        self._identity = identify(self.model, tenant_salt=tenant_salt, epoch=epoch)
        self._warned_of = ""
        self._spare: TorchPool | None = None
        self._guard = threading.RLock()  # giving back may happen in the garbage collector
        keeps = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self._last_only: dict[str, int] = {"logits_to_keep": 1} if keeps else {}
        self.vocabulary: int = self.model.config.vocab_size
        self.max_tokens: int | None = getattr(self.model.config, "max_position_embeddings", None)

    @property
    def identity(self) -> Identity:
        """The model's identity in its present state; looked at anew each time, cheap if nothing changed."""
        self._identity = identify(
            self.model, tenant_salt=self._tenant_salt, epoch=self._epoch, known=self._identity
        )
        return self._identity

    @property
    def namespace(self) -> Namespace:
        """Where this model's KV is stored in its present state."""
        return self.identity.namespace

    def generate(
        self,
        prompt: TokenIds,
        sampling: Sampling | None = None,
        *,
        usage: Usage | None = None,
        cancelled: threading.Event | None = None,
    ) -> Iterator[Step]:
        """Answer a prompt, token by token; prompt and answer are stored when the iterator ends or is closed.

        `usage` is filled in as things happen. Setting `cancelled` ends the answer after at most one slice.
        Raises InputError for an empty prompt, ids out of the vocabulary, or a prompt over the model's length.
        """
        sampling = sampling or Sampling()
        usage = usage or Usage()
        tokens = self._checked(prompt)
        if sampling.stop and self.tokenizer is None:
            raise InputError("stop texts need a tokenizer: Engine(model, cache, tokenizer=...)")
        return self._generate(tokens, sampling, usage, cancelled or threading.Event())

    def _checked(self, prompt: TokenIds) -> Tokens:
        tokens = as_tokens(prompt)
        if not tokens.size:
            raise InputError("the prompt is empty; give at least one token")
        if int(tokens.max()) >= self.vocabulary:
            raise InputError(
                f"token {tokens.max()} is outside of the model's vocabulary of {self.vocabulary}"
            )
        if self.max_tokens is not None and tokens.size >= self.max_tokens:
            raise InputError(
                f"the prompt has {tokens.size} tokens; the model takes {self.max_tokens}, answer included"
            )
        return tokens

    def _generate(
        self, tokens: Tokens, sampling: Sampling, usage: Usage, cancelled: threading.Event
    ) -> Iterator[Step]:
        usage.prompt_tokens = tokens.size
        usage.finish_reason = ""
        turn = object()
        try:
            if self._turns.take(turn, cancelled):
                yield from self._answer(turn, tokens, sampling, usage, cancelled)
        finally:
            usage.finish_reason = usage.finish_reason or "cancelled"
            self._turns.leave(turn)

    def _answer(
        self, turn: object, tokens: Tokens, sampling: Sampling, usage: Usage, cancelled: threading.Event
    ) -> Iterator[Step]:
        began = time.perf_counter()
        identity = self._identified()
        room = sampling.max_tokens
        if self.max_tokens is not None:
            room = min(room, self.max_tokens - tokens.size)
        spec = identity.namespace.spec if identity else kv_spec(self.model)
        held = PoolCache(self._borrow(spec, tokens.size + room))
        sampler = Sampler(sampling, self.model.device)
        stream = TextStream(self.tokenizer, sampling.stop) if self.tokenizer is not None else None
        stop_ids = self._stop_ids(sampling)
        written: list[int] = []
        loaded = 0
        try:
            loaded = self._load(tokens, identity, held, usage)
            logits = self._prefill(tokens[loaded:], held, cancelled)
            while logits is not None:
                token = sampler(logits)
                written.append(token)
                usage.completion_tokens = len(written)
                if len(written) == 1:
                    usage.first_token_seconds = time.perf_counter() - began
                text = stream.push(token) if stream is not None else ""
                if token in stop_ids or (stream is not None and stream.stopped):
                    usage.finish_reason = "stop"
                elif len(written) >= room:
                    usage.finish_reason = "length"
                if usage.finish_reason and stream is not None:
                    text += stream.finish()
                self._turns.pause(turn)
                yield Step(token, text, logits)
                if usage.finish_reason or cancelled.is_set() or not self._turns.take(turn, cancelled):
                    break
                logits = self._forward([token], held)
        finally:
            usage.ticket = self._store(tokens, written, loaded, identity, held)
            self._give_back(held.pool)

    def _identified(self) -> Identity | None:
        """None where the model is in a state that has no name, such as with hooks: then nothing is reused."""
        try:
            return self.identity
        except UnsupportedModelError as error:
            if str(error) != self._warned_of:
                self._warned_of = str(error)
                log.warning("kvass: requests go without the cache: %s", error)
            return None

    def _load(self, tokens: Tokens, identity: Identity | None, held: PoolCache, usage: Usage) -> int:
        """Load what is stored of a prompt but for its last token, which has to be computed."""
        usage.cached_tokens = usage.loaded_bytes = usage.verified_bytes = 0
        usage.load_seconds, usage.tiers = 0.0, {}
        if self.cache is None or identity is None:
            return 0
        match = self.cache.lookup(tokens, identity.namespace, limit=tokens.size - 1)
        if not match:
            return 0
        loaded = self.cache.load(match, held.pool)
        held.set_loaded(loaded.tokens, match.chunk_tokens)
        usage.cached_tokens, usage.tiers = loaded.tokens, loaded.tiers
        usage.loaded_bytes, usage.verified_bytes = loaded.bytes, loaded.verified
        usage.load_seconds = loaded.seconds
        return loaded.tokens

    def _prefill(self, tokens: Tokens, held: PoolCache, cancelled: threading.Event) -> torch.Tensor | None:
        """Compute the rest of a prompt; logits `[vocabulary]` of its last token, None if cancelled."""
        logits = None
        step = self.slice_tokens or tokens.size
        for start in range(0, tokens.size, step):
            if cancelled.is_set():
                return None
            logits = self._forward(tokens[start : start + step].tolist(), held)
        return logits

    def _forward(self, tokens: list[int], held: PoolCache) -> torch.Tensor:
        # whatever the consumer of this iterator is in the middle of, the model computes as it is named
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            out = self.model(
                input_ids=torch.tensor([tokens], dtype=torch.long),
                past_key_values=held,
                use_cache=True,
                **self._last_only,
            )
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _store(
        self, tokens: Tokens, written: Sequence[int], loaded: int, identity: Identity | None, held: PoolCache
    ) -> StoreTicket | None:
        """Keep whatever was computed: the prompt so far, and the answer but for its last token."""
        computed = held.computed
        if self.cache is None or identity is None or computed <= loaded:
            return None
        now = self._identified()
        if now is None or now.namespace != identity.namespace:
            return None  # the weights changed while the answer was under way: this KV is of neither
        everything = np.concatenate([tokens, np.array(written, np.int32)])[:computed]
        return self.cache.store(everything, identity.namespace, held)

    def _stop_ids(self, sampling: Sampling) -> set[int]:
        ends = self.model.generation_config.eos_token_id if self.model.generation_config else None
        own = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return {*own, *sampling.stop_ids}

    def overwrite_pool(self, tokens: int) -> None:
        """Fill the pool for the next request with NaN: what it then answers with, it loaded or computed."""
        pool = self._borrow(self.namespace.spec, tokens)
        pool.fill(0xFF)
        self._give_back(pool)

    def _borrow(self, spec: KVSpec, capacity: int) -> TorchPool:
        """The pool of the last request, if it is large enough: fresh memory costs a page fault each 4 kB."""
        with self._guard:
            pool, self._spare = self._spare, None
        if pool is None or pool.spec != spec or pool.capacity < capacity:
            pool = TorchPool(spec, -(-capacity // _POOL_STEP) * _POOL_STEP)
        return pool

    def _give_back(self, pool: TorchPool) -> None:
        with self._guard:
            spare = self._spare
            if spare is None or spare.spec != pool.spec or spare.capacity <= pool.capacity:
                self._spare = pool

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
from transformers import PreTrainedModel

from kvass.cache import KVCache, StoreTicket, TokenIds
from kvass.chunks import Tokens, as_tokens
from kvass.engines.transformers.identity import Identity, identify
from kvass.engines.transformers.pool_cache import PoolCache, TorchPool
from kvass.engines.transformers.sampling import Sampler, Sampling
from kvass.engines.transformers.text import TextStream
from kvass.errors import InputError, UnsupportedModelError
from kvass.keys import Namespace

log = logging.getLogger("kvass.engines")

_POOL_STEP = 1024


@dataclass(slots=True)
class Usage:
    """What one request cost. `cached_tokens` were loaded, bytes by tier in `tiers`."""

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
    """One model, one cache, one request at a time (others wait).

    Prefill runs in slices of `slice_tokens`, between which a request can be cancelled; the slices are part
    of the schedule of forward calls, on which the last bits of bf16 results depend. Without a cache it
    is the plain engine, on the same path.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache | None,
        *,
        tokenizer: Any = None,
        tenant_salt: str = "",
        epoch: str = "",
        slice_tokens: int | None = 512,
    ):
        """`slice_tokens` None: prefill in one call. `epoch`: see `identify`.

        Raises UnsupportedModelError for a model that kvass does not handle yet, before anything is stored.
        """
        if model.device.type != "cpu":
            raise UnsupportedModelError(
                f"the model is on {model.device}; kvass' transformers engine handles the CPU so far"
            )
        self.model = model.eval()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.tokenizer = tokenizer
        self.slice_tokens = slice_tokens
        self._tenant_salt = tenant_salt
        self._epoch = epoch
        self._lock = threading.Lock()
        self._identity = identify(model, tenant_salt=tenant_salt, epoch=epoch)
        self._pool: TorchPool | None = None
        parameters = inspect.signature(model.forward).parameters
        keeps = "logits_to_keep" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._last_only: dict[str, int] = {"logits_to_keep": 1} if keeps else {}
        config = model.config.get_text_config(decoder=True)
        self.vocabulary: int = config.vocab_size
        self.max_tokens: int | None = getattr(config, "max_position_embeddings", None)

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
        with self._lock:
            began = time.perf_counter()
            usage.prompt_tokens = tokens.size
            namespace = self.namespace
            room = sampling.max_tokens
            if self.max_tokens is not None:
                room = min(room, self.max_tokens - tokens.size)
            held = PoolCache(self._pool_for(namespace, tokens.size + room))
            written: list[int] = []
            try:
                logits = self._prefill(tokens, namespace, held, usage, cancelled)
                sampler = Sampler(sampling, self.model.device)
                stream = TextStream(self.tokenizer, sampling.stop) if self.tokenizer is not None else None
                stop_ids = self._stop_ids(sampling)
                while logits is not None:
                    token = sampler(logits)
                    if not written:
                        usage.first_token_seconds = time.perf_counter() - began
                    written.append(token)
                    usage.completion_tokens = len(written)
                    text = stream.push(token) if stream is not None else ""
                    if token in stop_ids or (stream is not None and stream.stopped):
                        usage.finish_reason = "stop"
                    elif len(written) >= room:
                        usage.finish_reason = "length"
                    if usage.finish_reason and stream is not None:
                        text += stream.finish()
                    yield Step(token, text, logits)
                    if usage.finish_reason or cancelled.is_set():
                        break
                    logits = self._forward([token], held)
                usage.finish_reason = usage.finish_reason or "cancelled"
            finally:
                self._store(tokens, written, namespace, held, usage)

    def _prefill(
        self, tokens: Tokens, namespace: Namespace, held: PoolCache, usage: Usage, cancelled: threading.Event
    ) -> torch.Tensor | None:
        """Load what is stored, compute the rest; logits `[vocabulary]` of the last, None if cancelled."""
        if self.cache is not None:
            match = self.cache.lookup(tokens, namespace, limit=tokens.size - 1)
            if match:
                loaded = self.cache.load(match, held.pool)
                held.set_length(loaded.tokens)
                usage.cached_tokens, usage.tiers = loaded.tokens, loaded.tiers
                usage.loaded_bytes, usage.verified_bytes = loaded.bytes, loaded.verified
                usage.load_seconds = loaded.seconds
        logits = None
        position = usage.cached_tokens
        step = self.slice_tokens or tokens.size
        while position < tokens.size:
            if cancelled.is_set():
                return None
            logits = self._forward(tokens[position : position + step].tolist(), held)
            position += step
        return logits

    def _forward(self, tokens: list[int], held: PoolCache) -> torch.Tensor:
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([tokens], dtype=torch.long),
                past_key_values=held,
                use_cache=True,
                **self._last_only,
            )
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _store(
        self, tokens: Tokens, written: Sequence[int], namespace: Namespace, held: PoolCache, usage: Usage
    ) -> None:
        """Keep whatever was computed: the prompt so far, and the answer but for its last token."""
        computed = held.get_seq_length()
        if self.cache is None or computed <= usage.cached_tokens:
            return
        everything = np.concatenate([tokens, np.array(written, np.int32)])[:computed]
        usage.ticket = self.cache.store(everything, namespace, held.pool)

    def _stop_ids(self, sampling: Sampling) -> set[int]:
        ends = self.model.generation_config.eos_token_id if self.model.generation_config else None
        own = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return {*own, *sampling.stop_ids}

    def overwrite_pool(self, tokens: int) -> None:
        """Fill the pool for the next request with NaN: what it then answers with, it loaded or computed."""
        with self._lock:
            self._pool_for(self.namespace, tokens).fill(0xFF)

    def _pool_for(self, namespace: Namespace, capacity: int) -> TorchPool:
        """The pool of the last request, if it is large enough: fresh memory costs a page fault each 4 kB."""
        capacity = -(-capacity // _POOL_STEP) * _POOL_STEP
        if self._pool is None or self._pool.spec != namespace.spec or self._pool.capacity < capacity:
            self._pool = TorchPool(namespace.spec, capacity)
        return self._pool

"""Drives a transformers model through a cache: sliced prefill, decode, streaming; for servers and scripts."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from kvass.cache import KVCache, TokenIds
from kvass.chunks import Tokens, as_tokens
from kvass.engines.transformers.adapters import plain_model
from kvass.engines.transformers.answering import Answering, PromptLogits, Scope, Step, Usage
from kvass.engines.transformers.hosting import Host
from kvass.engines.transformers.identity import Identity
from kvass.engines.transformers.sampling import Sampling
from kvass.engines.transformers.turns import Turns
from kvass.errors import InputError, UnsupportedModelError
from kvass.keys import Namespace
from kvass.quality import Budget
from kvass.reuse.plan import Reuse

_PATIENCE_SECONDS = 5.0
"""How long a consumer may look at a token while another request waits for its turn."""


class Engine:
    """One model, one cache. `generate` answers one request at a time (others wait; see `Turns` for who is
    left hanging); a server takes requests apart with `start`.

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
        slice_tokens: int | None = 256,
        spare_pools: int = 1,
        shared: Namespace | None = None,
        allow_lossy: bool = False,
    ):
        """`model`: of transformers, also within peft. `slice_tokens` None: prefill in one call.
        `epoch`: see `identify`. `spare_pools`: how many requests' memory is kept for later ones.
        `shared`: where other engines too keep this model's KV (see `kvass.models.shared` and
        `hosting.kept_under`); used as long as the model is as it is now, and without further adapters. Empty
        numerics stand for this engine's own.
        `allow_lossy`: whether requests that say nothing of it may use lossy state (see `Scope`).

        Raises UnsupportedModelError for a model that kvass does not handle yet, before anything is stored.
        """
        self.model = plain_model(model).eval()  # type: ignore[no-untyped-call]
        if self.model.device.type != "cpu":
            raise UnsupportedModelError(
                f"the model is on {self.model.device}; kvass' transformers engine handles the CPU so far"
            )
        self.cache = cache
        self.tokenizer = tokenizer
        self.allow_lossy = allow_lossy
        self._scope = Scope(tenant_salt, lossy=allow_lossy)
        self._turns = Turns(_PATIENCE_SECONDS)
        self._host = Host(self.model, cache, tokenizer, tenant_salt, epoch, slice_tokens, spare_pools, shared)
        self.vocabulary: int = self.model.config.vocab_size
        self.max_tokens = self._host.max_tokens

    @property
    def identity(self) -> Identity:
        """The model's identity in its present state; looked at anew each time, cheap if nothing changed."""
        return self._host.identity

    @property
    def namespace(self) -> Namespace:
        """Where this model's KV is stored in its present state."""
        return self.identity.namespace

    def start(
        self,
        prompt: TokenIds,
        sampling: Sampling | None = None,
        *,
        usage: Usage | None = None,
        scope: Scope | None = None,
        cancelled: threading.Event | None = None,
        prompt_logits: PromptLogits | None = None,
    ) -> Answering:
        """A request to be driven step by step, by one thread at a time that drives no other meanwhile.

        Raises InputError for an empty prompt, ids out of the vocabulary, or a prompt over the model's length.
        """
        sampling = sampling or Sampling()
        tokens = self._checked(prompt)
        if sampling.stop and self.tokenizer is None:
            raise InputError("stop texts need a tokenizer: Engine(model, cache, tokenizer=...)")
        return Answering(
            self._host, tokens, sampling, usage or Usage(), scope or self._scope,
            cancelled or threading.Event(), prompt_logits,
        )  # fmt: skip

    def generate(
        self,
        prompt: TokenIds,
        sampling: Sampling | None = None,
        *,
        usage: Usage | None = None,
        cancelled: threading.Event | None = None,
        lossy: bool | None = None,
        budget: Budget | None = None,
        reuse: Reuse | None = None,
    ) -> Iterator[Step]:
        """Answer a prompt, token by token; prompt and answer are stored when the iterator ends or is closed.

        `usage` is filled in as things happen. Setting `cancelled` ends the answer at the next layer of the
        forward call that runs. `lossy`: whether state of lossy codecs may be used (None: as the engine is
        set), within `budget`; `reuse`: passages that were read elsewhere may be; see `Scope`. Raises
        InputError as `start` does.
        """
        cancelled = cancelled or threading.Event()
        lossy = self._scope.lossy if lossy is None else lossy
        scope = replace(self._scope, lossy=lossy, budget=budget, reuse=reuse)
        answering = self.start(prompt, sampling, usage=usage, scope=scope, cancelled=cancelled)
        return self._steps(answering, cancelled, None)

    def read(
        self,
        prompt: TokenIds,
        *,
        usage: Usage | None = None,
        scope: Scope | None = None,
        cancelled: threading.Event | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Usage:
        """Read a prompt and store it, without an answer. `progress(n)`: the first `n` tokens are there;
        `scope`: what may be used and is kept, else as the engine is set.

        Setting `cancelled` ends it as in `generate`, and what was read is stored. Raises InputError as
        `start` does.
        """
        usage, cancelled = usage or Usage(), cancelled or threading.Event()
        answering = self.start(prompt, Sampling(max_tokens=0), usage=usage, cancelled=cancelled, scope=scope)
        for _ in self._steps(answering, cancelled, progress):
            pass
        return usage

    def _steps(
        self, answering: Answering, cancelled: threading.Event, progress: Callable[[int], None] | None
    ) -> Iterator[Step]:
        turn = object()
        try:
            while self._turns.take(turn, cancelled) and not cancelled.is_set():
                step = answering.advance()
                if progress is not None:
                    progress(answering.read)
                if step is not None:
                    self._turns.pause(turn)
                    yield step
                if answering.finished:
                    break
        finally:
            try:
                answering.close()
            finally:
                self._turns.leave(turn)

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

    def overwrite_pool(self, tokens: int) -> None:
        """Fill the pool for the next request with NaN: what it then answers with, it loaded or computed."""
        pool = self._host.borrow(self.namespace.spec, tokens)
        pool.fill(0xFF)
        self._host.give_back(pool)

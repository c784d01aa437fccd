"""The answers of one HTTP request: what was asked for, and what comes of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from kvass import metrics
from kvass.engines.transformers import Sampling, Scope, Step, Usage
from kvass.provenance import EXACT
from kvass.serve.errors import FAULT
from kvass.serve.logprobs import PromptLogprobs, TokenLogprob, logprobs
from kvass.serve.prompts import ChatEncoder
from kvass.serve.scheduler import Done, Event, Failed, Job, Scheduler
from kvass.serve.segments import Marked

_LEARN_FROM = 64
"""Tokens that a prefill must have computed to say something of the machine's speed."""


@dataclass(frozen=True)
class Asked:
    """One prompt and how to answer it `n` times. `top`: how many log probabilities beside each token's own
    (None: none at all); `echo`: the prompt's text, to be put before the answer; `segments`: that a client
    marked, of which alone anything is reused anywhere."""

    prompt: list[int]
    sampling: Sampling
    n: int
    top: int | None = None
    echo: str | None = None
    root: bytes = b""
    segments: Sequence[Marked] = ()


class Delta(NamedTuple):
    """What is new of a choice, by its number. `finish`: why it ended, None while it goes on."""

    choice: int
    text: str
    logprobs: list[TokenLogprob]
    finish: str | None


class _Token(NamedTuple):
    """A step without its logits: a queue of those for a client that reads slowly would fill the memory."""

    token: int
    text: str
    logprobs: list[TokenLogprob]


class Speed:
    """Seconds a token of prefill takes, learned from the requests so far."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def learn(self, usage: Usage) -> None:
        """Take a request into account that read all of its prompt."""
        computed = usage.prompt_tokens - usage.cached_tokens
        if computed >= _LEARN_FROM:
            seconds = usage.prefill_seconds / computed
            self._seconds = seconds if self._seconds is None else 0.8 * self._seconds + 0.2 * seconds

    def saved(self, tokens: int, load_seconds: float) -> float | None:
        """Seconds that loading so many tokens saved, about; None while nothing was computed yet."""
        if not tokens:
            return 0.0
        return None if self._seconds is None else round(max(0.0, tokens * self._seconds - load_seconds), 3)


@dataclass
class _Choice:
    asked: Asked
    job: Job
    written: list[int] = field(default_factory=list)
    text: str = ""
    over: bool = False


class ServerFault(Exception):
    """The request could not be answered, through no fault of its own."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Run:
    """The choices of one request, in the order of its prompts. Used by one task of an event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        encoder: ChatEncoder,
        speed: Speed,
        tenant: str,
        scope: Scope,
        asked: Sequence[Asked],
        arrived: float,
    ):
        """`arrived`: when the request did, by `time.perf_counter`.

        Raises InputError for a prompt that the model cannot take.
        """
        self._scheduler = scheduler
        self._encoder = encoder
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, _Token | Done | Failed]] = asyncio.Queue()
        self._echoes: dict[int, PromptLogprobs] = {}
        self._choices: list[_Choice] = []
        self.cancelled = False
        for one in asked:
            within = tuple((part.start, part.stop) for part in one.segments)
            reuse = scope.reuse and scope.reuse._replace(within=within)
            own = replace(scope, reuse=reuse)
            start = partial(scheduler.start, tenant, scope=own, arrived=arrived)
            for number in range(one.n):
                self._choices.append(self._choice(one, number, start))

    def _choice(self, asked: Asked, number: int, start: Callable[..., Job]) -> _Choice:
        index, sampling = len(self._choices), asked.sampling
        if sampling.seed is not None and number:
            sampling = replace(sampling, seed=sampling.seed + number)
        collect = None
        if asked.echo is not None and asked.top is not None:
            collect = self._echoes[index] = PromptLogprobs(asked.prompt, asked.top)
        deliver = partial(self._deliver, index, asked.top)
        return _Choice(asked, start(asked.prompt, sampling, deliver=deliver, prompt_logits=collect))

    def _deliver(self, index: int, top: int | None, event: Event) -> None:
        what = _token(event, top) if isinstance(event, Step) else event
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, what))

    def submit(self) -> None:
        """Queue all of it. Raises Busy or Stopping."""
        self._scheduler.submit([choice.job for choice in self._choices])

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = self.cancelled or not self.over
        for choice in self._choices:
            if not choice.over:
                self._scheduler.cancel(choice.job)

    @property
    def count(self) -> int:
        """How many choices there are."""
        return len(self._choices)

    @property
    def over(self) -> bool:
        """Whether all of them have ended."""
        return all(choice.over for choice in self._choices)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, as it comes; nothing more once it was cancelled. Raises ServerFault."""
        while not self.over:
            index, event = await self._events.get()
            choice = self._choices[index]
            if isinstance(event, _Token):
                if not self.cancelled:
                    yield self._step(index, choice, event)
            elif isinstance(event, Done):
                choice.over = True
                if self.cancelled:
                    continue
                if event.reason == "cancelled":
                    raise ServerFault(503, "the server is stopping")
                if not choice.written and choice.asked.echo is not None:
                    yield self._delta(index, choice, "", [])
                await self._account(choice)
                yield Delta(index, "", [], event.reason)
            else:
                choice.over = True
                raise ServerFault(500, FAULT)

    def _step(self, index: int, choice: _Choice, step: _Token) -> Delta:
        delta = self._delta(index, choice, step.text, step.logprobs)
        choice.written.append(step.token)
        choice.text += step.text
        return delta

    def _delta(self, index: int, choice: _Choice, text: str, found: list[TokenLogprob]) -> Delta:
        """With the prompt before the first of it, where that was asked for."""
        if not choice.written and choice.asked.echo is not None:
            text = choice.asked.echo + text
            if index in self._echoes:
                found = self._echoes[index].found + found
        return Delta(index, text, found, None)

    async def _account(self, choice: _Choice) -> None:
        usage, asked = choice.job.usage, choice.asked
        if not usage.reused_tokens:  # what is repaired is neither read nor loaded
            self._speed.learn(usage)
        metrics.prompt_tokens.labels("tiers").inc(usage.cached_tokens)
        metrics.prompt_tokens.labels("computed").inc(usage.prompt_tokens - usage.cached_tokens)
        metrics.completion_tokens.inc(usage.completion_tokens)
        if asked.root:
            # not here: a file that somebody locks, or a long text being tokenised, would hold up all streams
            await asyncio.to_thread(
                self._encoder.remember, asked.root, asked.prompt, choice.written, choice.text
            )

    # -- what it cost ---------------------------------------------------------------------------------

    def _firsts(self) -> list[Job]:
        """The first choice of each prompt: what the others of it loaded, it had just stored."""
        firsts: dict[int, Job] = {}
        for choice in self._choices:
            firsts.setdefault(id(choice.asked), choice.job)
        return list(firsts.values())

    def usage(self) -> dict[str, Any]:
        """As OpenAI counts: a prompt once, whatever `n` is."""
        firsts = [job.usage for job in self._firsts()]
        prompt = sum(one.prompt_tokens for one in firsts)
        completion = sum(choice.job.usage.completion_tokens for choice in self._choices)
        cached = sum(one.cached_tokens for one in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def report(self) -> dict[str, Any]:
        """What was reused: tokens, bytes by tier, seconds of loading, and what that saved, about; and upon
        what the answers were computed: `exact`, or the classes of lossy state."""
        firsts = [job.usage for job in self._firsts()]
        tiers: dict[str, int] = {}
        for one in firsts:
            for tier, size in one.tiers.items():
                tiers[tier] = tiers.get(tier, 0) + size
        cached = sum(one.cached_tokens for one in firsts)
        seconds = sum(one.load_seconds for one in firsts)
        found = dict.fromkeys(choice.job.usage.provenance for choice in self._choices)
        return {
            "hit_tokens": cached,
            "computed_tokens": sum(one.prompt_tokens for one in firsts) - cached,
            "loaded_bytes": tiers,
            "load_seconds": round(seconds, 6),
            "saved_seconds": self._speed.saved(cached, seconds),
            "exact_tokens": sum(one.exact_tokens for one in firsts),
            "reused_tokens": sum(one.reused_tokens for one in firsts),
            "recomputed_fraction": round(max((one.recomputed_fraction for one in firsts), default=0.0), 4),
            "provenance": ",".join([one for one in found if one != EXACT.kind] or [EXACT.kind]),
            **({"segments": marked} if (marked := self._segments()) else {}),
        }

    def _segments(self) -> list[dict[str, Any]]:
        """Of the segments that the client marked, what was reused."""
        return [
            {
                "id": part.id, "start": part.start, "tokens": part.stop - part.start,
                "cached_tokens": choice.job.answering.cached_within(part.start, part.stop),
            }
            for choice in self._choices[:1]
            for part in choice.asked.segments
        ]  # fmt: skip


def _token(step: Step, top: int | None) -> _Token:
    found = logprobs(step.logits[None], [step.token], top) if top is not None else []
    return _Token(step.token, step.text, found)

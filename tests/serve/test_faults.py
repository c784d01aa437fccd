"""What goes wrong inside a server ends one request, or is told to all: nobody waits for ever."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from kvass.cache import StoreTicket
from kvass.config import Settings
from kvass.engines.transformers import Sampling, Scope, Step, Usage
from kvass.serve.app import Service, make_app
from kvass.serve.guard import Guard
from kvass.serve.logprobs import TokenLogprob, for_completion, logprobs
from kvass.serve.run import Asked, Run, Speed
from kvass.serve.scheduler import Done, Event, Failed, Job, Scheduler, Stopping
from kvass.serve.tenants import Tenants

ENGINE: Any = SimpleNamespace(cache=SimpleNamespace(chunk_tokens=2))


class Answering:
    """Reads its prompt in the first step, and writes tokens in the ones after it."""

    def __init__(self, prompt: list[int], steps: int = 3, fails: str = "", note: list[str] | None = None):
        self.tokens = np.array(prompt, np.int32)
        self.usage = Usage(prompt_tokens=len(prompt))
        self.scope = Scope()
        self.read = 0
        self.finished = False
        self._left = steps
        self._fails = fails
        self._note = note if note is not None else []

    def _do(self, what: str) -> None:
        if self._fails == what:
            raise RuntimeError(what)
        self._note.append(what)

    def stage(self) -> None:
        """Nothing of it is on other machines."""

    def begin(self) -> None:
        self._do("begin")

    def advance(self) -> None:
        self._do("advance")
        self.read = self.tokens.size
        self._left -= 1
        self.finished = not self._left

    def keep(self) -> None:
        self._do("keep")
        self.usage.ticket = StoreTicket(True, _Stored(self._note))

    def close(self, keep: bool = True) -> None:
        self._do("close" if keep else "drop")


class _Stored(Future[None]):
    """A store that is over once somebody waited for it."""

    def __init__(self, note: list[str]):
        super().__init__()
        self._note = note

    def result(self, timeout: float | None = None) -> None:
        self._note.append("visible")


class Jobs:
    """Jobs, and what they came to."""

    def __init__(self) -> None:
        self.ends: list[Event] = []
        self._all = threading.Semaphore(0)

    def job(self, answering: Answering) -> Job:
        one: Any = answering
        return Job("", one, self._deliver, threading.Event(), time.perf_counter())

    def _deliver(self, event: Event) -> None:
        self.ends.append(event)
        self._all.release()

    def wait(self, count: int) -> list[Event]:
        for _ in range(count):
            assert self._all.acquire(timeout=20), self.ends
        return self.ends


@pytest.mark.parametrize("fails", ["begin", "advance", "keep", "close"])
def test_a_fault_of_one_request_ends_that_one(fails: str) -> None:
    """Where only its store fails, not even that one; `keep`: another request waits for its prompt."""
    scheduler, jobs = Scheduler(ENGINE, slots=2, queue=9), Jobs()
    scheduler.submit([jobs.job(Answering([1, 2], fails=fails)), jobs.job(Answering([1, 2]))])
    ends = jobs.wait(2)
    assert ends.count(Failed()) == (fails in ("begin", "advance")) and isinstance(ends[-1], Done)
    assert scheduler.alive
    scheduler.close(0.0)


def test_what_a_request_computed_that_failed_is_not_stored() -> None:
    note: list[str] = []
    scheduler, jobs = Scheduler(ENGINE, slots=2, queue=9), Jobs()
    scheduler.submit([jobs.job(Answering([1, 2], fails="advance", note=note))])
    assert jobs.wait(1) == [Failed()]
    scheduler.close(0.0)
    assert note == ["begin", "drop"]


def test_a_scheduler_that_fails_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, jobs = Scheduler(ENGINE, slots=1, queue=9), Jobs()
    monkeypatch.setattr(scheduler, "_next", lambda: 1 // 0)
    scheduler.submit([jobs.job(Answering([1])) for _ in range(3)])
    assert jobs.wait(3) == [Failed()] * 3
    assert scheduler.failed and not scheduler.alive
    with pytest.raises(Stopping):
        scheduler.submit([jobs.job(Answering([1]))])
    scheduler.close(0.0)


def test_who_waits_for_a_prompt_waits_for_its_store_whoever_else_ends_meanwhile() -> None:
    scheduler, jobs = Scheduler(ENGINE, slots=2, queue=9), Jobs()
    note: list[str] = []
    first, second = Answering([1, 2], note=note), Answering([3, 4], steps=1)
    waiter = Answering([1, 2], note=note)
    scheduler.submit([jobs.job(one) for one in (first, second, waiter)])
    jobs.wait(3)
    scheduler.close(0.0)
    assert note.index("keep") < note.index("visible") < note.index("begin", 1)


def test_tokens_that_a_client_does_not_fetch_hold_no_logits() -> None:
    """Those of a long answer are gigabytes."""
    delivered: list[Callable[[Event], None]] = []

    def start(*_: Any, deliver: Callable[[Event], None], **__: Any) -> Any:
        delivered.append(deliver)
        return SimpleNamespace(usage=Usage(prompt_tokens=1, completion_tokens=1))

    async def check() -> None:
        scheduler: Any = SimpleNamespace(start=start, cancel=lambda job: None)
        asked = Asked([1], Sampling(), 1, top=2)
        run = Run(scheduler, SimpleNamespace(), Speed(), "", Scope(), [asked], 0.0)  # type: ignore[arg-type]
        logits = torch.tensor([0.0, 1.0, 2.0])
        held = weakref.ref(logits)
        delivered[0](Step(2, "x", logits))
        del logits
        gc.collect()
        assert held() is None
        delivered[0](Done("stop"))
        deltas = [one async for one in run.deltas()]
        assert [token for token, _ in deltas[0].logprobs[0].top] == [2, 1]
        assert deltas[-1].finish == "stop"

    asyncio.run(check())


def test_speed_is_learned_from_a_request_that_is_over() -> None:
    speed = Speed()
    speed.learn(Usage(prompt_tokens=1100, cached_tokens=100, prefill_seconds=2.0))
    assert speed.saved(500, 0.25) == 0.75


@pytest.fixture
def client() -> TestClient:
    """An app of which everything fails."""
    engine: Any = SimpleNamespace(max_tokens=10)
    scheduler: Any = SimpleNamespace(failed=True, alive=False, check_room=lambda tenant: None)
    encoder: Any = SimpleNamespace(text=lambda text, special: 1 // 0)
    service = Service("it", 0, engine, scheduler, encoder, Tenants([], []), Settings.load())
    return TestClient(
        Guard(make_app(service), tenant_of=lambda scope: "", body_bytes=9999, receive_seconds=9.0)
    )


def test_a_fault_is_told_as_openai_does(client: TestClient) -> None:
    reply = client.post("/v1/completions", json={"prompt": "x"})
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"


def test_a_server_that_answers_nobody_says_so(client: TestClient) -> None:
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 503


def test_a_token_that_is_not_in_the_text_takes_no_place_in_it() -> None:
    """BOS, of models that want one: the text that is echoed does not hold it."""
    texts = {1: "<bos>", 2: "Hi", 3: " there"}
    found = [TokenLogprob(1, None, []), TokenLogprob(2, -1.0, []), TokenLogprob(3, -1.0, [])]
    assert for_completion(found, texts.__getitem__, 0, "Hi there")["text_offset"] == [0, 0, 2]
    assert for_completion(found[1:], texts.__getitem__, 0, "Hi there")["text_offset"] == [0, 2]


def test_no_probability_at_all_is_a_number_in_json() -> None:
    (one,) = logprobs(torch.tensor([[0.0, -float("inf")]]), [1], 2)
    assert one.logprob == -9999.0 and one.top[1] == (1, -9999.0)

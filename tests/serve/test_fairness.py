"""What one client or tenant does must not cost another more than its share, nor tell it anything."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.servers import Server, started

KEYS = {name: f"{name}-0123456789abcdef" for name in ("busy", "calm", "alice", "bob")}


def _as(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


@pytest.fixture(scope="module")
def shared(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two slots, and two that may wait."""
    keys = ",".join(f"{name}={key}" for name, key in KEYS.items())
    folder = tmp_path_factory.mktemp("fairness")
    with started(
        folder, tiny_model, "--dtype", "float32", serve_slots="2", serve_queue="4", api_keys=keys
    ) as server:
        yield server


def _ask(server: Server, name: str, prompt: Any, max_tokens: int = 1) -> Any:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return server.post("/v1/completions", body, headers=_as(name))


def _document(number: int) -> list[int]:
    return [5000 + number, *(1000 + (number + 7) * step % 20_000 for step in range(1500))]


def test_each_document_is_read_once_whenever_its_readers_come(start: Callable[..., Server]) -> None:
    """Two documents, two slots, and clients that come while the first ones are answered already."""
    server = start(serve_slots="2")

    def ask(number: int) -> int:
        time.sleep(0.05 * number)
        prompt = [*_document(number % 2), 100 + number]
        body = {"prompt": prompt, "max_tokens": 200, "temperature": 0}
        reply = server.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        computed: int = reply.json()["kvass"]["computed_tokens"]
        return computed

    with ThreadPoolExecutor(12) as pool:
        computed = list(pool.map(ask, range(12)))
    assert sum(one > 700 for one in computed) == 2, computed


@pytest.mark.alone
def test_a_prompt_of_another_tenant_is_as_slow_as_one_never_seen(shared: Server) -> None:
    seconds: dict[str, list[float]] = {"own": [], "other": [], "new": []}
    for number in range(15):
        known = _document(1000 + number)
        _ask(shared, "alice", known)
        for side, name, prompt in (
            ("other", "bob", known), ("new", "bob", _document(2000 + number)), ("own", "alice", known),
        ):  # fmt: skip
            began = time.perf_counter()
            usage = _ask(shared, name, prompt).json()["usage"]
            seconds[side].append(time.perf_counter() - began)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == (len(prompt) - 1 if side == "own" else 0)
    own, other, new = (statistics.median(seconds[side]) for side in ("own", "other", "new"))
    assert 0.8 < other / new < 1.25, seconds
    assert own < 0.8 * new, seconds  # or the figures would say nothing


@pytest.mark.alone
def test_a_tenant_that_fills_its_queue_leaves_others_theirs(shared: Server) -> None:
    statuses: list[int] = []

    def keep_busy(number: int) -> None:
        statuses.append(_ask(shared, "busy", [1, number + 100], 1500).status_code)

    threads = [threading.Thread(target=keep_busy, args=(number,)) for number in range(14)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while 429 not in statuses:
        assert time.monotonic() < end
        time.sleep(0.01)
    began = time.perf_counter()
    assert _ask(shared, "calm", [1, 2, 3]).status_code == 200
    took = time.perf_counter() - began
    assert sum(thread.is_alive() for thread in threads) >= 4  # those in both slots, and more behind them
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429} and took < 2

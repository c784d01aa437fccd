"""Many clients at once: fair, bounded, and no client's business is another's."""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from harness.servers import Server, head

DOCUMENT = " ".join(f"item {number} costs {number * 7 % 97} coins;" for number in range(150))


def _body(number: int, **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": DOCUMENT},
        {"role": "user", "content": f"Question {number}: what does item {number} cost?"},
    ]
    return {"messages": messages, "max_tokens": 24, "temperature": 0.8, "seed": number, **more}


def _ask(server: Server, number: int, **more: Any) -> dict[str, Any]:
    reply = server.post("/v1/chat/completions", _body(number, **more))
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_sixteen_clients_with_random_disconnects_get_what_one_alone_gets(
    start: Callable[..., Server],
) -> None:
    server = start()
    alone = {
        number: _text(_ask(server, number, kvass={"load": False, "keep": False})) for number in range(16)
    }
    found: dict[int, str] = {}
    gone = {3, 7, 8, 12, 15}

    def client(number: int) -> None:
        if number not in gone:
            found[number] = _text(_ask(server, number))
            return
        with (
            httpx.Client(timeout=60) as http,
            http.stream(
                "POST", server.url + "/v1/chat/completions", json=_body(number, stream=True)
            ) as response,
        ):
            for seen, _ in enumerate(response.iter_lines()):
                if seen > random.Random(number).randrange(12):
                    return  # in mid-token

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
    assert found == {number: text for number, text in alone.items() if number not in gone}
    _wait_until(lambda: server.metric("kvass_active_requests") == 0)
    assert server.metric("kvass_failed_requests_total") == 0


def _text(reply: dict[str, Any]) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


def test_a_document_that_all_want_at_once_is_read_once(start: Callable[..., Server]) -> None:
    server = start()
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda number: _ask(server, number), range(16)))
    computed = [reply["kvass"]["computed_tokens"] for reply in replies]
    whole = replies[0]["usage"]["prompt_tokens"] - 64
    assert sum(one > whole // 2 for one in computed) == 1, computed


def test_past_the_bound_a_client_is_told_when_to_come_again(start: Callable[..., Server]) -> None:
    server = start(serve_slots="1", serve_queue="2")
    with ThreadPoolExecutor(12) as pool:
        replies = list(
            pool.map(
                lambda number: server.post("/v1/chat/completions", _body(number, max_tokens=400)), range(12)
            )
        )
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused and len(refused) < 12
    assert all(reply.status_code in (200, 429) for reply in replies)
    for reply in refused:
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.alone
def test_who_goes_away_stops_its_work_within_a_second(
    start: Callable[..., Server], smollm2_fp32: Any
) -> None:
    """In the middle of a long prompt, of a model that takes seconds for it."""
    server = start(model="smollm2-135m", models_path=str(smollm2_fp32.directory.parent))
    words = " ".join(str(number) for number in range(600))
    body = {"prompt": words, "max_tokens": 5}
    with httpx.Client(timeout=2.5) as http, contextlib.suppress(httpx.TimeoutException):
        http.post(server.url + "/v1/completions", json=body)
    began = time.perf_counter()
    _wait_until(lambda: server.metric("kvass_active_requests") == 0)
    assert time.perf_counter() - began < 1.0
    reply = server.post("/v1/completions", body)
    cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < reply.json()["usage"]["prompt_tokens"] // 2  # what had been read is not lost


def test_a_long_answer_does_not_hold_up_a_short_one(server: Server) -> None:
    long = threading.Thread(target=_ask, args=(server, 500), kwargs={"max_tokens": 1500})
    long.start()
    _wait_until(lambda: server.metric("kvass_active_requests") >= 1)
    _ask(server, 501, max_tokens=2)
    assert long.is_alive()
    long.join()


@pytest.mark.alone
def test_tenants_take_turns(start: Callable[..., Server]) -> None:
    """A tenant with a full queue delays another's one request by one request, not by all."""
    keys = {name: f"{name}-key-0123456789" for name in ("busy", "calm")}
    server = start(serve_slots="1", api_keys=",".join(f"{name}={key}" for name, key in keys.items()))

    def ask(name: str, number: int) -> float:
        reply = server.post(
            "/v1/chat/completions", _body(number, max_tokens=200),
            headers={"Authorization": f"Bearer {keys[name]}"},
        )  # fmt: skip
        assert reply.status_code == 200
        return time.perf_counter()

    with ThreadPoolExecutor(16) as pool:
        busy = [pool.submit(ask, "busy", number) for number in range(12)]
        time.sleep(0.3)
        calm = pool.submit(ask, "calm", 99).result()
        ends = sorted(one.result() for one in busy)
    assert calm < ends[-4]


def test_a_client_that_reads_nothing_stops_nobody(server: Server) -> None:
    body = json.dumps(_body(77, stream=True, max_tokens=3000)).encode()
    with socket.create_connection(httpx.URL(server.url).netloc.decode().split(":")) as deaf:  # type: ignore[arg-type]
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.sendall(head("/v1/chat/completions", len(body)) + body)
        _wait_until(lambda: server.metric("kvass_active_requests") >= 1)
        assert _ask(server, 78, max_tokens=2)
    _wait_until(lambda: server.metric("kvass_active_requests") == 0)


def _wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)

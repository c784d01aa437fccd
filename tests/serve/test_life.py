"""Beginning and end of a server: what it refuses, and what it must not lose."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from harness.servers import Server, environment

PROMPT = "It was a dark and stormy night, and the rain fell in torrents. " * 20


def _refused(tiny_model: str, folder: Path, *arguments: str, **settings: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvass", "serve", "--model", tiny_model, *arguments],
        env=environment(folder, **settings), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_open_address_without_keys_is_refused(tiny_model: str, tmp_path: Path, host: str) -> None:
    assert "there are no API keys" in _refused(tiny_model, tmp_path, "--host", host)


def test_what_cannot_be_served_is_said_in_a_line(tiny_model: str, tmp_path: Path, server: Server) -> None:
    assert "no-such-model" in _refused("no-such-model", tmp_path, "--port", "0")
    port = str(httpx.URL(server.url).port)
    assert port in _refused(tiny_model, tmp_path, "--port", port)
    assert "api_keys" in _refused(tiny_model, tmp_path, "--port", "0", api_keys="nonsense")
    keys = {"api_keys": "me=0123456789abcdef"}
    assert "cannot listen" in _refused(tiny_model, tmp_path, "--host", "ä..b", **keys)
    assert "'a b'" in _refused(tiny_model, tmp_path, "--port", "0", public_tenants="a b")


def test_an_open_address_with_keys_is_served(start: Callable[..., Server]) -> None:
    server = start("--host", "0.0.0.0", api_keys="me=0123456789abcdef")
    assert httpx.get(server.url.replace("0.0.0.0", "127.0.0.1") + "/v1/models").status_code == 401


def test_health(server: Server) -> None:
    assert httpx.get(server.url + "/healthz").json() == {"status": "ok"}
    assert httpx.get(server.url + "/readyz").json() == {"status": "ready"}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_requests_finish_and_keeps_their_state(
    start: Callable[..., Server], tmp_path: Path, sent: signal.Signals
) -> None:
    server = start(folder=tmp_path)
    found: list[Any] = []
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    client = threading.Thread(target=lambda: found.append(server.post("/v1/completions", body)))
    client.start()
    _until_active(server)
    server.process.send_signal(sent)
    client.join()
    assert found[0].status_code == 200 and found[0].json()["usage"]["completion_tokens"] == 300
    assert server.process.wait(30) == 0
    again = start(folder=tmp_path).post("/v1/completions", body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    assert again["choices"] == found[0].json()["choices"]


def test_a_stop_that_comes_at_once_is_a_stop(start: Callable[..., Server]) -> None:
    server = start()
    server.process.terminate()
    assert server.process.wait(30) == 0


def test_past_the_grace_requests_are_cut_off_and_still_kept(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start(folder=tmp_path, serve_grace_seconds="0.3")
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3500}))
        except httpx.HTTPError as error:
            found.append(error)

    client = threading.Thread(target=ask)
    client.start()
    _until_active(server)
    time.sleep(0.3)
    server.process.terminate()
    assert server.process.wait(20) == 0
    client.join()
    assert found[0].status_code == 503 and found[0].json()["error"]["type"] == "server_error"
    again = start(folder=tmp_path).post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


@pytest.mark.alone
def test_a_memory_of_answers_that_somebody_locks_holds_nobody_up(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start(folder=tmp_path)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    asked = threading.Thread(target=server.post, args=("/v1/chat/completions", body))
    slowest = 0.0
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "answers.sqlite")) as other:
        other.execute("BEGIN EXCLUSIVE")
        asked.start()
        while asked.is_alive():
            began = time.perf_counter()
            assert httpx.get(server.url + "/healthz").status_code == 200
            slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 0.7  # the answer itself waits for a second


@pytest.mark.alone
def test_a_second_signal_ends_it_at_once(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(folder=tmp_path)
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
    threading.Thread(
        target=lambda: _quietly(server, {"prompt": "Another one. ", "max_tokens": 3500}), daemon=True
    ).start()
    _until_active(server)
    time.sleep(0.5)  # what was answered before is stored in less
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    began = time.perf_counter()
    assert server.process.wait(5) == 128 + signal.SIGINT
    assert time.perf_counter() - began < 1
    again = start(folder=tmp_path).post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_under_load(start: Callable[..., Server], tmp_path: Path, sent: signal.Signals) -> None:
    """Clients that keep asking see errors while it is down, never a wrong answer, and hits afterwards."""
    options = {"max_tokens": 20, "temperature": 0}
    server = start(folder=tmp_path)
    prompts = [f"{number}: {PROMPT}" for number in range(6)]
    wanted = [
        server.post("/v1/completions", {"prompt": prompt, **options}).json()["choices"] for prompt in prompts
    ]
    stop, wrong, answered = threading.Event(), [], [0]
    current = [server]

    def client(number: int) -> None:
        while not stop.is_set():
            try:
                reply = current[0].post("/v1/completions", {"prompt": prompts[number], **options})
            except httpx.HTTPError:
                time.sleep(0.05)
                continue
            if reply.status_code == 200:
                answered[0] += 1
                if reply.json()["choices"] != wanted[number]:
                    wrong.append((number, reply.json()))
            elif reply.status_code != 503:
                wrong.append((number, reply.status_code))

    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(6)]
    for one in clients:
        one.start()
    try:
        for _ in range(2):
            time.sleep(0.5)
            os.kill(current[0].process.pid, sent)
            current[0].process.wait(30)
            current[0] = start(folder=tmp_path)
        before = answered[0]
        time.sleep(1.0)
    finally:
        stop.set()
    for one in clients:
        one.join()
    assert not wrong and answered[0] > before
    usage = current[0].post("/v1/completions", {"prompt": prompts[0], **options}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert current[0].metric("kvass_failed_requests_total") == 0


def _quietly(server: Server, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        server.post("/v1/completions", body)


def _until_active(server: Server) -> None:
    end = time.monotonic() + 20
    while not server.metric("kvass_active_requests"):
        assert time.monotonic() < end
        time.sleep(0.01)

"""What breaks before and behind `kvass serve --upstream`: clients are told, nothing goes on for nobody."""

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from harness.servers import Server, environment, head
from harness.upstream_server import CHUNKS, KVASS_WITHOUT_TORCH, Small, before, small_upstream
from kvass.config import Settings
from kvass.errors import ConfigError
from kvass.serve.address import Address

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def front(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with before(small.url, tmp_path_factory.mktemp("front")) as server:
        yield server


@pytest.fixture
def start(small: Small, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:
        yield lambda url=small.url, **settings: stack.enter_context(before(url, tmp_path, **settings))


def _streamed(server: Server, body: Any) -> Any:
    return httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=30)


# -- what cannot be served ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("upstream", "told"),
    [
        ("127.0.0.1:8000", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("http://x:99999", "http://HOST:PORT"),
        ("ftp://x", "http://HOST:PORT"),
        ("http://x/?a=1", "http://HOST:PORT"),
        ("http://me:secret@x", "upstream_api_key_file"),
    ],
)
def test_what_is_no_address_is_refused(upstream: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        Address.of(upstream, Settings.load())
    assert "secret" not in str(raised.value)


def _refused(folder: Path, upstream: str, *arguments: str, **settings: str) -> str:
    done = subprocess.run(
        [*KVASS_WITHOUT_TORCH, "serve", "--port", "0", "--upstream", upstream, *arguments],
        env=environment(folder, **settings), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return " ".join(done.stderr.split())


def test_what_cannot_be_before_an_upstream_is_refused(tmp_path: Path, small: Small) -> None:
    assert "--model" in _refused(tmp_path, small.url, "--model", "smollm2-135m")
    assert "public_tenants" in _refused(tmp_path, small.url, public_tenants="handbook")
    port = str(httpx.URL(small.url).port)
    assert "cannot listen" in _refused(tmp_path, small.url, "--port", port)
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = str(free.getsockname()[1])
    assert "choose another --port" in _refused(tmp_path, f"http://localhost:{own}/v1", "--port", own)
    assert "no OpenAI server" in _refused(tmp_path, small.url + "/elsewhere")


def test_a_key_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    path, there = tmp_path / "key", "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="cannot read"):
        Address.of(there, Settings.load(upstream_api_key_file=path))
    for text in ("", "two words", "schlüssel"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="must hold one key"):
            Address.of(there, Settings.load(upstream_api_key_file=path))
    path.write_text("key\n")
    assert Address.of(there, Settings.load(upstream_api_key_file=path)).authorization() == {
        "authorization": "Bearer key"
    }
    with pytest.raises(ConfigError, match="unset one"):
        Address.of(there, Settings.load(upstream_api_key_file=path, upstream_api_key="other"))


# -- what breaks --------------------------------------------------------------------------------------


def test_an_upstream_that_is_not_there_is_a_502_until_it_is(start: Callable[..., Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start(f"http://127.0.0.1:{port}")
    assert f"127.0.0.1:{port} does not answer yet" in server.process.stderr.readline()
    reply = server.post(COMPLETIONS, {"do": "whole"})
    assert reply.status_code == 502 and str(port) in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "server_error"
    assert httpx.get(server.url + "/health").status_code == 503
    assert httpx.get(server.url + "/healthz").status_code == 200
    with small_upstream(port):
        assert server.post(COMPLETIONS, {"do": "whole"}).status_code == 200
        time.sleep(1)  # for which it is not asked again
        assert httpx.get(server.url + "/health").json() == {"status": "ready"}
    assert server.post(COMPLETIONS, {"do": "whole"}).status_code == 502


@pytest.mark.parametrize("do", ["hang", "hang_streaming"])
def test_a_client_that_goes_away_ends_its_request_upstream(front: Server, small: Small, do: str) -> None:
    aborted = small.seen()["aborted"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(front.url + COMPLETIONS, json={"do": do}, timeout=0.5)
    small.until("aborted", aborted + 1, seconds=3)
    assert front.metric("kvass_active_requests") == 0


@pytest.mark.parametrize("do", ["die", "end_early"])
def test_a_stream_that_breaks_off_ends_in_an_error(front: Server, do: str) -> None:
    body = {"do": do, "kind": "text/event-stream"}
    text = front.post(COMPLETIONS, body).content
    assert text.startswith(CHUNKS[0] + b"\n\ndata: ") and b"[DONE]" not in text
    assert "upstream" in json.loads(text.split(b"data: ")[-1])["error"]["message"]
    client = openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="upstream"):
        list(client.completions.create(model="m", prompt="x", stream=True, extra_body=body))


def test_a_whole_answer_that_breaks_off_is_a_502(front: Server) -> None:
    reply = front.post(COMPLETIONS, {"do": "die", "kind": "application/json"})
    assert reply.status_code == 502 and "broke off" in reply.json()["error"]["message"]


def test_an_answer_of_no_known_kind_that_breaks_off_is_no_whole_one(front: Server) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        front.post("/v1/audio/speech", {"do": "die", "kind": "audio/wav"})


def test_a_key_that_the_upstream_refuses_is_not_the_clients_fault(front: Server) -> None:
    reply = front.post(COMPLETIONS, {"do": "refuse", "status": 401})
    assert reply.status_code == 502 and "upstream_api_key_file" in reply.json()["error"]["message"]


def test_a_slow_answer_is_waited_for(start: Callable[..., Server]) -> None:
    server = start(serve_receive_seconds="0.5")
    reply = server.post(COMPLETIONS, {"do": "late", "seconds": 2})
    assert reply.status_code == 200 and reply.json()["kvass"]["hit_tokens"] == 8


def test_a_client_that_reads_slowly_fills_no_memory(start: Callable[..., Server], small: Small) -> None:
    server, aborted = start(serve_receive_seconds="2"), small.seen()["aborted"]
    with _streamed(server, {"do": "flood"}) as reply:
        pieces = reply.iter_raw()
        assert next(pieces)
        time.sleep(1)
        sent = small.seen()["sent"]
        time.sleep(0.5)
        assert small.seen()["sent"] == sent < 64 << 20  # what sockets hold
        small.until("aborted", aborted + 1)  # who takes nothing is let go


@pytest.mark.alone
def test_no_piece_of_an_answer_waits_for_the_client_to_confirm_another(front: Server) -> None:
    """Where a connection has Nagle's algorithm on, that is about 40 ms each time."""
    seconds = []
    with httpx.Client() as client:
        for _ in range(20):
            began = time.perf_counter()
            assert client.post(front.url + COMPLETIONS, json={"do": "whole"}).status_code == 200
            seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[5] < 0.03


def test_bodies_are_bounded_in_size_and_time(start: Callable[..., Server], small: Small) -> None:
    server, before_it = start(serve_body_bytes="2000", serve_receive_seconds="0.5"), small.seen()["requests"]
    assert server.post(COMPLETIONS, {"x": "y" * 2000}).status_code == 413
    with socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port)) as slow:
        slow.sendall(head(COMPLETIONS, 10))
        assert b" 408 " in slow.recv(1000)
    assert small.seen()["requests"] == before_it


def test_a_server_before_itself_says_so(front: Server) -> None:
    via = dict(httpx.get(front.url + "/v1/x", headers={"Via": "1.1 other"}).json()["headers"])["via"]
    assert via.startswith("1.1 other, 1.1 kvass-")
    assert httpx.get(front.url + "/v1/x", headers={"Via": via}).status_code == 508


# -- ending -------------------------------------------------------------------------------------------


def test_a_stop_lets_requests_finish(start: Callable[..., Server]) -> None:
    server, found = start(), []
    body = {"do": "late", "seconds": 1.5}
    client = threading.Thread(target=lambda: found.append(server.post(COMPLETIONS, body)))
    client.start()
    _until_active(server)
    server.process.terminate()
    client.join()
    assert found[0].json()["kvass"]["hit_tokens"] == 8
    assert server.process.wait(10) == 0


def test_past_the_grace_requests_are_told(start: Callable[..., Server]) -> None:
    server, found = start(serve_grace_seconds="0.3"), {}
    clients = [
        threading.Thread(target=lambda do=do: found.update({do: server.post(COMPLETIONS, {"do": do})}))
        for do in ("hang", "hang_streaming")
    ]
    for one in clients:
        one.start()
    _until_active(server, 2)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 0
    for one in clients:
        one.join()
    assert found["hang"].status_code == 503 and "stopping" in found["hang"].json()["error"]["message"]
    assert b"[DONE]" not in found["hang_streaming"].content and b"stopping" in found["hang_streaming"].content


def test_a_second_signal_ends_it_at_once(start: Callable[..., Server]) -> None:
    server = start()
    with _streamed(server, {"do": "hang_streaming"}):
        server.process.terminate()
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.terminate()
        assert server.process.wait(2) == 128 + signal.SIGTERM


def _until_active(server: Server, count: int = 1) -> None:
    end = time.monotonic() + 10
    while server.metric("kvass_active_requests") < count:
        assert time.monotonic() < end
        time.sleep(0.02)

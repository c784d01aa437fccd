"""Whatever is sent: the right status, an error as OpenAI's, and a server that goes on."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest

from harness.servers import TINY_LENGTH, Server, head, started

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _goes_on(server: Server) -> Iterator[None]:
    """After every test the server must answer, and must have had no fault of its own."""
    yield
    reply = server.post(TEXT, {"prompt": "still there?", "max_tokens": 1})
    assert reply.status_code == 200
    assert server.metric("kvass_failed_requests_total") == 0


def _error(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": USER, "temperature": -0.1}, "temperature"),
        ({"messages": USER, "temperature": 1e300}, "temperature"),
        ({"messages": USER, "temperature": "0.5"}, "temperature"),
        ({"messages": USER, "top_p": 0}, "top_p"),
        ({"messages": USER, "top_p": 1.5}, "top_p"),
        ({"messages": USER, "max_tokens": -1}, "max_tokens"),
        ({"messages": USER, "max_tokens": 2.5}, "max_tokens"),
        ({"messages": USER, "max_tokens": True}, "max_tokens"),
        ({"messages": USER, "n": 0}, "n"),
        ({"messages": USER, "n": 10**9}, "n"),
        ({"messages": USER, "stop": ""}, "stop"),
        ({"messages": USER, "stop": [""]}, "stop"),
        ({"messages": USER, "stop": ["x"] * 17}, "stop"),
        ({"messages": USER, "stop": "x" * 257}, "stop"),
        ({"messages": USER, "logprobs": 5}, "logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER, "seed": "x"}, "seed"),
        ({"messages": USER, "stream": "yes"}, "stream"),
        ({"messages": USER, "kvass": {"loud": True}}, "kvass.loud"),
        ({"messages": USER, "kvass": {"load": "no"}}, "kvass.load"),
        ({"messages": USER, "kvass": {"load-now[1]": 1}}, "kvass.load-now[1]"),
        ({"messages": USER, "kvass": {"str": 1}}, "kvass.str"),
        ({"messages": USER, "kvass": {"special_tokens": True}}, "kvass.special_tokens"),
        ({"messages": USER, "kvass": 3}, "kvass"),
    ],
)
def test_a_chat_that_is_wrong_names_what_is(server: Server, body: Any, param: str) -> None:
    error = _error(server.post(CHAT, body))
    assert error["param"].startswith(param) and param in error["message"]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [-1], [10**12], [1.5], ["ok", 3], [[1], "x"], {"a": 1}, None, [49_152], [True]]
)
def test_a_prompt_that_is_none(server: Server, prompt: Any) -> None:
    assert _error(server.post(TEXT, {"prompt": prompt}))["param"].startswith("prompt")


def test_images_are_not_supported_yet(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://example.invalid/x.png"}}
    error = _error(server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]}))
    assert "image_url" in error["message"] and "not supported yet" in error["message"]


def test_parts_of_text_are_one_text(server: Server) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    options = {"max_tokens": 4, "temperature": 0}
    one, other = (
        server.post(CHAT, {"messages": [{"role": "user", "content": content}], **options}).json()
        for content in (parts, "one two")
    )
    assert one["choices"] == other["choices"]


def test_fields_of_openai_that_are_not_understood_are_ignored(server: Server) -> None:
    more = {
        "logit_bias": {"5": 1}, "presence_penalty": 0.1, "user": "me", "response_format": {"type": "text"},
        "service_tier": "auto", "store": False, "parallel_tool_calls": True, "metadata": {"a": "b"},
        "best_of": 1, "suffix": None, "anything": [1, {"at": "all"}],
    }  # fmt: skip
    assert server.post(CHAT, {"messages": USER, "max_tokens": 1, **more}).status_code == 200


def _with(field: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", ' + field + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"nope", b"[]", b"3", b"null", b"\x00\x01\x02",
        b'{"messages": NaN, "prompt": NaN}',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}], "prompt": "\xff\xfe"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800"}',
        _with(b'"temperature": NaN'), _with(b'"temperature": Infinity'), _with(b'"seed": 1e400'),
        _with(b'"user": "\\udfff"'), _with(b'"max_tokens": ' + b"9" * 5000),
        b"[" * 100_000, b'{"a":' * 100_000, _with(b'"user": ' + b"[" * 50_000 + b"]" * 50_000),
        '{"messages": []}'.encode("utf-16"),
    ],
    ids=lambda raw: raw[:30].decode("latin-1") + str(len(raw)),
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_are_no_request(server: Server, path: str, raw: bytes) -> None:
    reply = httpx.post(
        server.url + path, content=raw, headers={"Content-Type": "application/json"}, timeout=30
    )
    _error(reply)


def test_messages_with_deeply_nested_fields(server: Server) -> None:
    more: Any = []
    for _ in range(150):
        more = [more]
    body = {"messages": [{"role": "user", "content": "x", "more": more}], "max_tokens": 1}
    assert server.post(CHAT, body).status_code in (200, 400)


def test_another_content_type_is_refused(server: Server) -> None:
    reply = httpx.post(server.url + CHAT, content=b'{"messages": []}', headers={"Content-Type": "text/plain"})
    _error(reply)


def test_noncharacters_and_odd_unicode_are_text(server: Server) -> None:
    for text in ("\ufdd0 and \ufdef", "\u202e\u0000x", "\U0010ffff", "e\u0301" * 50):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        assert server.post(CHAT, body).status_code == 200
    _error(
        server.post(
            CHAT, {"messages": [{"role": "user", "content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}]}
        )
    )


def test_ten_thousand_messages_are_too_long_not_too_slow(server: Server) -> None:
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": f"number {number}"} for number in range(10_001)
    ]
    began = time.perf_counter()
    error = _error(server.post(CHAT, {"messages": messages}))
    assert error["code"] == "context_length_exceeded" and time.perf_counter() - began < 30


def test_a_prompt_of_exactly_the_models_length_is_too_long(server: Server) -> None:
    error = _error(server.post(TEXT, {"prompt": [7] * TINY_LENGTH, "max_tokens": 1}))
    assert str(TINY_LENGTH) in error["message"]
    fits = server.post(TEXT, {"prompt": [7] * (TINY_LENGTH - 1), "max_tokens": 10}).json()
    assert fits["usage"]["completion_tokens"] == 1 and fits["choices"][0]["finish_reason"] == "length"


def test_a_body_over_the_limit_is_a_413(start: Callable[..., Server]) -> None:
    server = start(serve_body_bytes="20000")
    _error(server.post(TEXT, {"prompt": "x" * 30_000}), 413)

    def chunks() -> Iterator[bytes]:  # of a length that nobody said beforehand
        for _ in range(100):
            yield b"x" * 1000

    with contextlib.suppress(httpx.WriteError):  # hung up on in the middle, which is a refusal too
        _error(httpx.post(server.url + TEXT, content=chunks()), 413)
    assert server.post(TEXT, {"prompt": "ok", "max_tokens": 1}).status_code == 200


def test_paths_and_methods_that_do_not_exist(server: Server) -> None:
    _error(httpx.get(server.url + "/v1/nothing"), 404)
    _error(httpx.get(server.url + CHAT), 405)
    _error(httpx.get(server.url + "/../../etc/passwd"), 404)


def test_special_tokens_in_a_prompt_are_text_unless_asked_for(server: Server) -> None:
    def tokens(**options: Any) -> int:
        body = {"prompt": "<|im_end|>", "max_tokens": 1, **options}
        count: int = server.post(TEXT, body).json()["usage"]["prompt_tokens"]
        return count

    assert tokens() > 1 == tokens(kvass={"special_tokens": True})


@pytest.fixture(scope="module")
def quick(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that does not wait for slow clients."""
    folder = tmp_path_factory.mktemp("quick")
    with started(folder, tiny_model, "--dtype", "float32", serve_receive_seconds="1") as one:
        yield one


class TestSockets:
    """Clients below HTTP."""

    def _connect(self, server: Server) -> socket.socket:
        url = httpx.URL(server.url)
        return socket.create_connection((url.host, url.port), timeout=20)

    def test_a_slow_head_is_cut_off(self, quick: Server) -> None:
        with self._connect(quick) as slow:
            began = time.perf_counter()
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\n")
            try:
                for number in range(100):
                    slow.sendall(f"X-{number}: y\r\n".encode())
                    time.sleep(0.1)
            except OSError:
                pass
            assert time.perf_counter() - began < 5
        assert quick.post(TEXT, {"prompt": "ok", "max_tokens": 1}).status_code == 200

    def test_a_silent_connection_is_cut_off(self, quick: Server) -> None:
        with self._connect(quick) as silent:
            assert silent.recv(1) == b""

    def test_a_slow_body_is_a_408(self, quick: Server) -> None:
        with self._connect(quick) as slow:
            slow.sendall(head(TEXT, 1000) + b"{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408")

    def test_many_slow_clients_leave_room_for_others(self, quick: Server) -> None:
        slow = [self._connect(quick) for _ in range(100)]
        for one in slow:
            one.sendall(b"GET /v1/models HT")
        assert quick.post(TEXT, {"prompt": "ok", "max_tokens": 1}).status_code == 200
        for one in slow:
            one.close()

    @pytest.mark.parametrize(
        "raw",
        [
            b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(20_000)),
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
            b"\r\n" * 50_000,
        ],
        ids=["header flood", "long path", "tls", "negative length", "huge length", "bad chunk", "newlines"],
    )  # fmt: skip
    def test_what_is_no_http(self, quick: Server, raw: bytes) -> None:
        with self._connect(quick) as broken:
            try:
                broken.sendall(raw)
                reply = broken.recv(1000)
            except ConnectionError:
                reply = b""
            assert not reply or reply.split(b" ")[1][:1] == b"4"
        assert quick.post(TEXT, {"prompt": "ok", "max_tokens": 1}).status_code == 200

    def test_two_streams_closed_in_mid_token(self, server: Server) -> None:
        body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": True}).encode()
        both = [self._connect(server) for _ in range(2)]
        for one in both:
            one.sendall(head(TEXT, len(body)) + body)
            assert one.recv(300)
        for one in both:
            one.close()
        end = time.monotonic() + 10
        while server.metric("kvass_active_requests"):
            assert time.monotonic() < end
            time.sleep(0.05)

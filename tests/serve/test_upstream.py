"""`kvass serve --upstream`: what passes untouched, what is added, and what tenants do not share."""

import base64
import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest

from harness.servers import Server
from harness.upstream_server import CHUNKS, USAGE, WHOLE, Small, before
from kvass.serve.rewriting import Lines, rewrite

KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "operator")}
API_KEYS = ",".join(f"{name}={key}" for name, key in KEYS.items())
REPORT = {
    "hit_tokens": 8, "computed_tokens": 1, "loaded_bytes": None, "load_seconds": None, "saved_seconds": None,
}  # fmt: skip
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def front(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with before(small.url + "/v1/", tmp_path_factory.mktemp("front")) as server:
        yield server


@pytest.fixture(scope="module")
def shared(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With tenants, and a key of its own for the upstream."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "key").write_text("the-key-of-the-upstream\n")
    with before(
        small.url, folder, api_keys=API_KEYS, tenant_salt="salty", serve_slots="2", serve_queue="1",
        upstream_api_key_file=str(folder / "key"),
    ) as server:  # fmt: skip
        yield server


def _as(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def _arrived(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return json.loads(base64.b64decode(reply.json()["body"]))


# -- what passes --------------------------------------------------------------------------------------


def test_a_request_arrives_as_it_was_sent(front: Server) -> None:
    body = b'{"n" : 1.0,"big":12345678901234567890123, "text":"\\ud800", "cache_salt": "own"}'
    for method, sent, kind in (
        ("POST", body, "application/json"),
        ("PUT", b"--b\r\n\x00\xff\r\n--b--", "multipart/form-data; boundary=b"),
        ("DELETE", b"", "text/plain"),
        ("POST", b"{not json", "application/json"),
    ):
        headers = {"Content-Type": kind, "X-Request-Id": "mine-1", "Traceparent": "00-1"}
        told = httpx.request(
            method, front.url + "/v1/files/a%2Fb%20c/?x=%2F&y=1&x=2", content=sent, headers=headers
        )
        assert told.headers["x-told"] == "by upstream" and told.headers["x-request-id"] == "mine-1"
        got = told.json()
        assert (got["method"], got["path"], got["query"]) == (method, "/v1/files/a%2Fb%20c/", "x=%2F&y=1&x=2")
        assert base64.b64decode(got["body"]) == sent
        assert {name: dict(got["headers"])[name.lower()] for name in headers} == headers


def test_secrets_and_what_concerns_one_connection_stay_behind(front: Server, shared: Server) -> None:
    hop = {"Connection": "close, X-Mine", "X-Mine": "1", "Te": "trailers", "Keep-Alive": "5"}
    secrets = {"Authorization": f"Bearer {KEYS['alice']}", "Cookie": "c=1", "X-Api-Key": "k", "Api-Key": "k"}
    for server, key in ((front, None), (shared, "Bearer the-key-of-the-upstream")):
        reply = httpx.get(server.url + "/v1/x", headers=hop | secrets)
        got = dict(reply.json()["headers"])
        assert got.get("authorization") == key
        assert not {"cookie", "x-api-key", "api-key", "x-mine", "te", "keep-alive"} & got.keys()
        assert got["host"] not in server.url and KEYS["alice"] not in reply.text
        again = httpx.get(server.url + "/v1/x", headers=secrets)  # the first one's answer set a cookie
        assert "cookie" not in dict(again.json()["headers"])


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_an_error_comes_back_byte_for_byte(front: Server, small: Small, status: int) -> None:
    body = {"do": "refuse", "status": status}
    direct, passed = (httpx.post(url + COMPLETIONS, json=body) for url in (small.url, front.url))
    assert (passed.status_code, passed.content) == (status, direct.content)
    for name in ("content-type", "retry-after", "server"):
        assert passed.headers[name] == direct.headers[name]


def test_paths_that_are_not_the_apis_go_nowhere(front: Server, small: Small) -> None:
    before_it = small.seen()["requests"]
    for path in ("/reset_prefix_cache", "/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/..%2fsleep", "/docs"):
        connection = http.client.HTTPConnection(httpx.URL(front.url).netloc.decode())
        connection.request("POST", path)
        assert connection.getresponse().status == 404
        connection.close()
    assert small.seen()["requests"] == before_it


# -- what is added ------------------------------------------------------------------------------------


def test_an_answer_gets_kvass_and_keeps_its_bytes(front: Server) -> None:
    reply = front.post(COMPLETIONS, {"do": "whole"})
    assert reply.json()["kvass"] == REPORT
    added = b',"kvass":' + json.dumps(REPORT, separators=(",", ":")).encode()
    assert reply.content.replace(added, b"") == WHOLE
    assert front.post("/v1/embeddings", {"do": "whole"}).content == WHOLE


def test_a_stream_gets_kvass_in_its_last_chunk_and_keeps_its_bytes(front: Server) -> None:
    reply = front.post("/v1/chat/completions", {"do": "stream"})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    added = b',"kvass":' + json.dumps(REPORT, separators=(",", ":")).encode()
    assert reply.content == b"".join((*CHUNKS[:2], CHUNKS[2].replace(b"}\n", added + b"}\n"), CHUNKS[3]))


def test_however_a_stream_is_cut_it_comes_out_the_same() -> None:
    stream = b"".join(CHUNKS)
    lines = Lines(one_prompt=True)
    whole = lines.feed(stream) + lines.finish()
    assert lines.done and json.dumps(REPORT, separators=(",", ":")).encode() in whole
    for size in (1, 2, 3, 5, 31):
        lines = Lines(one_prompt=True)
        pieces = [lines.feed(stream[start : start + size]) for start in range(0, len(stream), size)]
        assert b"".join(pieces) + lines.finish() == whole and lines.done


def test_a_line_without_an_end_is_not_held_for_ever() -> None:
    lines = Lines(one_prompt=True)
    piece, came = b"data: " + b"x" * 99_994, b""
    for _ in range(50):
        came += lines.feed(piece)
    assert len(came) > 49 * 100_000 - (1 << 20)
    came += lines.feed(b"}\n" + CHUNKS[2] + CHUNKS[3])
    assert came.startswith(piece * 50 + b"}\n") and b'"kvass":' in came and lines.done


def test_a_body_that_is_written_anew_says_the_same() -> None:
    sent = b'{"a":1.50,"b":12345678901234567890123,"c":"\\ud800\xc3\xa9","d":NaN,"kvass":{}}'
    got, _ = rewrite(sent, "application/json", "")
    assert repr(json.loads(got)) == repr(
        {key: one for key, one in json.loads(sent).items() if key != "kvass"}
    )


def test_what_vllm_does_not_say_is_not_made_up(front: Server) -> None:
    """Of several prompts it tells the cached tokens of the last one alone."""
    for prompt, hit in (("a", 8), ([1, 2], 8), (["a"], 8), (["a", "b"], None), ([[1], [2]], None)):
        told = front.post(COMPLETIONS, {"do": "whole", "prompt": prompt}).json()
        assert told["kvass"]["hit_tokens"] == hit and told["usage"] == USAGE


def test_permissions_reach_the_connector(front: Server) -> None:
    def sent(**body: Any) -> Any:
        return _arrived(front.post("/v1/chat/completions", body))

    assert sent(kvass={}) == {} and sent(kvass=None, x=1) == {"x": 1}
    assert sent(kvass={"load": True, "keep": True}, kv_transfer_params=None) == {"kv_transfer_params": None}
    assert sent(kvass={"keep": False}) == {"kv_transfer_params": {"kvass": {"store": False}}}
    own = {"do_x": 1, "kvass": {"load": False, "store": True, "segments": []}}
    assert sent(kvass={"keep": False}, kv_transfer_params=own) == {
        "kv_transfer_params": {"do_x": 1, "kvass": {"load": False, "store": False, "segments": []}}
    }
    for body in (
        {"kvass": {"kep": False}},
        {"kvass": {"keep": 0}},
        {"kvass": []},
        {"kvass": {"load": False}, "kv_transfer_params": []},
        {"kvass": {"load": False}, "kv_transfer_params": {"kvass": 1}},
    ):
        reply = front.post("/v1/chat/completions", body)
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("kv"), reply.text


def test_a_wish_for_reuse_anywhere_reaches_the_connector_under_a_marked_salt(
    front: Server, shared: Server
) -> None:
    wish = {"reuse": "anywhere", "max_fraction": 0.3, "budget": {"kl": 0.1}}

    def sent(server: Server, headers: dict[str, str] | None = None, **body: Any) -> Any:
        return _arrived(server.post("/v1/chat/completions", body, headers=headers or {}))

    told = sent(front, kvass=wish)
    assert told == {"kv_transfer_params": {"kvass": wish}, "cache_salt": "kvass-approximate"}
    assert sent(front, kvass=wish, cache_salt="mine/")["cache_salt"] == "mine/kvass-approximate"
    assert sent(front, kvass={"reuse": "prefix"}) == {"kv_transfer_params": {"kvass": {"reuse": "prefix"}}}
    plain = sent(shared, _as("alice"))["cache_salt"]
    assert sent(shared, _as("alice"), kvass=wish)["cache_salt"] == plain + "kvass-approximate"
    for bad in ({"reuse": "everywhere"}, {"max_fraction": 0}, {"max_fraction": 2}, {"budget": {"kl": -1}}):
        reply = front.post("/v1/chat/completions", {"kvass": bad})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("kvass."), reply.text
    reply = front.post("/v1/chat/completions", {"kvass": wish, "cache_salt": 3})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "cache_salt"


# -- tenants ------------------------------------------------------------------------------------------


def test_each_tenant_has_a_salt_that_no_client_can_choose(shared: Server) -> None:
    def salt(name: str, **body: Any) -> str:
        told = _arrived(shared.post("/v1/responses", body, headers=_as(name)))
        assert set(told) == {"cache_salt", *body}
        return str(told["cache_salt"])

    alice = salt("alice")
    assert salt("alice", cache_salt=None) == salt("alice", cache_salt="") == alice == salt("alice")
    salts = {
        alice,
        salt("bob"),
        *(salt(name, cache_salt=own) for name in ("alice", "bob") for own in ("x", alice)),
    }
    assert len(salts) == 6
    assert all(len(one) == 64 and one.isalnum() and "alice" not in one for one in salts)


def test_a_body_that_can_hold_no_salt_is_refused_where_it_could_hit(shared: Server, small: Small) -> None:
    before_it = small.seen()["requests"]
    bad = (b"{", b"[]", b'"x"', b"[" * 100_000, b'{"cache_salt": 5}')
    for body, kind in [
        (body, kind) for body in bad for kind in ("application/json", "application/x+json", "")
    ]:
        reply = httpx.post(
            shared.url + COMPLETIONS, content=body, headers=_as("bob") | {"Content-Type": kind}
        )
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
    assert small.seen()["requests"] == before_it
    disguised = _as("bob") | {"Content-Type": "audio/wav"}
    told = httpx.post(shared.url + COMPLETIONS, content=b' {"a": 1}', headers=disguised)
    assert set(_arrived(told)) == {"a", "cache_salt"}
    told = httpx.post(shared.url + "/v1/audio/x", content=b"\x00\xff", headers=disguised)
    assert base64.b64decode(told.json()["body"]) == b"\x00\xff"


def test_without_a_key_nothing_reaches_the_upstream(shared: Server, small: Small) -> None:
    before_it = small.seen()["requests"]
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": KEYS["bob"]}):
        assert httpx.post(shared.url + "/v1/x", headers=headers).status_code == 401
        assert httpx.get(shared.url + "/metrics", headers=headers).status_code == 401
    assert httpx.post(shared.url + "/v1/load_lora_adapter", headers=_as("bob")).status_code == 403
    assert httpx.get(shared.url + "/metrics", headers=_as("bob")).status_code == 403
    assert small.seen()["requests"] == before_it
    assert shared.post("/v1/load_lora_adapter", {}, headers=_as("operator")).status_code == 200
    text = httpx.get(shared.url + "/metrics", headers=_as("operator")).text
    assert "kvass_requests_total" in text and "alice" not in text
    assert httpx.get(shared.url + "/health").status_code == 200


def test_one_tenants_requests_leave_room_for_anothers(shared: Server, small: Small) -> None:
    aborted = small.seen()["aborted"]
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(_streamed(shared, {"do": "hang_streaming"}, _as("alice")))
        busy = shared.post(COMPLETIONS, {"do": "whole"}, headers=_as("alice"))
        assert busy.status_code == 429 and busy.headers["retry-after"]
        assert shared.post(COMPLETIONS, {"do": "whole"}, headers=_as("bob")).status_code == 200
    small.until("aborted", aborted + 3)


def _streamed(server: Server, body: Any, headers: dict[str, str] | None = None) -> Any:
    return httpx.stream("POST", server.url + COMPLETIONS, json=body, headers=headers, timeout=30)

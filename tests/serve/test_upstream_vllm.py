"""`kvass serve --upstream` and `kvass doctor --vllm` before a real vLLM."""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from harness.servers import Server, environment
from harness.upstream_server import before, vllm

KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob")}
TEXT = "It was a dark and stormy night, and the rain fell in torrents. " * 40


@pytest.fixture(scope="module")
def engine(models_path: Path, smollm2_fp32: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (model,) = models_path.glob("smollm2-135m-*")
    with vllm(model, tmp_path_factory.mktemp("vllm"), "--enable-prompt-tokens-details") as url:
        yield url


@pytest.fixture(scope="module")
def front(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = ",".join(f"{name}={key}" for name, key in KEYS.items())
    with before(engine, tmp_path_factory.mktemp("front"), api_keys=keys) as server:
        yield server


def _client(server: Server, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEYS[name], max_retries=0)


def _ask(server: Server, name: str, **body: Any) -> Any:
    options = {"model": "m", "prompt": TEXT, "max_tokens": 8, "temperature": 0.0} | body
    return _client(server, name).completions.create(**options)


def test_tenants_of_one_vllm_share_no_hit(front: Server) -> None:
    """Every request but the first is one that vLLM would answer from its own cache."""
    cold, warm = _ask(front, "alice"), _ask(front, "alice")
    other = _ask(front, "bob")
    salted = _ask(front, "alice", extra_body={"cache_salt": "of my own"})
    hits = [one.kvass["hit_tokens"] for one in (cold, warm, other, salted)]
    assert hits[0] == hits[2] == hits[3] == 0 < hits[1]
    assert hits[1] == warm.usage.prompt_tokens_details.cached_tokens
    assert warm.kvass["computed_tokens"] == warm.usage.prompt_tokens - hits[1]
    assert cold.choices[0].text == warm.choices[0].text == other.choices[0].text


def test_a_stream_is_the_same_as_vllms_own(front: Server, engine: str) -> None:
    options = {
        "model": "m", "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 20,
        "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    direct = openai.OpenAI(base_url=engine + "/v1", api_key="none").chat.completions.create(**options)  # type: ignore[call-overload]
    passed = _client(front, "alice").chat.completions.create(**options)  # type: ignore[call-overload]
    one, other = ([chunk.model_dump() for chunk in stream] for stream in (direct, passed))
    told = other[-1].pop("kvass")
    assert told["hit_tokens"] + told["computed_tokens"] == other[-1]["usage"]["prompt_tokens"]
    assert len(one) == len(other) > 10
    for mine, its in zip(other, one, strict=True):
        assert mine | {"id": "", "created": 0} == its | {"id": "", "created": 0}


def test_what_vllm_refuses_is_refused_in_its_words(front: Server, engine: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"model": "m", "messages": "no list"}),
        ("/v1/completions", {"model": "other", "prompt": "x"}),
        ("/v1/completions", {"model": "m", "prompt": "x", "temperature": -1}),
        ("/v1/no/such/path", {}),
    ):
        headers = {"Authorization": f"Bearer {KEYS['bob']}"}
        direct, passed = httpx.post(engine + path, json=body), front.post(path, body, headers=headers)
        assert (passed.status_code, passed.content) == (direct.status_code, direct.content)
        assert direct.status_code >= 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_generation(front: Server, engine: str, stream: bool) -> None:
    body = {"model": "m", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    headers = {"Authorization": f"Bearer {KEYS['alice']}", "Content-Type": "application/json"}
    client = http.client.HTTPConnection(httpx.URL(front.url).netloc.decode())
    client.request("POST", "/v1/completions", json.dumps(body), headers)
    _until_running(engine, 1)
    client.close()
    _until_running(engine, 0)
    written = _metric(engine, "vllm:generation_tokens_total")
    time.sleep(0.5)
    assert _metric(engine, "vllm:generation_tokens_total") == written


def _until_running(engine: str, count: int) -> None:
    end = time.monotonic() + 10
    while _metric(engine, "vllm:num_requests_running") != count:
        assert time.monotonic() < end
        time.sleep(0.05)


def _metric(url: str, name: str) -> float:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(name + "{"))


def test_the_doctor_knows_what_this_vllm_is(engine: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvass", "doctor", "--vllm", engine, "--json"],
        env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"] if one["area"] == "vllm"}
    assert findings["version"]["text"] == "0.32.0: kvass connector ok"
    assert findings["models"]["text"] == "m"
    assert findings["cached tokens"]["status"] == "ok"
    assert findings["connector"]["status"] == "warning"
    assert "--kv-transfer-config" in findings["connector"]["fix"]

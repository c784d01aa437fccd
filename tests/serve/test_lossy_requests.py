"""Requests that allow lossy state, and those that do not: what they get, and what they are told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fixtures.coders import calibrate, measured
from harness.servers import Server, environment, host_path
from kvass.cli import app
from kvass.config import Settings
from kvass.engines.transformers import Engine, Scope, Usage, load_model
from kvass.engines.transformers.hosting import kept_under
from kvass.serve.scheduler import Job

USER = [{"role": "user", "content": "Say nothing."}]
LOSSY = "lossy-int8"
TEXT = "A text that is long enough for some chunks, and read more than once. " * 20


@pytest.fixture
def fleet(tiny_model: str, start: Callable[..., Server], tmp_path: Path) -> Callable[..., Server]:
    """Servers that come after one another over one SSD tier, which stores by int8: each on an empty host."""
    models = tmp_path / "models"
    settings = Settings.load(models_path=models, disk_codec="int8")
    loaded = load_model(tiny_model, dtype="float32", models_path=models)
    space = Engine(loaded.model, None, shared=kept_under(loaded, settings)).namespace
    calibrate(models, space, [measured("int8", kl_mean=0.005)])

    def begin(**more: str) -> Server:
        shutil.rmtree(host_path(tmp_path), ignore_errors=True)
        return start(models_path=str(models), disk_codec="int8", **more)

    return begin


def ask(server: Server, **options: Any) -> tuple[int, dict[str, Any], str]:
    """Tokens of the prompt, what is said of them, and the answer."""
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "kvass": options}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["usage"]["prompt_tokens"], answer["kvass"], answer["choices"][0]["text"]


class _Answering:
    """As much of a request as decides who waits for whom."""

    def __init__(self, provenance: str = "exact", *, lossy: bool = False):
        self.tokens = np.arange(100, dtype=np.int32)
        self.usage = Usage(cached_tokens=10, provenance=provenance)
        self.scope = Scope(lossy=lossy)


def test_nobody_waits_for_a_prompt_whose_state_is_not_for_it() -> None:
    def waits(one: _Answering, other: _Answering) -> bool:
        mine, theirs = (Job("", job, lambda _: None, Event(), 0.0) for job in (one, other))  # type: ignore[arg-type]
        return mine.shares_with(theirs, 64)

    assert waits(_Answering(), _Answering())
    assert waits(_Answering(lossy=True), _Answering())
    assert waits(_Answering(lossy=True), _Answering(LOSSY))
    assert not waits(_Answering(), _Answering(LOSSY))


def test_explain_says_why_a_codec_is_not_used(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"models_path": str(tmp_path / "models"), "disk_codec": "int8", "allow_lossy": "true"}
    for name, value in environment(tmp_path, **settings).items():
        monkeypatch.setenv(name, value)
    asked = ["explain", "--model", tiny_model, "--dtype", "float32", "Hello there"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False).output)
    assert found["lossy"]["int8"]["allowed"] is False
    assert found["lossy"]["int8"]["kind"] == "no certificate"
    assert "int8 is not used: no certificate" in CliRunner().invoke(app, asked).output


def stop(server: Server) -> None:
    server.process.terminate()
    server.process.wait(30)


def test_lossy_state_is_for_requests_that_allow_it(fleet: Callable[..., Server]) -> None:
    first = fleet()
    size, told, exact_text = ask(first)
    assert (told["hit_tokens"], told["exact_tokens"], told["provenance"]) == (0, 0, "exact")
    stop(first)
    second = fleet()
    for options in ({"lossy": True, "budget": {"kl": 0.001}}, {"lossy": True, "budget": {"facts_lost": 0}}):
        _, told, _ = ask(second, keep=False, **options)
        assert (told["hit_tokens"], told["provenance"]) == (0, "exact")
    _, told, _ = ask(second, lossy=True, budget={"kl": 0.006})
    assert (told["hit_tokens"], told["exact_tokens"], told["provenance"]) == (size - 1, 0, LOSSY)
    for options in ({"keep": False}, {"lossy": False}):
        _, told, text = ask(second, **options)
        assert (told["hit_tokens"], told["provenance"], text) == (0, "exact", exact_text)
    _, told, text = ask(second, lossy=True)
    assert (told["exact_tokens"], told["provenance"], text) == (size - 1, "exact", exact_text)
    assert second.metric("kvass_refused_total", operation="lookup", reason="kl") == 0  # never looked for
    stop(second)
    third = fleet(allow_lossy="true")
    assert ask(third, lossy=False, keep=False)[1]["provenance"] == "exact"
    assert ask(third)[1]["provenance"] == LOSSY


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"lossy": "yes"}, "kvass.lossy"),
        ({"lossy": 1}, "kvass.lossy"),
        ({"budget": 0.01}, "kvass.budget"),
        ({"budget": {"kl": -1}}, "kvass.budget.kl"),
        ({"budget": {"kl": "0.1"}}, "kvass.budget.kl"),
        ({"budget": {"facts_lost": 1.5}}, "kvass.budget.facts_lost"),
        ({"budget": {"kld": 1}}, "kvass.budget.kld"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_values_are_named(server: Server, path: str, options: dict[str, Any], param: str) -> None:
    asked = {"messages": USER} if "chat" in path else {"prompt": "x"}
    reply = server.post(path, {**asked, "max_tokens": 1, "kvass": options})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert param in reply.json()["error"]["message"]

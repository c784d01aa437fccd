"""Chats over documents that stand in another order than they were read in, through the official client."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from typer.testing import CliRunner

from harness.servers import Server, environment
from kvass.cli import app
from kvass.config import Settings
from kvass.engines.transformers import Engine, load_model
from kvass.engines.transformers.hosting import kept_under
from kvass.quality import BlendMeasured, certify_blends, keep_blends

ROW = BlendMeasured(
    method="query", chosen=0.1, fraction=0.15, kl_mean=0.02, kl_low=0.01, kl_high=0.03, top1=0.9,
    facts_tried=200, facts_lost=0, facts_lost_high=0.015,
)  # fmt: skip
WISH = {"reuse": "anywhere", "max_fraction": 0.5, "budget": {"kl": 0.1}}
EXACT = {"keep": False}
SYSTEM = "Answer from these notes, and from nothing else."
ONE = "".join(f"On day {n} the boats went out at dawn with {n * 7} nets of blue rope.\n" for n in range(25))
TWO = "".join(f"Mill {n} is painted green, and its keeper counts {n * 3} sacks.\n" for n in range(25))
ASKED = f"{TWO}{ONE}What colour is the mill?"


class Client:
    """Chats of the official client with one server."""

    def __init__(self, server: Server):
        self._openai = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        self._model = server.model

    def ask(self, text: str, wish: dict[str, Any] | None = None, **options: Any) -> Any:
        return self._openai.chat.completions.create(
            model=self._model, temperature=0, **{"max_tokens": 6, **options},
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            extra_body={} if wish is None else {"kvass": wish},
        )  # fmt: skip

    def read_apart(self) -> None:
        for one in (ONE, TWO):
            self.ask(one)


@pytest.fixture
def begin(start: Callable[..., Server], tiny_model: str, tmp_path: Path) -> Callable[..., Client]:
    """Starts a server of a model for which repair is certified, that has read both documents."""

    def made(**settings: str) -> Client:
        models = tmp_path / "models"
        options = {"models_path": str(models), "reuse": "anywhere"}
        loaded = load_model(tiny_model, dtype="float32", models_path=models)
        space = Engine(loaded.model, None, shared=kept_under(loaded, Settings.load(**options))).namespace
        keep_blends(models, space, certify_blends(space, 50, 1.0, [ROW]))
        client = Client(start(**{"models_path": str(models), **settings}))
        client.read_apart()
        return client

    return made


def cached(reply: Any) -> int:
    return int(reply.usage.prompt_tokens_details.cached_tokens)


def is_repaired(reply: Any) -> bool:
    """Whether much of the prompt was read elsewhere, and the answer says so."""
    told, prompt = reply.kvass, reply.usage.prompt_tokens
    if told["provenance"] != "blend":
        assert (told["reused_tokens"], told["recomputed_fraction"]) == (0, 0)
        return False
    assert 0.3 * prompt < told["reused_tokens"] < prompt
    assert 0 < told["recomputed_fraction"] <= WISH["max_fraction"]
    assert told["exact_tokens"] + told["reused_tokens"] == told["hit_tokens"] == cached(reply)
    assert told["computed_tokens"] == prompt - cached(reply)
    return True


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


def test_documents_in_another_order_are_reused_where_that_is_asked_for(begin: Callable[..., Client]) -> None:
    client = begin()
    plain = client.ask(ASKED, EXACT)
    assert not is_repaired(plain)
    exact = cached(plain)  # the document that comes first now is where it was
    first = client.ask(ASKED, WISH)
    assert is_repaired(first)
    assert first.kvass["exact_tokens"] == exact
    assert cached(first) > 0.9 * first.usage.prompt_tokens
    again = client.ask(ASKED, WISH)
    assert is_repaired(again)
    assert cached(again) == again.usage.prompt_tokens - 1
    assert again.kvass["recomputed_fraction"] == first.kvass["recomputed_fraction"]
    assert text_of(again) == text_of(first)
    for wish in (None, {"reuse": "prefix"}, {**WISH, "load": False}):
        other = client.ask(ASKED, {**(wish or {}), **EXACT})
        assert not is_repaired(other)
        assert cached(other) == (0 if wish and not wish.get("load", True) else exact)
        assert text_of(other) == text_of(plain)


def test_what_the_certificate_does_not_cover_is_read(begin: Callable[..., Client]) -> None:
    client = begin()
    for wish in ({**WISH, "max_fraction": 0.1}, {**WISH, "budget": {"kl": 0.01}}, {"reuse": "anywhere"}):
        assert not is_repaired(client.ask(ASKED, {**wish, **EXACT})), wish
    assert is_repaired(client.ask(ASKED, WISH))


def test_a_stream_says_the_same(begin: Callable[..., Client]) -> None:
    client = begin()
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.ask(ASKED, WISH, **options))
    assert is_repaired(chunks[-1])
    whole = client.ask(ASKED, WISH)
    assert is_repaired(whole)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(whole)


def test_the_settings_say_what_holds_without_a_wish(begin: Callable[..., Client]) -> None:
    client = begin(reuse="anywhere", reuse_max_fraction="0.5", lossy_max_kl="0.1")
    assert not is_repaired(client.ask(ASKED, {"reuse": "prefix", **EXACT}))
    assert is_repaired(client.ask(ASKED))
    assert not is_repaired(client.ask(ASKED, {"reuse": "prefix", **EXACT}))


@pytest.mark.parametrize("first", [WISH, EXACT])
def test_two_at_once_get_what_each_asked_for(begin: Callable[..., Client], first: dict[str, Any]) -> None:
    """The second one comes while the first one is being answered."""
    client = begin()
    alone = text_of(client.ask(ASKED, EXACT, max_tokens=300))
    second = EXACT if first is WISH else WISH
    chunks = client.ask(ASKED, first, max_tokens=300, stream=True, stream_options={"include_usage": True})
    opened = next(chunks)
    other = client.ask(ASKED, second, max_tokens=300)
    rest = [opened, *chunks]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in rest if chunk.choices)
    told = {id(first): (rest[-1], text), id(second): (other, text_of(other))}
    assert is_repaired(told[id(WISH)][0])
    assert not is_repaired(told[id(EXACT)][0])
    assert told[id(EXACT)][1] == alone


@pytest.fixture
def explain(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any] | str]:
    """What `kvass explain` says of the chat over the same tiers."""
    chat = tmp_path / "chat.json"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    chat.write_text(json.dumps(messages))

    def asked(*arguments: str, **settings: str) -> dict[str, Any] | str:
        own = {"models_path": str(tmp_path / "models"), "reuse_max_fraction": "0.5", "lossy_max_kl": "0.1"}
        for name, value in (environment(tmp_path, **(own | settings)) | {"COLUMNS": "60"}).items():
            monkeypatch.setenv(name, value)
        told = ["explain", "--model", tiny_model, "--dtype", "float32", "--messages", str(chat), *arguments]
        output = CliRunner().invoke(app, told, catch_exceptions=False).output
        return json.loads(output) if "--json" in arguments else output

    return asked


def test_explain_shows_what_a_request_then_does(begin: Callable[..., Client], explain: Any) -> None:
    client = begin()
    assert "anywhere" not in explain("--json")
    found = explain("--json", "--anywhere")
    pieces = found["anywhere"]
    assert pieces["reason"] == ""
    told = client.ask(ASKED, WISH)  # what was explained was not stored: this is repaired now
    assert is_repaired(told)
    assert sum(stop - start for start, stop in pieces["segments"]) == told.kvass["reused_tokens"]
    assert 0.1 < pieces["recomputed_fraction"] <= WISH["max_fraction"]  # as much as hides behind loading
    assert found["tokens"] == told.usage.prompt_tokens
    for token in pieces["recomputed"]:
        assert any(start <= token < stop for start, stop in pieces["segments"])


def test_explain_draws_the_prompt(begin: Callable[..., Client], explain: Any) -> None:
    begin()
    pieces = explain("--json", reuse="anywhere")["anywhere"]  # as the setting says
    lines = explain("--anywhere").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("==="))
    upper, lower = lines[at], lines[at + 1].ljust(60)
    assert (len(upper), upper[-1]) == (60, ".")
    assert upper.strip("=").strip(".").strip("-") == ""
    assert 20 < upper.count("-") < 40
    assert all(one == "-" for one, below in zip(upper, lower, strict=True) if below != " ")
    below = " ".join(lines[at + 2 :])
    ((start, stop),) = pieces["segments"]
    said = rf"{start:,} to {stop - 1:,}: {stop - start:,} tokens read elsewhere, (\d+) computed anew"
    found = re.search(said, below)
    assert found
    assert f"# recomputed {found[1]} " in below
    assert int(found[1]) > 0.1 * (stop - start) - 2


def test_explain_says_why_nothing_is_reused(
    begin: Callable[..., Client], explain: Any, tmp_path: Path
) -> None:
    begin()
    assert "KL" in explain("--anywhere", "--json", lossy_max_kl="0.001")["anywhere"]["reason"]
    assert "too much" in explain("--anywhere", "--json", reuse_max_fraction="0.1")["anywhere"]["reason"]
    without = explain("--anywhere", models_path=str(tmp_path / "empty"))
    assert "kvass calibrate --blends" in without


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"reuse": "everywhere"}, "kvass.reuse"),
        ({"reuse": True}, "kvass.reuse"),
        ({"max_fraction": 0}, "kvass.max_fraction"),
        ({"max_fraction": 2}, "kvass.max_fraction"),
        ({"max_fraction": -0.1}, "kvass.max_fraction"),
        ({"max_fraction": "x"}, "kvass.max_fraction"),
        ({"max_fraction": True}, "kvass.max_fraction"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_wishes_are_named(server: Server, path: str, options: dict[str, Any], param: str) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    reply = server.post(path, {**asked, "max_tokens": 1, "kvass": options})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert param in reply.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_share_that_is_no_number(server: Server, number: str) -> None:
    body = f'{{"prompt": "x", "max_tokens": 1, "kvass": {{"max_fraction": {number}}}}}'
    reply = httpx.post(
        server.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400
    told = reply.json()["error"]
    assert told["param"] == "kvass.max_fraction" or "is not JSON" in told["message"]

"""`kvass explain` on a real tokenizer: both texts, the cause and the fix."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvass import KVCache, Pool, Settings
from kvass.cli import app
from kvass.errors import InputError

pytestmark = pytest.mark.model

MANUAL = (
    "To reset the device, hold the power button for ten seconds. The light blinks twice when it is done.\n"
)


@pytest.fixture
def loaded(smollm2_bf16: Any, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KVASS_HOST_PATH", str(shm / "host"))
    monkeypatch.setenv("KVASS_DISK_PATH", str(tmp_path / "disk"))
    monkeypatch.setenv("KVASS_DISK_BYTES", "0")
    monkeypatch.setenv("KVASS_STATE_PATH", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("kvass.engines.transformers.load_model", lambda *_, **__: smollm2_bf16)
    return smollm2_bf16


def keep(loaded: Any, tokens: list[int], salt: str = "") -> None:
    from kvass.engines.transformers import identify

    namespace = identify(loaded.model, tenant_salt=salt).namespace
    with KVCache.open(Settings.load()) as cache:
        cache.store(tokens, namespace, Pool(namespace.spec, len(tokens))).wait()


def explain(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_a_time_in_front_is_named(loaded: Any) -> None:
    from kvass.engines.transformers import encode_chat

    asked = "The time is {}. " + MANUAL * 20 + "How do I reset it?"
    keep(loaded, encode_chat(loaded, [{"role": "user", "content": asked.format("2025-03-03T10:00:01Z")}]))
    later = asked.format("2025-03-03T10:47:33Z")
    found = json.loads(explain("--chat", "--json", later))
    assert found["cause"] == "a date or time"
    assert "end of the prompt" in found["fix"]
    assert found["difference"]["position"] == found["hit_tokens"] > 10
    assert found["difference"]["prompt"].startswith("47:33Z. To reset")
    assert (
        found["difference"]["stored"].startswith("00:01Z. To reset")
        or "0:01Z" in found["difference"]["stored"]
    )
    text = explain("--chat", later)
    assert "cause:  a date or time" in text
    assert "fix:" in text


def test_an_answer_encoded_again_is_named(loaded: Any) -> None:
    from kvass.engines.transformers import encode_text

    tokenizer = loaded.tokenizer
    start, answer = "Question: how?\nAnswer:", " Hold the power button for ten seconds, and wait."
    written = [token for letter in answer for token in tokenizer(letter)["input_ids"]]  # as a model may, too
    keep(loaded, [*encode_text(loaded, start), *written])
    found = json.loads(explain("--json", start + answer + "\nQuestion: and then?"))
    assert found["cause"] == "the same text, cut into other tokens"


def test_another_question_has_no_cause(loaded: Any) -> None:
    from kvass.engines.transformers import encode_text

    keep(loaded, encode_text(loaded, f"{MANUAL}What does the light do?"))
    found = json.loads(explain("--json", f"{MANUAL}How long must I hold it?"))
    assert found["difference"] is not None
    assert (found["cause"], found["fix"]) == (None, None)
    assert "cause" not in explain(f"{MANUAL}How long must I hold it?")


def test_nothing_alike(loaded: Any) -> None:
    found = json.loads(explain("--json", "Hello"))
    assert (found["hit_tokens"], found["difference"], found["cause"], found["fix"]) == (0, None, None, None)


def test_a_chat_as_a_client_of_some_tenant_sends_it(loaded: Any, tmp_path: Path) -> None:
    from kvass.engines.transformers import encode_chat
    from kvass.serve.tenants import tenant_salt

    messages = [{"role": "system", "content": MANUAL * 3}, {"role": "user", "content": "How?"}]
    keep(loaded, encode_chat(loaded, messages), tenant_salt(Settings.load(), "acme"))
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(messages))
    found = json.loads(explain("--json", "--messages", str(path), "--tenant", "acme"))
    assert found["hit_tokens"] == found["tokens"]
    assert json.loads(explain("--json", "--messages", str(path)))["hit_tokens"] == 0
    assert json.loads(explain("--json", "--messages", str(path), "--tenant", "other"))["hit_tokens"] == 0


@pytest.mark.parametrize("text", ["", "{", "[]x", '["hi"]', '[{"role": "wizard", "content": "x"}]'])
def test_what_is_no_chat_is_said_in_a_line(loaded: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"chat\.json"):
        CliRunner().invoke(app, ["explain", "--messages", str(path)], catch_exceptions=False)

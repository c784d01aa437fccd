"""Nothing crosses tenants: not a hit, not a name, not a number."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from harness.servers import Server, started
from kvass.config import Settings
from kvass.errors import ConfigError
from kvass.serve.tenants import Tenants, new_key, tenant_salt

KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "handbook", "operator")}
TEXT = "A text that alice sends, and bob must not profit from. " * 20


@pytest.fixture(scope="module")
def shared(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = ",".join(f"{name}={key}" for name, key in KEYS.items())
    folder = tmp_path_factory.mktemp("tenants")
    with started(
        folder, tiny_model, "--dtype", "float32", public_tenants="handbook", api_keys=keys
    ) as server:
        yield server


def _as(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def _ask(server: Server, name: str, text: str = TEXT) -> Any:
    reply = server.post("/v1/completions", {"prompt": text, "max_tokens": 2}, headers=_as(name))
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]


def _cached(usage: Any) -> int:
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_prompt_of_another_tenant_is_a_prompt_never_seen(shared: Server) -> None:
    assert _cached(_ask(shared, "alice")) == 0
    usage = _ask(shared, "alice")
    assert _cached(usage) == usage["prompt_tokens"] - 1
    assert _cached(_ask(shared, "bob")) == 0
    assert _cached(_ask(shared, "bob")) == usage["prompt_tokens"] - 1


def test_public_state_is_read_by_all_and_written_by_its_owner_alone(shared: Server) -> None:
    public = "What the handbook says. " * 30
    _ask(shared, "handbook", public)
    usage = _ask(shared, "bob", public + "My secret: 42. " * 10)
    assert 0 < _cached(usage) < usage["prompt_tokens"]
    again = _ask(shared, "bob", public + "My secret: 42. " * 10)
    assert _cached(again) == again["prompt_tokens"] - 1  # kept, in bob's own namespace
    assert _cached(_ask(shared, "alice", public + "My secret: 42. " * 10)) == _cached(usage)
    assert _cached(_ask(shared, "handbook", public + "My secret: 42. " * 10)) == _cached(usage)


def test_answers_are_recalled_for_their_tenant_alone(shared: Server) -> None:
    messages = [{"role": "user", "content": "Say something strange."}]

    def ask(name: str, messages: list[dict[str, str]]) -> Any:
        body = {"messages": messages, "max_tokens": 30, "seed": 3}
        reply = shared.post("/v1/chat/completions", body, headers=_as(name))
        assert reply.status_code == 200
        return reply.json()

    first = ask("alice", messages)
    messages += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "Why?"},
    ]
    bob, alice = ask("bob", messages), ask("alice", messages)
    assert _cached(bob["usage"]) == 0
    assert _cached(alice["usage"]) >= first["usage"]["total_tokens"] - 1


@pytest.mark.parametrize(
    "headers",
    [
        {},
        *({"Authorization": value} for value in ("Bearer wrong", "Basic x", "Bearer", KEYS["bob"])),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics"])
def test_without_a_key_there_is_nothing(shared: Server, headers: dict[str, str], path: str) -> None:
    method = "POST" if "completions" in path else "GET"
    body = {"prompt": TEXT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    reply = httpx.request(method, shared.url + path, headers=headers, json=body if method == "POST" else None)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"


def test_metrics_are_the_operators_and_name_nobody(shared: Server) -> None:
    _ask(shared, "alice")
    assert httpx.get(shared.url + "/metrics", headers=_as("bob")).status_code == 403
    text = httpx.get(shared.url + "/metrics", headers=_as("operator")).text
    assert "kvass_requests_total" in text
    assert not any(name in text for name in ("alice", "bob", "handbook"))
    assert httpx.get(shared.url + "/healthz").status_code == 200


def test_what_lies_on_disk_holds_no_key_and_no_tenant(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(folder=tmp_path, api_keys=f"alice={KEYS['alice']}")
    _ask(server, "alice")
    server.process.terminate()
    assert server.process.wait(30) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("objects" in path.parts for path in files)
    for path in files:
        raw = path.read_bytes()
        assert KEYS["alice"].encode() not in raw and b'"alice' not in raw


class TestKeys:
    def test_files_hold_hashes_only(self, tmp_path: Path) -> None:
        key, digest = new_key()
        path = tmp_path / "keys.toml"
        path.write_text(f'acme = "{digest}"\n"two.of-them" = ["{new_key()[1]}", "{new_key()[1]}"]\n')
        tenants = Tenants.load(Settings.load(api_keys_file=path))
        assert tenants.of(key) == "acme" and tenants.of(key + "x") is None and tenants.of("") is None
        path.write_text(f'acme = "{key}"\n')
        with pytest.raises(ConfigError, match="only hashes"):
            Tenants.load(Settings.load(api_keys_file=path))

    @pytest.mark.parametrize(
        "keys",
        [
            "acme",
            "acme=short",
            "=0123456789abcdef0",
            "a b=0123456789abcdef0",
            "a=0123456789abcdef,b=0123456789abcdef",
            "acme=ключ-0123456789abcdef",
            "acme= 0123456789abcdef",
        ],
    )
    def test_unusable_keys_are_refused_by_name(self, keys: str) -> None:
        with pytest.raises(ConfigError):
            Tenants.load(Settings.load(api_keys=keys))

    @pytest.mark.parametrize("text", ["not toml =", "acme = 3", 'acme = ["x"]', '"a b" = "x"'])
    def test_unusable_files_are_refused_by_name(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "keys.toml"
        path.write_text(text)
        with pytest.raises(ConfigError):
            Tenants.load(Settings.load(api_keys_file=path))
        with pytest.raises(ConfigError):
            Tenants.load(Settings.load(api_keys_file=tmp_path / "none"))

    def test_salts_differ_by_tenant_and_by_secret(self) -> None:
        one, other = Settings.load(tenant_salt="one"), Settings.load(tenant_salt="other")
        salts = {tenant_salt(settings, name) for settings in (one, other) for name in ("a", "b", None)}
        assert len(salts) == 6
        assert tenant_salt(one, "a") == tenant_salt(one, "a")

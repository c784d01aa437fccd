"""Engines of vLLM over tiers in memory, and what vLLM answers without kvass."""

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from harness.vllm_server import Engines

_SHALLOW_LAYERS = 6
WORDS = "The history of computing is long, and every part of it was once new. "


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    with Engines() as warm:
        yield warm


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of the connector: tiers that nobody else uses."""
    host = Path(f"/dev/shm/kvass-vllm-{uuid.uuid4().hex}")
    yield {
        "host_path": str(host), "host_bytes": 1 << 30, "disk_path": str(tmp_path / "disk"),
        "disk_bytes": 1 << 30, "models_path": str(tmp_path / "models"),
    }  # fmt: skip
    for path in host.parent.glob(f"{host.name}*"):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2(models_path: Path) -> Path:
    return _converted("smollm2-135m", models_path)


@pytest.fixture(scope="session")
def gemma3(models_path: Path) -> Path:
    return _converted("gemma3-270m", models_path)


@pytest.fixture(scope="session")
def shallow(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first layers: quick, for what happens around a model rather than in it."""
    folder = tmp_path_factory.mktemp("shallow")
    for path in smollm2.iterdir():
        (folder / path.name).symlink_to(path)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    config = json.loads((smollm2 / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": _SHALLOW_LAYERS}))
    weights = load_file(smollm2 / "model.safetensors")
    number = re.compile(r"layers\.(\d+)\.")
    kept = {
        name: array
        for name, array in weights.items()
        if not (found := number.search(name)) or int(found[1]) < _SHALLOW_LAYERS
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def _converted(name: str, models_path: Path) -> Path:
    from kvass.engines.transformers.load import find_model

    return find_model(name, models_path)[1]


@pytest.fixture(scope="session")
def encode(smollm2: Path) -> Callable[[str], list[int]]:
    """Tokens of a text, for SmolLM2."""
    return _encoder(smollm2)


def _encoder(model: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


@pytest.fixture(scope="session")
def prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Eight prompts that begin with the same 500 tokens (three blocks and a bit) and end before 512."""
    stem = encode(WORDS * 40)[:500]
    ends = ("What came first?", "Who said so?", "Name one part.", "And then?", "Why?", "Where was it?")
    return [stem + encode(" " + end) for end in (*ends, "How long is it?", "Is it over?")]


@pytest.fixture(scope="session")
def expected(
    engines: Engines, smollm2: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What vLLM answers to each of them without kvass."""
    return _plain(engines, smollm2, prompts, tmp_path_factory.mktemp("plain"))


def _plain(engines: Engines, model: Path, prompts: list[list[int]], folder: Path) -> list[dict[str, Any]]:
    found = engines.ask("answers", folder, model=str(model), groups=[[one] for one in prompts])
    return [answer for (answer,) in found["groups"]]


@pytest.fixture(scope="session")
def answered(
    engines: Engines, shallow: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What the first layers alone answer to each of them without kvass."""
    return _plain(engines, shallow, prompts, tmp_path_factory.mktemp("plain-shallow"))


@pytest.fixture(scope="session")
def gemma_prompts(gemma3: Path) -> list[list[int]]:
    """Four prompts for Gemma 3 that begin with the same 1,000 tokens: its window is 512."""
    encode = _encoder(gemma3)
    stem = encode(WORDS * 80)[:1000]
    return [stem + encode(f" {end}")[1:] for end in ("What?", "Who said so?", "Name one part.", "And then?")]


@pytest.fixture(scope="session")
def gemma_expected(
    engines: Engines, gemma3: Path, gemma_prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What vLLM answers to each of them without kvass."""
    return _plain(engines, gemma3, gemma_prompts, tmp_path_factory.mktemp("plain-gemma"))

"""`kvass calibrate --blends` and `kvass quality --blends`: the certificate that lets passages be reused."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from kvass.cache import KVCache
from kvass.calibrate import run
from kvass.cli import app
from kvass.config import Settings
from kvass.engines.transformers import Engine, Sampling, Usage, load_model
from kvass.engines.transformers.hosting import kept_under
from kvass.engines.transformers.load import certified_namespace
from kvass.errors import InputError, ModelFilesError
from kvass.quality import BlendMeasured, Budget, Gate, certify_blends, keep_blends
from kvass.reuse.plan import Reuse
from kvass.reuse.selectors import SELECTORS

pytestmark = pytest.mark.model

ANY = Budget(kl=100.0, facts_lost=1.0)


@pytest.fixture
def tiny_path(smollm2_fp32: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random Llama of two small layers with SmolLM2's tokenizer; tiers and models of its own."""
    folder = tmp_path / "tiny"
    config = transformers.LlamaConfig(
        vocab_size=smollm2_fp32.model.config.vocab_size, hidden_size=32, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=4096,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    smollm2_fp32.tokenizer.save_pretrained(folder)
    monkeypatch.setenv("KVASS_MODELS_PATH", str(tmp_path / "models"))
    monkeypatch.setenv("KVASS_DISK_PATH", str(tmp_path / "disk"))
    monkeypatch.setenv("KVASS_HOST_BYTES", "0")
    monkeypatch.setenv("COLUMNS", "120")
    return folder


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def _row(method: str, chosen: float, kl: float, tried: int = 200, lost: float = 0.015) -> BlendMeasured:
    return BlendMeasured(
        method=method, chosen=chosen, fraction=min(1.0, chosen + 0.05), kl_mean=kl, kl_low=kl / 2,
        kl_high=2 * kl, top1=0.9, facts_tried=tried, facts_lost=0, facts_lost_high=lost if tried else 1.0,
    )  # fmt: skip


@pytest.fixture
def certified(tiny_path: Path, tmp_path: Path) -> Path:
    space = certified_namespace(str(tiny_path), tmp_path / "models")
    rows = [
        _row("none", 0.0, 0.05), _row("query", 0.25, 0.004), _row("query", 0.1, 0.009, lost=0.04),
        _row("query", 0.05, 0.012), _row("boundary", 0.25, 0.008, tried=0), _row("all", 1.0, 0.0, tried=0),
    ]  # fmt: skip
    keep_blends(tmp_path / "models", space, certify_blends(space, 50, 1.5, rows))
    return tiny_path


def test_what_is_measured_opens_the_gate(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one prompt; the model is too small to know a fact, so that the budget has to allow to lose all."""
    monkeypatch.setattr(run, "calibrate_repair", partial(run.calibrate_repair, prompts=1))
    made = json.loads(command("calibrate", str(tiny_path), "--blends", "--json"))
    assert {one["method"] for one in made["measured"]} == set(SELECTORS)
    shown = json.loads(command("quality", str(tiny_path), "--blends", "--json"))
    assert (shown["certificate"], shown["prompts"]) == (made["certificate"], 1)

    settings = Settings.load(reuse="anywhere")
    loaded = load_model(str(tiny_path), dtype="bfloat16", models_path=settings.models_path)
    draw = random.Random(0)
    system, one, two, question = ([draw.randrange(100, 9000) for _ in range(n)] for n in (40, 300, 300, 20))
    with KVCache.open(settings) as cache:
        engine = Engine(loaded.model, cache, shared=kept_under(loaded, settings))
        gate = Gate(settings.models_path)
        assert gate.blend(engine.namespace, "query", 0.3, ANY).allowed
        assert not gate.blend(engine.namespace, "query", 0.3, Budget()).allowed
        for text in (one, two):
            engine.read(system + text)
        cache.flush(30)
        found = {}
        for name, budget in (("any", ANY), ("default", None)):
            usage = Usage()
            asked = engine.generate(
                system + two + one + question, Sampling(max_tokens=1), usage=usage, reuse=Reuse(0.5),
                budget=budget,
            )  # fmt: skip
            list(asked)
            found[name] = usage.provenance
    assert found == {"any": "blend", "default": "exact"}


def test_json_says_what_was_measured_and_what_the_budget_allows(certified: Path) -> None:
    found = json.loads(command("quality", str(certified), "--blends", "--json"))
    rows = [(one["method"], one["chosen"], one["allowed"]) for one in found["measured"]]
    assert rows == [
        ("query", 0.05, False), ("query", 0.1, False), ("query", 0.25, True), ("all", 1.0, False),
        ("boundary", 0.25, False), ("none", 0.0, False),
    ]  # fmt: skip
    assert (found["prompts"], found["no_context"]) == (50, 1.5)
    assert "KL" in found["measured"][0]["reason"]
    assert "facts" in found["measured"][1]["reason"]


def test_the_table_has_every_row_and_says_why(certified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = command("quality", str(certified), "--blends")
    rows = [
        line.split() for line in text.splitlines() if line.strip().startswith(("query", "boundary", "none"))
    ]
    assert [
        "query",
        "25.0%",
        "30.0%",
        "0.004",
        "0.002..0.008",
        "90.0%",
        "0",
        "of",
        "200",
        "1.50%",
        "yes",
    ] in rows
    assert len(rows) == 5
    assert "not tried" in text
    assert "50 prompts, KL 1.5 without any passage; budget: KL 0.01" in text
    assert text.count("not used: repair by query") == 2
    monkeypatch.setenv("KVASS_LOSSY_MAX_KL", "0.02")
    monkeypatch.setenv("KVASS_LOSSY_MAX_FACTS_LOST", "0.05")
    assert "not used" not in command("quality", str(certified), "--blends")


def test_a_table_of_eighty_columns_is_whole(certified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "0.002..0.008" in command("quality", str(certified), "--blends")


def test_a_model_for_which_repair_was_not_measured(tiny_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="kvass calibrate --blends"):
        command("quality", str(tiny_path), "--blends")


def test_a_certificate_of_repair_that_was_altered(certified: Path, tmp_path: Path) -> None:
    path = next((tmp_path / "models" / "calibrated").glob("*/blends.json"))
    path.write_text(path.read_text().replace("0.012", "0.002"))
    with pytest.raises(ModelFilesError, match="altered"):
        command("quality", str(certified), "--blends")


def test_there_is_no_picture_of_repair(certified: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--png"):
        command("quality", str(certified), "--blends", "--png", str(tmp_path / "plot.png"))

"""`kvass quality`: the certificate as a table, a plot and JSON."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from kvass.cli import app
from kvass.cli.quality import plotted
from kvass.codecs.tables import Tables, write_tables
from kvass.engines.transformers.layers import kv_spec
from kvass.engines.transformers.load import certified_namespace
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import ModelFilesError
from kvass.models.shared import shared_namespace
from kvass.quality import Measured, binding, calibrated_folder, certify, keep_calibrated


def _measured(codec: str, bits: float, kl: float, lost: float = 0.01) -> Measured:
    return Measured(
        codec=codec, bits=bits, kl_mean=kl, kl_low=kl / 2, kl_high=2 * kl, kl_early=kl, kl_p99=9 * kl,
        top1=0.98, ppl_ratio=1.001, facts_tried=410, facts_lost=2, facts_lost_high=lost,
    )  # fmt: skip


MEASURED = [
    _measured("lossless", 10.4, 0.0, 0.0075), _measured("q2", 2.0, 0.0017), _measured("q4", 0.9, 0.04),
    _measured("kivi4", 5.1, 0.008, 0.031),
]  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, and an empty folder for what is calibrated."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    monkeypatch.setenv("KVASS_MODELS_PATH", str(tmp_path / "models"))
    return tmp_path / "tiny"


@pytest.fixture
def certified(model: Path, tmp_path: Path) -> Path:
    live = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    namespace = shared_namespace(model, kv_spec(live), "any", models_path=tmp_path / "models")
    tables = write_tables({})
    keep_calibrated(
        tmp_path / "models", namespace, tables, certify(namespace, Tables.parse(tables).digest, MEASURED)
    )
    return model


def quality(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["quality", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_json_says_what_was_measured_and_what_is_allowed(certified: Path) -> None:
    found = json.loads(quality(str(certified), "--json"))
    assert [one["codec"] for one in found["measured"]] == ["lossless", "q2", "q4", "kivi4"]
    assert [one["allowed"] for one in found["measured"]] == [True, True, False, False]
    assert "KL" in found["measured"][2]["reason"] and "facts" in found["measured"][3]["reason"]
    assert found["measured"][1]["bits"] == 2.0


def test_the_table_and_the_plot_have_every_codec(certified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    text = quality(str(certified))
    for one in MEASURED:
        assert one.codec in text
    assert "bits per element" in text and "budget: KL 0.01" in text


def test_a_model_without_a_certificate(model: Path) -> None:
    with pytest.raises(ModelFilesError, match="kvass calibrate"):
        quality(str(model))


def test_a_certificate_that_was_altered(certified: Path, tmp_path: Path) -> None:
    path = next((tmp_path / "models" / "calibrated").glob("*/certificate.json"))
    path.write_text(path.read_text().replace("0.04", "0.004"))
    with pytest.raises(ModelFilesError, match="altered"):
        quality(str(certified))


def test_a_png_is_written(certified: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quality(str(certified), "--png", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plots_place_marks_by_bits_and_kl() -> None:
    lines = plotted(MEASURED)
    rows = {mark: next(number for number, line in enumerate(lines) if mark in line[8:]) for mark in "abcd"}
    columns = {mark: lines[row].index(mark, 8) for mark, row in rows.items()}
    assert rows["c"] < rows["d"] < rows["b"] < rows["a"]
    assert columns["c"] < columns["b"] < columns["d"] < columns["a"]
    assert plotted([]) == []


def test_marks_on_one_spot_are_all_seen() -> None:
    text = "\n".join(line[8:] for line in plotted([_measured(str(n), 2.0, 0.01) for n in range(3)])[:-2])
    assert all(mark in text for mark in "abc")


@pytest.mark.parametrize("name", ["smollm2_fp32", "gemma3_fp32"])
def test_the_config_alone_leads_to_the_certificate(
    name: str, request: pytest.FixtureRequest, models_path: Path
) -> None:
    """What the command finds without weights is what a loaded model's certificate is bound to."""
    loaded = request.getfixturevalue(name)
    spec = TransformersRunner(loaded).spec
    live = shared_namespace(loaded.directory, spec, "", models_path=models_path)
    found = certified_namespace(str(loaded.directory), models_path)
    assert binding(live) == binding(found)
    assert calibrated_folder(models_path, live) == calibrated_folder(models_path, found)

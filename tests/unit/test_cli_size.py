"""`kvass size`: the formula, from numbers alone, from a config alone, and by layer group."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvass.cli import app
from kvass.errors import InputError, ModelFilesError

NUMBERS = [
    "--layers",
    "80",
    "--kv-heads",
    "8",
    "--head-dim",
    "128",
    "--dtype",
    "float16",
    "--tokens",
    "100000",
]


def size(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["size", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def sized(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(size(*arguments, "--json"))
    return found


def test_of_numbers_alone() -> None:
    found = sized(*NUMBERS)
    assert found["bytes"] == 32_768_000_000
    assert found["bytes_per_token"] == 327_680
    text = size(*NUMBERS)
    assert "2 x 80 layers x 8 KV heads x 128 head dim x 2 bytes (float16) x 100,000 tokens" in text
    assert "= 32,768,000,000 bytes (32.8 GB)" in text


def test_numbers_need_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"from kvass.cli import main; sys.argv = ['kvass', 'size', *{NUMBERS!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "32,768,000,000 bytes" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0", *NUMBERS[:-2]], "--tokens is 0"),
        ([*NUMBERS[2:]], "--layers is missing"),
        (["--tokens", "8"], "give a MODEL, or --layers"),
        (["--layers", "-1", *NUMBERS[2:]], "--layers is -1"),
        ([*NUMBERS, "--dtype", "int4"], "--dtype is 'int4'"),
        (["smollm2-135m", *NUMBERS], "--layers stands instead of a MODEL"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        size(*arguments)
    assert "\n" not in str(caught.value)


def test_a_number_that_is_none_names_the_option() -> None:
    done = CliRunner().invoke(app, ["size", "--tokens", "many"])
    assert done.exit_code == 2
    assert "--tokens" in done.output


def config_of(folder: Path, **changes: Any) -> str:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192,
        "vocab_size": 128_256, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28_672,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def test_of_a_config_alone(tmp_path: Path) -> None:
    model = config_of(tmp_path / "llama")  # 70 billion weights that are nowhere
    assert sized(model, "--tokens", "100000", "--dtype", "float16")["bytes"] == 32_768_000_000
    quantized = config_of(
        tmp_path / "quantized", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    assert sized(quantized, "--tokens", "1")["bytes"] == 327_680


def test_of_experts(tmp_path: Path) -> None:
    model = config_of(
        tmp_path / "experts", model_type="mixtral", architectures=["MixtralForCausalLM"], num_hidden_layers=4,
        num_local_experts=8,
    )  # fmt: skip
    assert sized(model, "--tokens", "10")["bytes"] == 2 * 4 * 8 * 128 * 2 * 10


def test_of_sliding_groups(tmp_path: Path) -> None:
    model = config_of(
        tmp_path / "gemma", model_type="gemma3_text", architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=6, hidden_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
        intermediate_size=64, sliding_window=512, vocab_size=1000,
    )  # fmt: skip
    found = sized(model, "--tokens", "2000")
    full, sliding = found["groups"]
    assert (full["kind"], full["layers"], full["window"]) == ("attention", 1, None)
    assert (sliding["kind"], sliding["layers"], sliding["window"]) == ("sliding", 5, 512)
    assert sliding["bytes"] == 2 * 5 * 32 * 2 * 2000
    assert sliding["bytes_seen"] == 2 * 5 * 32 * 2 * 511
    assert found["bytes"] == full["bytes"] + sliding["bytes"]
    text = size(model, "--tokens", "2000")
    assert "window of 512: all of it is stored" in text
    assert "together" in text


def test_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for model in (str(tmp_path), "no-such-model"):
        with pytest.raises(ModelFilesError, match=model):
            size(model, "--tokens", "1")


@pytest.mark.model
def test_of_a_bundled_model(smollm2_bf16: Any, gemma3_fp32: Any, models_path: Path, monkeypatch: Any) -> None:
    from kvass.engines.transformers.layers import kv_spec

    monkeypatch.setenv("KVASS_MODELS_PATH", str(models_path))
    assert sized("smollm2-135m", "--tokens", "1000")["bytes"] == 23_040_000
    for name, loaded, dtype in (
        ("smollm2-135m", smollm2_bf16, "bfloat16"),
        ("gemma3-270m", gemma3_fp32, "float32"),
    ):
        spec = kv_spec(loaded.model)
        groups = sized(name, "--tokens", "1", "--dtype", dtype)["groups"]
        assert [one["bytes"] for one in groups] == [group.bytes_per_token for group in spec.groups]
        assert [one["window"] for one in groups] == [group.window for group in spec.groups]


@pytest.mark.model
def test_of_a_gguf_file(models_path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from kvass.models.bundled import bundled_gguf

    monkeypatch.setenv("KVASS_MODELS_PATH", str(tmp_path))  # nothing is converted there, nor becomes so
    gguf = bundled_gguf("smollm2-135m", tmp_path)
    assert sized(str(gguf), "--tokens", "1")["bytes"] == 23_040
    assert list(tmp_path.iterdir()) == []

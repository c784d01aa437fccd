"""Conversion and loading of a toy GGUF that is written here."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvass.engines.transformers.convert import convert_gguf
from kvass.engines.transformers.load import encode_chat, encode_text, load_model
from kvass.errors import InputError, ModelFilesError, UnsupportedModelError
from kvass.models.digests import weights_digest


def _stamps(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (directory, *directory.iterdir())}


def write_toy(path: Path, *, leave_out: str = "", add_bos: bool = True, rope_scaling: str = "") -> Path:
    """Write a GGUF of a random Llama of one layer; its tokens are the bytes, two pairs and two specials."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("toy")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<bos>", "<eos>", *bytes_to_unicode().values(), "ĠĠ", "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * 258])
    writer.add_token_merges(["Ġ Ġ", "a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    if rope_scaling:
        writer.add_string("llama.rope.scaling.type", rope_scaling)
    shapes = {
        "token_embd": (len(tokens), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (48, 32),
        "blk.0.ffn_up": (48, 32),
        "blk.0.ffn_down": (32, 48),
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def toy_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("gguf") / "toy.gguf")


def test_a_gguf_path_is_converted_once(toy_gguf: Path, tmp_path: Path) -> None:
    first = load_model(str(toy_gguf), dtype="float32", models_path=tmp_path)
    assert first.name == "toy.gguf"
    assert first.directory.parent == tmp_path
    assert first.directory.name.startswith("toy.gguf-")
    before = _stamps(first.directory)
    second = load_model(str(toy_gguf), dtype="bfloat16", models_path=tmp_path)
    assert second.directory == first.directory
    assert _stamps(second.directory) == before
    assert encode_text(second, "ab") == [0, second.tokenizer.convert_tokens_to_ids("ab")]


def test_the_converted_weights_are_the_files_in_float32(toy_gguf: Path, tmp_path: Path) -> None:
    written = {tensor.name: tensor.data for tensor in GGUFReader(toy_gguf).tensors}
    for dtype in ("float32", "bfloat16", "float16"):
        loaded = load_model(str(toy_gguf), dtype=dtype, models_path=tmp_path)
        held = loaded.model.get_parameter("model.layers.0.mlp.down_proj.weight")
        assert held.dtype == getattr(torch, dtype)
        assert torch.equal(held, torch.tensor(written["blk.0.ffn_down.weight"]).to(held.dtype))


def test_a_directory_loads_as_it_is(toy_gguf: Path, tmp_path: Path) -> None:
    convert_gguf(toy_gguf, tmp_path / "mine", add_bos=False, chat_template=None)
    loaded = load_model(str(tmp_path / "mine"), models_path=tmp_path / "unused")
    assert (loaded.name, loaded.directory) == ("mine", tmp_path / "mine")
    assert loaded.model.dtype == torch.bfloat16
    assert 0 not in encode_text(loaded, "ab")
    assert not (tmp_path / "unused").exists()
    with pytest.raises(InputError, match="mine has no chat template"):
        encode_chat(loaded, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("written", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_a_chat_begins_with_one_bos(written: str, toy_gguf: Path, tmp_path: Path) -> None:
    template = written + "{{ messages[0]['content'] }}"
    convert_gguf(toy_gguf, tmp_path / "toy", add_bos=True, chat_template=template)
    loaded = load_model(str(tmp_path / "toy"), models_path=tmp_path)
    assert encode_chat(loaded, [{"role": "user", "content": "ab"}]) == encode_text(loaded, "ab")
    assert encode_text(loaded, "<bos>ab") == encode_text(loaded, "ab")


def test_a_loaded_model_only_computes(toy_gguf: Path, tmp_path: Path) -> None:
    model = load_model(str(toy_gguf), models_path=tmp_path).model
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_two_processes_convert_to_the_same_directory(toy_gguf: Path, tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from kvass.engines.transformers.load import load_model
print(load_model({str(toy_gguf)!r}, models_path=Path({str(tmp_path)!r})).directory)
"""
    command = [sys.executable, "-c", script]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [worker.communicate()[0].strip() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert said[0] == said[1]
    assert not list(tmp_path.glob(".*.draft"))
    convert_gguf(toy_gguf, tmp_path / "again", add_bos=True, chat_template=None)
    digests = {weights_digest(Path(path), tmp_path) for path in (said[0], str(tmp_path / "again"))}
    assert len(digests) == 1, "the same file gives the same bytes"


def test_what_lies_beside_a_gguf_is_not_read(toy_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(toy_gguf.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("of another model")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<other>"}')
    loaded = load_model(str(tmp_path / "model.gguf"), models_path=tmp_path / "models")
    assert loaded.tokenizer.chat_template is None
    assert loaded.tokenizer.bos_token == "<bos>"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"leave_out": "blk.0.ffn_up"}, ModelFilesError, r"lacks weights.*mlp\.up_proj"),
        ({"rope_scaling": "yarn"}, UnsupportedModelError, "scales its RoPE"),
    ],
)
def test_a_conversion_that_would_be_wrong_is_refused(
    changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    toy = write_toy(tmp_path / "toy.gguf", **changes)
    with pytest.raises(error, match=said):
        convert_gguf(toy, tmp_path / "out", add_bos=False, chat_template=None)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"no" * 100)
    with pytest.raises(ModelFilesError, match="not a readable GGUF"):
        load_model(str(tmp_path / "no.gguf"), models_path=tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelFilesError, match="cannot load"):
        load_model(str(tmp_path), models_path=tmp_path)


def test_an_unknown_name_lists_the_bundled_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"'gpt-5'.*smollm2-135m, gemma3-270m"):
        load_model("gpt-5", models_path=tmp_path)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bfloat16, float32, float16"):
        load_model("smollm2-135m", dtype="int8", models_path=tmp_path)  # type: ignore[arg-type]

"""The two bundled models, as they are converted and loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvass.engines.transformers.load import LoadedModel, encode_chat, encode_text, load_model
from kvass.errors import InputError
from kvass.models.bundled import BUNDLED, bundled_gguf

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PARAGRAPH = (
    "The Eiffel Tower is a wrought-iron tower in Paris, the capital of France. It was built from 1887 to "
    "1889 for the World's Fair, and is today one of the most visited monuments in the world."
)


def _stamps(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (directory, *directory.iterdir())}


def _greedy(loaded: LoadedModel, tokens: list[int], count: int) -> str:
    answer = loaded.model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return str(loaded.tokenizer.decode(answer[0][len(tokens) :], skip_special_tokens=True))


def _loss(loaded: LoadedModel, tokens: list[int]) -> float:
    with torch.no_grad():
        logits = loaded.model(torch.tensor([tokens])).logits[0]
    count = 24  # the last tokens only, so that both ways of reading are asked for the same ones
    return float(torch.nn.functional.cross_entropy(logits[-count - 1 : -1], torch.tensor(tokens[-count:])))


def test_a_bundled_model_is_not_converted_twice(smollm2_fp32: LoadedModel, models_path: Path) -> None:
    before = _stamps(smollm2_fp32.directory)
    again = load_model("smollm2-135m", models_path=models_path)
    assert again.directory == smollm2_fp32.directory
    assert _stamps(again.directory) == before


def test_smollm2_answers_a_chat(smollm2_fp32: LoadedModel) -> None:
    tokens = encode_chat(smollm2_fp32, QUESTION)
    assert smollm2_fp32.tokenizer.decode(tokens).startswith("<|im_start|>system\nYou are a helpful")
    assert smollm2_fp32.tokenizer.decode(tokens).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert _greedy(smollm2_fp32, tokens, 12) == "The capital of France is Paris."


def test_smollm2_holds_the_dequantised_blocks(smollm2_fp32: LoadedModel, smollm2_bf16: LoadedModel) -> None:
    reader = GGUFReader(bundled_gguf("smollm2-135m", smollm2_fp32.directory.parent))
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.7.ffn_down.weight")
    blocks = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    name = "model.layers.7.mlp.down_proj.weight"
    assert torch.equal(smollm2_fp32.model.get_parameter(name), blocks)
    assert torch.equal(smollm2_bf16.model.get_parameter(name), blocks.bfloat16())


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a  2", ["a", "ĠĠ", "2"]),
        ("x\n\n10", ["x", "ĊĊ", "1", "0"]),
        ("in 2024,", ["in", "Ġ", "2", "0", "2", "4", ","]),
    ],
)
def test_smollm2_splits_before_every_digit(smollm2_fp32: LoadedModel, text: str, pieces: list[str]) -> None:
    # As llama.cpp does for this file; the tokenizer that transformers makes of it does not.
    assert smollm2_fp32.tokenizer.convert_ids_to_tokens(encode_text(smollm2_fp32, text)) == pieces


def test_smollm2_puts_no_bos_before_a_text(smollm2_fp32: LoadedModel) -> None:
    assert encode_text(smollm2_fp32, "hi") == smollm2_fp32.tokenizer.convert_tokens_to_ids(["hi"])


def test_gemma3_is_configured_as_published(gemma3_fp32: LoadedModel) -> None:
    config: Any = gemma3_fp32.model.config
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert config.sliding_window == 512
    assert {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()} == {
        "sliding_attention": 10_000.0,
        "full_attention": 1_000_000.0,
    }
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 256)
    assert config.query_pre_attn_scalar == 256
    assert config.final_logit_softcapping is None
    assert config.attn_logit_softcapping is None
    assert config.tie_word_embeddings
    assert not hasattr(config, "quantization_config")


def test_gemma3_computes_as_it_is_configured(gemma3_fp32: LoadedModel) -> None:
    model: Any = gemma3_fp32.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert float(model.model.embed_tokens.embed_scale) == pytest.approx(640**0.5)
    for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1e6)):
        frequencies = getattr(model.model.rotary_emb, f"{kind}_inv_freq")
        assert float(frequencies[64]) == pytest.approx(theta**-0.5)


def test_gemma3_reads_bos_once(gemma3_fp32: LoadedModel) -> None:
    tokenizer: PreTrainedTokenizerBase = gemma3_fp32.tokenizer
    fresh = AutoTokenizer.from_pretrained(gemma3_fp32.directory, local_files_only=True)
    assert fresh("hi")["input_ids"][0] == 2
    plain = encode_text(gemma3_fp32, "hi")
    assert plain[0] == 2
    assert plain.count(2) == 1
    rendered = str(tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False))
    assert rendered == "<bos>User: What is the capital of France?\nAssistant:"
    assert encode_chat(gemma3_fp32, QUESTION) == encode_text(gemma3_fp32, rendered)
    assert encode_chat(gemma3_fp32, QUESTION).count(2) == 1
    assert tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    ) == encode_chat(gemma3_fp32, QUESTION)


def test_gemma3_needs_its_bos(gemma3_fp32: LoadedModel) -> None:
    with_bos = encode_text(gemma3_fp32, "The capital city of France is called")
    assert _greedy(gemma3_fp32, with_bos, 1) == " Paris"
    assert _greedy(gemma3_fp32, with_bos[1:], 1) != " Paris"
    paragraph = encode_text(gemma3_fp32, PARAGRAPH)
    assert _loss(gemma3_fp32, paragraph) + 0.5 < _loss(gemma3_fp32, paragraph[1:])


def test_gemma3_answers_a_chat(gemma3_fp32: LoadedModel) -> None:
    answer = _greedy(gemma3_fp32, encode_chat(gemma3_fp32, QUESTION), 8)
    assert answer.startswith(" The capital of France is Paris.")


def test_a_chat_grows_at_its_end(gemma3_fp32: LoadedModel, smollm2_fp32: LoadedModel) -> None:
    longer = [
        *QUESTION,
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And Italy?"},
    ]
    for loaded in (gemma3_fp32, smollm2_fp32):
        short = encode_chat(loaded, QUESTION)
        assert encode_chat(loaded, longer)[: len(short)] == short


def test_gemma3_takes_a_system_message_and_refuses_other_roles(gemma3_fp32: LoadedModel) -> None:
    system = {"role": "system", "content": "Be brief."}
    text = gemma3_fp32.tokenizer.decode(encode_chat(gemma3_fp32, [system, *QUESTION], False))
    assert text == "<bos>Be brief.\nUser: What is the capital of France?\n"
    with pytest.raises(InputError, match="a role must be system, user or assistant, not tool"):
        encode_chat(gemma3_fp32, [{"role": "tool", "content": ""}])
    assert BUNDLED["gemma3-270m"].chat_template == gemma3_fp32.tokenizer.chat_template

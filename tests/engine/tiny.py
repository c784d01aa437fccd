"""Small models with random weights, of the families that the tests run, and of those that are refused."""

from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

VOCABULARY = 160
WINDOW = 48

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MIXED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_LONG = _rope(
    "longrope",
    short_factor=[1.0] * 8,
    long_factor=[2.0] * 8,
    original_max_position_embeddings=64,
    factor=16.0,
)

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama3-rope": ("LlamaConfig", "LlamaForCausalLM", _LLAMA3),
    "linear-rope": ("LlamaConfig", "LlamaForCausalLM", _rope("linear", factor=4.0)),
    "yarn-rope": (
        "Qwen2Config", "Qwen2ForCausalLM", _rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 16, **_MIXED}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", {}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 3, "n_head": 4}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 1.0}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {"logit_scale": 1.0, **_MIXED}),
    "ernie4.5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"head_dim": 16}),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _MIXED),
    "falcon": ("FalconConfig", "FalconForCausalLM", {}),
    "falcon-alibi": ("FalconConfig", "FalconForCausalLM", {"alibi": True}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, **_MIXED}),
    "glm": ("GlmConfig", "GlmForCausalLM", {"head_dim": 16}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16}),
    "gpt-bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT2),
    "gpt-j": ("GPTJConfig", "GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "gpt-neo": (
        "GPTNeoConfig", "GPTNeoForCausalLM",
        {
            "num_hidden_layers": 2, "num_heads": 4, "window_size": WINDOW,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {"head_dim": 16, "num_local_experts": 4, **_MIXED}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "ministral": ("MinistralConfig", "MinistralForCausalLM", {"head_dim": 16, **_MIXED}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 3}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", _MIXED),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 48, **_MOE}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"head_dim": 16, **_MOE}),
    "seed-oss": ("SeedOssConfig", "SeedOssForCausalLM", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 3}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {}),
    "vaultgemma": ("VaultGemmaConfig", "VaultGemmaForCausalLM", {"head_dim": 16, **_MIXED}),
}  # fmt: skip
"""Families that kvass handles. The list of supported models in the documentation is this one."""

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "deepseek-v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _MLA, "MLA"),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _MLA, "MLA"),
    "mamba": ("MambaConfig", "MambaForCausalLM", {}, "recurrent"),
    "mamba2": (
        "Mamba2Config", "Mamba2ForCausalLM", {"num_heads": 16, "head_dim": 8, "n_groups": 1}, "recurrent"
    ),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {}, "recurrent"),
    "jamba": (
        "JambaConfig", "JambaForCausalLM",
        {"num_hidden_layers": 8, "num_experts": 2, "use_mamba_kernels": False}, "linear_attention",
    ),
    "bamba": (
        "BambaConfig", "BambaForCausalLM",
        {"attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 1},
        "linear_attention",
    ),
    "qwen3-next": (
        "Qwen3NextConfig", "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4, "head_dim": 16, "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, **_MOE,
        }, "linear_attention",
    ),
    "falcon-h1": (
        "FalconH1Config", "FalconH1ForCausalLM",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}, "hybrid",
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 16, "mamba_d_head": 8,
            "mamba_n_groups": 1,
        }, "linear_attention",
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    "recurrent-gemma": (
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", {"lru_width": 64, "attention_window_size": 48},
        "keys and values",
    ),
    "minimax": (
        "MiniMaxConfig", "MiniMaxForCausalLM", {"head_dim": 16, "num_local_experts": 2}, "linear_attention"
    ),
    "gpt": (
        "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4},
        "keys and values",
    ),
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "pad_token_id": 0},
        "encoder-decoder",
    ),
    "bart": (
        "BartConfig", "BartForConditionalGeneration",
        {
            "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "pad_token_id": 0,
        }, "encoder-decoder",
    ),
    "dynamic-rope": ("LlamaConfig", "LlamaForCausalLM", _rope("dynamic", factor=2.0), "dynamic"),
    "longrope": ("Phi3Config", "Phi3ForCausalLM", _LONG, "longrope"),
    "llama4": (
        "Llama4TextConfig", "Llama4ForCausalLM",
        {"num_local_experts": 2, "intermediate_size_mlp": 96, "head_dim": 16, "pad_token_id": 0},
        "chunked_attention",
    ),
    "gemma3n": (
        "Gemma3nTextConfig", "Gemma3nForCausalLM",
        {
            "head_dim": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
            "vocab_size_per_layer_input": VOCABULARY, "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0,
        }, "share",
    ),
    "bidirectional": (
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        {"head_dim": 16, "use_bidirectional_attention": True, **_MIXED}, "both directions",
    ),
}  # fmt: skip
"""Families that kvass refuses, and a word of the reason it gives."""


def build(config: str, model: str, settings: dict[str, Any], *, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    made = getattr(transformers, config)(**{**_COMMON, **settings})
    built: PreTrainedModel = getattr(transformers, model)(made).eval().requires_grad_(False)
    return built


def tiny(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    config, model, settings = FAMILIES[name]
    return build(config, model, {**settings, **changes}, seed=seed)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCABULARY, length).tolist()


def plain(model: PreTrainedModel, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits `[count, vocabulary]`, the prompt in one call, by transformers alone."""
    cache = DynamicCache(config=model.config)
    calls, chosen, rows = [prompt], [], []
    with torch.inference_mode():
        for call in calls:
            rows.append(model(torch.tensor([call]), past_key_values=cache, use_cache=True).logits[0, -1])
            chosen.append(int(rows[-1].argmax()))
            if len(chosen) < count:
                calls.append(chosen[-1:])
    return chosen, torch.stack(rows)

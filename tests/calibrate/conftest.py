"""Runners over models so small that their forwards cost nothing, with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawing import VOCABULARY, WINDOW

from fixtures.threads import one_thread  # noqa: F401 - for every test here
from kvass.engines.transformers.load import LoadedModel
from kvass.engines.transformers.runner import TransformersRunner

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _made(kind: str, name: str, **changes: Any) -> LoadedModel:
    config = getattr(transformers, f"{kind}Config" if kind != "Gemma3" else "Gemma3TextConfig")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config(**_COMMON, **changes))
    return LoadedModel(model.eval().requires_grad_(False), None, name, Path())  # type: ignore[arg-type]


@pytest.fixture(scope="session", params=["llama", "gemma3"])
def tiny(request: Any) -> LoadedModel:
    """Full attention alone, or full and sliding layers with two RoPEs."""
    if request.param == "llama":
        return _made("Llama", "tiny-llama")
    return _made("Gemma3", "tiny-gemma3", head_dim=16, sliding_window=WINDOW, layer_types=_MIXED)


@pytest.fixture
def runner(tiny: LoadedModel) -> TransformersRunner:
    return TransformersRunner(tiny)

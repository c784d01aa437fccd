"""A small and quick model for most tests of the server, SmolLM2 for some."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.servers import TINY_LENGTH, Server, remove_host_paths, started
from harness.upstream_server import Small, small_upstream


@pytest.fixture(scope="session", autouse=True)
def _leave_nothing_in_shared_memory() -> Iterator[None]:
    yield
    remove_host_paths()


@pytest.fixture(scope="session")
def tiny_model(smollm2_fp32: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random Llama of two small layers, and SmolLM2's tokenizer and template."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=smollm2_fp32.model.config.vocab_size, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=TINY_LENGTH, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    smollm2_fp32.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start(tiny_model: str, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers; by default of the tiny model in float32."""
    with ExitStack() as stack:

        def begin(
            *arguments: str, model: str = tiny_model, folder: Path = tmp_path, **settings: str
        ) -> Server:
            return stack.enter_context(started(folder, model, "--dtype", "float32", *arguments, **settings))

        yield begin


@pytest.fixture(scope="session")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of the tiny model for all tests that leave it as it is."""
    with started(tmp_path_factory.mktemp("server"), tiny_model, "--dtype", "float32") as one:
        yield one


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    """An OpenAI-like server in a process of its own, for what stands before it."""
    with small_upstream() as one:
        yield one

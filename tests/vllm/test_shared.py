"""KV that engines share: the transformers engine goes on with what vLLM stored, and the other way round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from same import assert_all_same

from harness.vllm_server import Engines
from kvass.cache import KVCache
from kvass.config import Settings
from kvass.engines.transformers import Engine, LoadedModel, Sampling, Usage, shared_with

Answer = dict[str, Any]
CHUNK = 128
TOPICS = ("Rivers", "Bread", "Clocks", "Whales", "Bridges", "Tea", "Volcanoes", "Letters")
DISTANCE = 1e-6
"""Nats a token, at most: fp32 on both sides."""


def test_transformers_and_vllm_hit_each_others_kv(
    engines: Engines, smollm2: Path, smollm2_fp32: LoadedModel, place: Answer, prompts: list[list[int]],
    expected: list[Answer], encode: Callable[[str], list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    own = {**place, "chunk_tokens": CHUNK, "shared_numerics": "tests"}
    settings = Settings.load(**own)
    texts = [
        encode(f"{topic} have a long history, and so have those who wrote of it. " * 24)[:300]
        for topic in TOPICS
    ]
    model = smollm2_fp32.model
    space = shared_with(smollm2_fp32, settings, "")
    with KVCache.open(settings, chunk_tokens=CHUNK) as cache:
        Engine(model, cache, shared=space).read(prompts[0][: 3 * CHUNK])
    found = engines.ask(
        "answers", tmp_path, model=str(smollm2), kvass=own, groups=[prompts, texts]
    )["groups"]  # fmt: skip
    assert [answer["cached"] for answer in found[0]] == [3 * CHUNK] * len(prompts)
    assert_all_same(found[0], expected)
    plain = Engine(model, None)
    with KVCache.open(settings, chunk_tokens=CHUNK) as cache:
        engine = Engine(model, cache, shared=space)
        for text in texts:
            usage = Usage()
            mine = logits_of(engine, text, usage)
            assert usage.cached_tokens == 2 * CHUNK
            assert divergence(logits_of(plain, text, Usage()), mine) < DISTANCE


def logits_of(engine: Engine, text: list[int], usage: Usage) -> torch.Tensor:
    """Log probabilities of the tokens after a text, eight of them."""
    steps = engine.generate(text, Sampling(max_tokens=8), usage=usage)
    return torch.log_softmax(torch.stack([step.logits for step in steps]).double(), -1)


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest KL of a next token's distribution."""
    return float((wanted.exp() * (wanted - found)).sum(-1).abs().max())

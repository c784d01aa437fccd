"""KV that engines share: transformers computes on with what vLLM stored, and the other way round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from same import assert_all_same
from transformers import DynamicCache

from harness.vllm_server import Engines
from kvass.cache import KVCache, Pool
from kvass.config import Settings
from kvass.engines.transformers.identity import kv_spec
from kvass.engines.transformers.load import LoadedModel
from kvass.engines.vllm.shared import shared_namespace
from kvass.keys import Namespace

Answer = dict[str, Any]
CHUNK = 128
TOPICS = ("Rivers", "Bread", "Clocks", "Whales", "Bridges", "Tea", "Volcanoes", "Letters")


def test_transformers_and_vllm_hit_each_others_kv(
    engines: Engines, smollm2: Path, smollm2_fp32: LoadedModel, place: Answer, prompts: list[list[int]],
    expected: list[Answer], encode: Callable[[str], list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    settings = {**place, "chunk_tokens": CHUNK}
    texts = [
        encode(f"{topic} have a long history, and so have those who wrote of it. " * 24)[:300]
        for topic in TOPICS
    ]
    model = smollm2_fp32.model
    space = shared_namespace(smollm2, kv_spec(model), "tests", models_path=Path(place["models_path"]))
    with KVCache.open(Settings.load(**settings)) as cache:
        store_from_transformers(cache, space, model, prompts[0][: 3 * CHUNK])
    found = engines.ask(
        "answers", tmp_path, model=str(smollm2), kvass={**settings, "numerics": "shared:tests"},
        groups=[prompts, texts],
    )["groups"]  # fmt: skip
    assert [answer["cached"] for answer in found[0]] == [3 * CHUNK] * len(prompts)
    assert_all_same(found[0], expected)
    with KVCache.open(Settings.load(**settings)) as cache:
        for text in texts:
            assert worst_kl(cache, space, model, text) < 1e-6


def kv_of(
    model: Any, tokens: list[int], past: DynamicCache | None = None
) -> tuple[DynamicCache, torch.Tensor]:
    """The cache that transformers fills, and the log probabilities after each token."""
    past = past if past is not None else DynamicCache(config=model.config)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), past_key_values=past, use_cache=True)
    return past, torch.log_softmax(output.logits[0].double(), -1)


def store_from_transformers(cache: KVCache, space: Namespace, model: Any, tokens: list[int]) -> None:
    """Store what transformers computes."""
    past, _ = kv_of(model, tokens)
    pool = Pool(space.spec, len(tokens))
    arrays = pool.arrays(0, 0, len(tokens))
    for number, layer in enumerate(past.layers):
        arrays["k"][number] = layer.keys[0].transpose(0, 1).numpy()
        arrays["v"][number] = layer.values[0].transpose(0, 1).numpy()
    cache.store(tokens, space, pool).wait(30)


def worst_kl(cache: KVCache, space: Namespace, model: Any, text: list[int]) -> float:
    """The largest divergence of a next token's distribution, on vLLM's KV from on transformers' own."""
    whole = len(text) // CHUNK * CHUNK
    count, pool = cache.context(text[:whole], space)
    assert count == whole
    past = DynamicCache(config=model.config)
    arrays = pool.arrays(0, 0, count)
    own, wanted = kv_of(model, text)
    for number in range(len(space.spec.groups[0].layers)):
        k, v = (torch.from_numpy(np.array(arrays[name][number])).transpose(0, 1)[None] for name in ("k", "v"))
        past.update(k, v, number)
        keys = own.layers[number].keys[:, :, :count]
        assert torch.linalg.vector_norm(keys - k) < 1e-4 * torch.linalg.vector_norm(keys)
    _, found = kv_of(model, text[whole:], past)
    return float((wanted[whole:].exp() * (wanted[whole:] - found)).sum(-1).abs().max())

"""The plain engine: stock transformers with its own cache, what kvass is measured against."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel


class Answer(NamedTuple):
    """Greedy tokens, the logits `[vocabulary]` before each, and seconds to the first."""

    tokens: list[int]
    logits: list[torch.Tensor]
    first_token_seconds: float


def forward(model: PreTrainedModel, tokens: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Logits `[vocabulary]` of the last token."""
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def answer(
    model: PreTrainedModel, tokens: Sequence[int], count: int, cache: DynamicCache | None = None
) -> Answer:
    """A greedy answer. `cache` may hold a beginning of `tokens`; the rest is computed in one call."""
    cache = cache if cache is not None else DynamicCache(config=model.config)
    ends = model.generation_config.eos_token_id if model.generation_config else None
    stops = set(ends) if isinstance(ends, list) else {ends}
    began = time.perf_counter()
    logits = forward(model, tokens[cache.get_seq_length() :], cache)
    written, seen = [int(logits.argmax())], [logits]
    first = time.perf_counter() - began
    while len(written) < count and written[-1] not in stops:
        logits = forward(model, written[-1:], cache)
        written.append(int(logits.argmax()))
        seen.append(logits)
    return Answer(written, seen, first)

"""Asks an engine, keeps everything it says, and compares it with what transformers says alone."""

from dataclasses import dataclass
from typing import Any

import torch
from tiny import plain

from kvass.engines.transformers import Engine, Sampling, Usage

FP32_GATE = 1e-4


@dataclass
class Asked:
    tokens: list[int]
    logits: torch.Tensor
    usage: Usage
    text: str


def ask(engine: Engine, prompt: list[int], count: int = 24, **sampling: Any) -> Asked:
    """Answer a prompt, and wait until what it left in the cache can be found."""
    usage = Usage()
    steps = list(engine.generate(prompt, Sampling(max_tokens=count, **sampling), usage=usage))
    if usage.ticket is not None:
        usage.ticket.wait(30)
    logits = torch.stack([step.logits for step in steps])
    return Asked([step.token for step in steps], logits, usage, "".join(step.text for step in steps))


def same_as_plain(asked: Asked, model: Any, prompt: list[int], count: int = 24) -> None:
    """Assert the fp32 gate: the same tokens, from logits that differ by no more than rounding does."""
    tokens, logits = plain(model, prompt, count)
    assert asked.tokens == tokens
    assert (asked.logits - logits).abs().max() <= FP32_GATE

"""How the next token is chosen: greedy, or drawn after temperature, top-k and top-p."""

from dataclasses import dataclass
from typing import cast

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvass.errors import InputError

_GREEDY_BELOW = 1e-5
"""Logits divided by less than this overflow."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with their usual meaning. `temperature` 0, or next to it, is greedy.

    `stop`: texts before which an answer ends; `stop_ids`: tokens after which it does. Equal `seed`, equal
    draws. Raises InputError naming the parameter that is out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("max_tokens", self.max_tokens >= 0, "0 (only read the prompt) or more"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            (
                "stop",
                not isinstance(cast(object, self.stop), str) and all(self.stop),
                "several texts, none of them empty",
            ),
        ):
            if not good:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")


class Sampler:
    """Draws tokens for one answer."""

    def __init__(self, sampling: Sampling, device: torch.device):
        self._greedy = sampling.temperature < _GREEDY_BELOW
        self._random = torch.Generator(device=device)
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed % (1 << 63))
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._warpers.append(TopPLogitsWarper(float(sampling.top_p)))

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token, from logits `[vocabulary]`."""
        if self._greedy:
            return int(logits.argmax())
        none = cast(torch.LongTensor, torch.empty(1, 0, dtype=torch.long))
        scores = self._warpers(none, cast(torch.FloatTensor, logits.float()[None]))
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=self._random))

"""Log probabilities of tokens, in the shapes of the two endpoints."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_LEAST = -9999.0
"""What stands for the logarithm of no probability at all, which JSON has no number for; OpenAI's."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a token with a part of a character decodes to; its bytes are not these."""


class TokenLogprob(NamedTuple):
    """A token, its log probability (None: nothing stood before it) and the most likely ones instead."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of `tokens`, each chosen after one row of `logits` `[n, vocabulary]`; natural logarithms."""
    scores = logits.float().log_softmax(-1).clamp(min=_LEAST)
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    best: Any = scores.topk(top) if top else None
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True) if top else [((), ())] * len(tokens)
    return [
        TokenLogprob(token, logprob, list(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, chosen, rows, strict=True)
    ]


class PromptLogprobs:
    """Collects those of a prompt while it is being computed."""

    def __init__(self, tokens: Sequence[int], top: int):
        self._tokens = tokens
        self._top = top
        self.found = [TokenLogprob(tokens[0], None, [])]

    def __call__(self, position: int, logits: torch.Tensor) -> None:
        following = self._tokens[position + 1 : position + 1 + logits.shape[0]]
        self.found += logprobs(logits[: len(following)], following, self._top)


def for_chat(found: Sequence[TokenLogprob], decode: Callable[[int], str]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""

    def shown(token: int, logprob: float | None) -> dict[str, Any]:
        text = decode(token)
        whole = _UNFINISHED not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    return {
        "content": [
            {**shown(one.token, one.logprob), "top_logprobs": [shown(*other) for other in one.top]}
            for one in found
        ],
        "refusal": None,
    }


def for_completion(
    found: Sequence[TokenLogprob], decode: Callable[[int], str], offset: int, written: str
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice: tokens of `written`, which stands at `offset`.

    A first token that is not written there, such as BOS, takes no place.
    """
    texts, offsets = [decode(one.token) for one in found], []
    if texts and not offset and not written.startswith(texts[0]):
        offset -= len(texts[0])
    for text in texts:
        offsets.append(max(0, offset))
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [_by_text(one.top, decode) if one.logprob is not None else None for one in found],
        "text_offset": offsets,
    }


def _by_text(top: Sequence[tuple[int, float]], decode: Callable[[int], str]) -> dict[str, float]:
    """Of tokens with the same text, such as parts of characters, the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in top:
        found.setdefault(decode(token), logprob)
    return found

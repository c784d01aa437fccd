"""Answers in OpenAI's shapes: whole, and chunk by chunk."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvass.serve.logprobs import TokenLogprob, for_chat, for_completion
from kvass.serve.run import Delta


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk with which a choice begins, if there is one."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A chunk with one choice."""

    def closing(self) -> dict[str, Any]:
        """The chunk without a choice, for the usage."""

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """All choices at once."""


class _Base:
    def __init__(self, prefix: str, kind: str, model: str, decode: Callable[[int], str], want_logprobs: bool):
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._decode = decode
        self._want_logprobs = want_logprobs

    def _with(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}


class ChatShape(_Base):
    """`/v1/chat/completions`."""

    _CHUNK = "chat.completion.chunk"

    def __init__(self, model: str, decode: Callable[[int], str], want_logprobs: bool):
        super().__init__("chatcmpl", "chat.completion", model, decode, want_logprobs)

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return self._with(self._CHUNK, [self._choice(index, "delta", delta, [], None)])

    def chunk(self, delta: Delta) -> dict[str, Any]:
        body = {"content": delta.text} if delta.finish is None else {}
        return self._with(
            self._CHUNK, [self._choice(delta.choice, "delta", body, delta.logprobs, delta.finish)]
        )

    def closing(self) -> dict[str, Any]:
        return self._with(self._CHUNK, [])

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = [
            self._choice(
                one.choice, "message", {"role": "assistant", "content": one.text, "refusal": None},
                one.logprobs, one.finish,
            )
            for one in deltas
        ]  # fmt: skip
        return self._with("chat.completion", choices)

    def _choice(
        self, index: int, name: str, body: dict[str, Any], found: list[TokenLogprob], finish: str | None
    ) -> dict[str, Any]:
        shown = (
            for_chat(found, self._decode) if self._want_logprobs and (found or name == "message") else None
        )
        return {"index": index, name: body, "logprobs": shown, "finish_reason": finish}


class CompletionShape(_Base):
    """`/v1/completions`."""

    def __init__(self, model: str, decode: Callable[[int], str], want_logprobs: bool):
        super().__init__("cmpl", "text_completion", model, decode, want_logprobs)
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._with("text_completion", [self._choice(delta)])

    def closing(self) -> dict[str, Any]:
        return self._with("text_completion", [])

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return self._with("text_completion", [self._choice(one) for one in deltas])

    def _choice(self, delta: Delta) -> dict[str, Any]:
        shown = None
        if self._want_logprobs and (delta.logprobs or delta.finish is None):
            offset = self._offsets.get(delta.choice, 0)
            shown = for_completion(delta.logprobs, self._decode, offset, delta.text)
            if delta.logprobs:
                self._offsets[delta.choice] = shown["text_offset"][-1] + len(shown["tokens"][-1])
        return {
            "index": delta.choice, "text": delta.text, "logprobs": shown, "finish_reason": delta.finish,
        }  # fmt: skip

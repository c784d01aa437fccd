"""Parts of messages that a client marked as segments, carried through a chat template into tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Marked(NamedTuple):
    """A segment of a prompt: tokens `start` to `stop`; `id` as the client named it, or empty."""

    id: str
    start: int
    stop: int


class Segmented(str):
    """A message's text of which parts are segments: `spans`, in order: id, and first and last character +
    1."""

    spans: Sequence[tuple[str, int, int]]

    @classmethod
    def of(cls, parts: Sequence[tuple[str, str | None]]) -> "Segmented":
        """Texts one after the other, each with the id of the segment that it is, or None."""
        made = cls("".join(text for text, _ in parts))
        spans, at = [], 0
        for text, name in parts:
            if name is not None and text:
                spans.append((name, at, at + len(text)))
            at += len(text)
        made.spans = spans
        return made


def fenced(messages: Sequence[Mapping[str, Any]], mark: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The messages with a mark at both ends of every segment, and the segments' ids in order. An answer of
    the assistant is no segment: it is recalled as it was written."""
    names: list[str] = []

    def with_marks(message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, Segmented) or message.get("role") == "assistant":
            return message
        text = str(content)
        for _, start, stop in reversed(content.spans):
            text = text[:start] + mark + text[start:stop] + mark + text[stop:]
        names.extend(name for name, *_ in content.spans)
        return {**message, "content": text}

    return [with_marks(message) for message in messages], names


def spans(names: Sequence[str], borders: Sequence[int]) -> list[Marked]:
    """Where segments lie, by the tokens before each mark; none where a template left marks out, or wrote them
    twice."""
    if len(borders) != 2 * len(names):
        return []
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [
        Marked(name, start, stop) for name, (start, stop) in zip(names, pairs, strict=True) if start < stop
    ]

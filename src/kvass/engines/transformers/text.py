"""Tokens to text as they come: only what later tokens cannot change, and nothing of a stop text."""

from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character yet, or never will be."""

_SPAN = 16
"""Tokens decoded anew each time, after as many as context: a first token may be written differently."""


class TextStream:
    """Decodes one answer piece by piece. `text` is what was handed out so far."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()):
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max((len(one) for one in stop), default=0)
        self._tokens: list[int] = []
        self._context = 0
        self._from = 0
        self._before = ""
        self._decoded = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that one more token settles."""
        self._tokens.append(token)
        whole = self._whole()
        finished = whole.rstrip(_UNFINISHED)
        if finished == whole and len(self._tokens) - self._from >= _SPAN:
            before = self._decode(self._from)
            if before:  # special tokens alone would be no context
                self._context, self._from = self._from, len(self._tokens)
                self._before, self._decoded = before, whole
        return self._settle(finished, last=False)

    def finish(self) -> str:
        """What was held back, at the end."""
        return self._settle(self._whole(), last=True)

    def _whole(self) -> str:
        return self._decoded + self._decode(self._context)[len(self._before) :]

    def _decode(self, start: int) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[start:], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _settle(self, whole: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        ends = [at for one in self._stop if (at := whole.find(one)) >= 0]
        if ends:
            self.stopped = True
            settled = whole[: min(ends)]
        else:
            settled = whole if last else whole[: len(whole) - self._held_back(whole)]
        new = settled[len(self.text) :]
        self.text += new
        return new

    def _held_back(self, whole: str) -> int:
        """How much of the end could be the beginning of a stop text."""
        for size in range(min(self._longest - 1, len(whole)), 0, -1):
            if any(one.startswith(whole[-size:]) for one in self._stop):
                return size
        return 0

"""Tokens to text as they come: only what later tokens cannot change, and nothing of a stop text."""

from typing import Any


class TextStream:
    """Decodes one answer piece by piece. `text` is what was handed out so far."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()):
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max((len(one) for one in stop), default=0)
        self._tokens: list[int] = []
        self._decoded = ""
        self._from = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that one more token settles."""
        self._tokens.append(token)
        piece = self._tokenizer.decode(self._tokens[self._from :], skip_special_tokens=True)
        if piece.endswith("\N{REPLACEMENT CHARACTER}") and len(self._tokens) - self._from < 8:
            return ""  # in the middle of a character
        whole = self._decoded + piece
        if piece.endswith("\n") or len(self._tokens) - self._from >= 16:
            self._decoded, self._from = whole, len(self._tokens)
        return self._settle(whole, last=False)

    def finish(self) -> str:
        """What was held back, at the end."""
        rest = self._tokenizer.decode(self._tokens[self._from :], skip_special_tokens=True)
        return self._settle(self._decoded + rest, last=True)

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

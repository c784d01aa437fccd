"""Pace: how fast an engine computes, learned as it goes, so that no load takes longer than recomputing."""

import threading

_UNKNOWN_SECONDS = 10.0
_LEAST_SECONDS = 0.1
_WEIGHT = 0.2
_LEAST_TOKENS = 64


class Pace:
    """Seconds a token of prefill, as a moving average over prefills of some length."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._token_seconds = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Note a prefill. Short ones say little and are left out."""
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        with self._guard:
            now = seconds / tokens
            before = self._token_seconds or now
            self._token_seconds = before + _WEIGHT * (now - before)

    def seconds(self, tokens: int) -> float:
        """What recomputing so many tokens would take: 10 s as long as nothing is known, a tenth at least."""
        with self._guard:
            known = self._token_seconds
        return max(_LEAST_SECONDS, known * tokens) if known else _UNKNOWN_SECONDS

    def patience(self, tokens: int, share: float) -> float:
        """Seconds to wait at most for a worker that would spare computing so many tokens: a share of what
        that takes; none as long as nothing is known."""
        return share * self.known(tokens)

    def known(self, tokens: int) -> float:
        """What so many tokens take, by what was learnt; 0 as long as nothing was."""
        with self._guard:
            return self._token_seconds * tokens

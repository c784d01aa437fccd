"""State that a worker repaired for a prompt: asked for, waited for a while, and then found like any other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvass.cache.kvcache import KVCache
from kvass.cache.match import Match
from kvass.cache.pace import Pace
from kvass.chunks import as_tokens
from kvass.config import Settings
from kvass.engines.vllm.permissions import Permissions
from kvass.jobs import Job, Jobs
from kvass.keys import Namespace, blend_namespace
from kvass.provenance import APPROXIMATE_SALT

_LEAST_TOKENS: Final = 128
"""Fewer that were read elsewhere are not worth a worker's time."""


def tenant_of(salt: str | None) -> tuple[str | None, bool]:
    """A request's salt without the mark, and whether it bears that."""
    marked = bool(salt) and str(salt).endswith(APPROXIMATE_SALT)
    return (str(salt).removesuffix(APPROXIMATE_SALT) or None, True) if marked else (salt, False)


@dataclass(slots=True)
class Wish:
    """What was asked of the workers for one request; `job` None: nothing, or it came to nothing."""

    job: str | None = None
    until: float = 0.0


class Blends:
    """Asks workers to repair prompts, for the scheduler's half; from its one thread."""

    def __init__(self, cache: KVCache, settings: Settings, pace: Pace):
        self._cache = cache
        self._settings = settings
        self._share = settings.jobs_wait_share
        self._pace = pace
        self._jobs: Jobs | None = None

    def ended(self, wish: Wish | None, seconds: float) -> bool:
        """Whether a request need not wait for a worker, any more; asks the queue for so many seconds."""
        if wish is None or wish.job is None or self._jobs is None or time.monotonic() >= wish.until:
            return True
        if self._jobs.wait(wish.job, seconds) == "timeout":
            return False
        wish.job = None
        return True

    def lookup(
        self, wish: Wish | None, permits: Permissions, namespace: Namespace, prompt: Sequence[int],
        exact: Match, start: int, pause: float,
    ) -> tuple[Wish, Match | None]:  # fmt: skip
        """What is stored of a prompt that was repaired, where that is more than `exact`; None: a worker is at
        it. `start`: tokens that the engine has; `pause`: seconds to wait inside of this call."""
        limit = (len(prompt) - 1) // self._cache.chunk_tokens * self._cache.chunk_tokens
        found = self._found(permits, namespace, prompt, exact, limit)
        if found.length > exact.length or exact.length >= limit or wish is not None:
            return wish or Wish(), found
        wish = self._ask(permits, namespace, prompt, max(start, exact.length), limit)
        if wish.job is None:
            return wish, exact
        if not self.ended(wish, pause):
            return wish, None
        return wish, self._found(permits, namespace, prompt, exact, limit)

    def _found(
        self, permits: Permissions, namespace: Namespace, prompt: Sequence[int], exact: Match, limit: int
    ) -> Match:
        space = blend_namespace(namespace, as_tokens(prompt))
        match = self._cache.lookup(
            prompt, namespace, limit=limit, local=True, approximate=[space], budget=permits.budget
        )
        match = match.whole()
        return match if match.length > exact.length else exact

    def _ask(
        self, permits: Permissions, namespace: Namespace, prompt: Sequence[int], start: int, limit: int
    ) -> Wish:
        passages = self._cache.passages(prompt[:-1], namespace, start=start)
        if sum(one.tokens for one in passages) < _LEAST_TOKENS:
            return Wish()
        if self._jobs is None:
            self._jobs = Jobs.open(self._settings)
        seconds = self._pace.patience(limit - start, self._share)
        job = Job.of(namespace, prompt, max_fraction=permits.max_fraction, budget=permits.budget)
        return Wish(self._jobs.put(job, seconds), time.monotonic() + seconds)

    def close(self) -> None:
        """Close the queue."""
        if self._jobs is not None:
            self._jobs.close()

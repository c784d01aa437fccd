"""Eviction scores: which of a few sampled objects is given up first."""

from typing import NamedTuple, Protocol


class Facts(NamedTuple):
    """What a policy may know of an object. Times in seconds since the epoch; they may lie ahead of now."""

    size: int
    tokens: int
    position: int
    created: float
    accessed: float


class EvictionPolicy(Protocol):
    """Higher scores are kept longer."""

    def __call__(self, facts: Facts, now: float) -> float: ...


def lru(facts: Facts, now: float) -> float:
    """Least recently used goes first. A time ahead of `now` (the clock was set back) counts as now."""
    return -max(0.0, now - facts.accessed)

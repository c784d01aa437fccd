"""What a request asks of reuse anywhere in its prompt, and how much repair the certificate wants for it."""

from collections.abc import Sequence
from typing import NamedTuple

from kvass.quality import SHARE_ROUNDING, BlendMeasured
from kvass.reuse.prompt import Prompt

LEAST_REUSED = 128
"""Fewer tokens in segments are not worth the trouble."""


class Reuse(NamedTuple):
    """Passages that were read elsewhere may be reused; of the layers of their tokens at most `max_fraction`
    is computed anew, choosing included. `within`: where spans (first token, last + 1) are given, passages
    inside of these alone."""

    max_fraction: float = 0.15
    within: tuple[tuple[int, int], ...] = ()


class Plan(NamedTuple):
    """A selector, the fraction it is given, and the share of the tokens that it has to choose at least."""

    method: str
    fraction: float
    least: float


def planned(prompt: Prompt, certified: Sequence[BlendMeasured], most: float) -> Plan | None:
    """The least repair of a prompt that is certified, within the fraction that is allowed; None where that is
    not enough, and the prompt has to be read.

    `certified`: what the budget admits, of one selector. Figures are of the share of tokens that is computed
    anew; choosing them may cost more or less here than it did when they were measured: all that is new, per
    token reused.
    """
    reused = len(prompt.reused)
    if reused < LEAST_REUSED:
        return None
    choosing = len(prompt.new) / reused
    for one in sorted(certified, key=lambda one: one.chosen):
        if one.chosen + choosing <= most:
            return Plan(one.method, one.chosen + choosing, one.chosen - SHARE_ROUNDING)
    return None

"""What a request asks of reuse anywhere in its prompt, and how much repair the certificate wants for it."""

from collections.abc import Sequence
from typing import NamedTuple

from kvass.quality import SHARE_ROUNDING, BlendMeasured
from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.query import Query
from kvass.spec import KVSpec

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


def planned(
    prompt: Prompt, spec: KVSpec, certified: Sequence[BlendMeasured], most: float, hidden: float = 0.0
) -> Plan | None:
    """The least repair of a prompt that is certified, within the fraction that is allowed; None where that is
    not enough, and the prompt has to be read.

    `certified`: what the budget admits, of the default selector. Figures are of the share of tokens that is
    computed anew; choosing them may cost another fraction here than it did when they were measured. `hidden`:
    a larger fraction that would cost nothing, as loading takes as long.
    """
    reused, layers = len(prompt.reused), sum(len(group.layers) for group in spec.groups)
    if reused < LEAST_REUSED:
        return None
    choosing = Query.price(prompt, spec) / (layers * reused)
    for one in sorted(certified, key=lambda one: one.chosen):
        needed = one.chosen + choosing
        if needed <= most:
            return Plan(Query.name, min(most, max(needed, hidden)), one.chosen - SHARE_ROUNDING)
    return None

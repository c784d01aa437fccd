"""What repair costs a model: each selector on prompts of moved segments, against full prefill of the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.calibrate.blending import Item, assembled, completed, followed, items, read_segments
from kvass.calibrate.statistics import mean_interval, share_upper
from kvass.calibrate.texts import Text
from kvass.quality import BlendMeasured
from kvass.reuse.repair import Repaired
from kvass.reuse.selectors import DEFAULT, SELECTORS, selector
from kvass.runner import KV, ModelRunner

Floats = npt.NDArray[np.float32]

FRACTIONS: Final = (0.05, 0.15, 0.3)
PROMPTS: Final = 50
_FACTS: Final = 3
"""Planted in each prompt; of so many in all, one that is lost may still be within the default budget."""


@dataclass(frozen=True)
class Way:
    """A selector at a fraction that it is given."""

    method: str
    fraction: float

    def __str__(self) -> str:
        return f"{self.method} {self.fraction:g}"


NONE: Final = Way("none", 0)
ALL: Final = Way("all", 1)
DEFAULTS: Final = tuple(Way(DEFAULT, fraction) for fraction in FRACTIONS)
OTHERS: Final = tuple(
    Way(name, fraction)
    for name in SELECTORS
    if name not in (DEFAULT, NONE.method, ALL.method)
    for fraction in FRACTIONS[1:]
)


@dataclass
class Compared:
    """One prompt, by way: mean KL per token of what follows, share of these with the same most likely next
    token, shares of the reused tokens that were chosen and whose layers were computed; whether each planted
    fact that full prefill completes was completed. `no_context`: KL where the segments are not there."""

    kl: dict[Way, float] = field(default_factory=dict)
    top1: dict[Way, float] = field(default_factory=dict)
    chosen: dict[Way, float] = field(default_factory=dict)
    fraction: dict[Way, float] = field(default_factory=dict)
    kept: dict[Way, list[bool]] = field(default_factory=dict)
    full: list[bool] = field(default_factory=list)
    no_context: float = 0.0


def compare(item: Item, runner: ModelRunner, ways: Sequence[Way], retrieving: Sequence[Way]) -> Compared:
    """Repair one prompt in these ways; for those `retrieving`, its planted facts are asked for too."""
    read, before = read_segments(item, runner), runner.prefill(item.system)
    prompt, follow = item.prompt(item.question), item.continued[:-1]
    exact = runner.prefill(prompt.tokens[:-1])
    reference = runner.continue_over(exact, [prompt.tokens[-1], *follow])
    found = Compared()

    def divergence(log: Floats) -> float:
        return float(np.einsum("nv,nv->n", np.exp(reference), reference - log).mean())

    def note(way: Way, done: Repaired, log: Floats) -> None:
        found.kl[way] = divergence(log)
        found.top1[way] = float((log.argmax(1) == reference.argmax(1)).mean())
        found.chosen[way] = len(done.positions) / len(prompt.reused)
        found.fraction[way] = done.fraction

    for way in ways:
        workspace = assembled(item, before, read, runner, len(item.question) + len(follow))
        note(way, *followed(prompt, workspace, selector(way.method), way.fraction, follow))
    alone = runner.continue_over(before, [*item.question, *follow])[-len(follow) - 1 :]
    found.no_context = divergence(alone)
    context = _cut(exact, len(prompt.tokens) - len(item.question))
    found.kept = {way: [] for way in retrieving}
    for branch in item.facts:
        (chosen,) = runner.choose_over(context, [branch])
        found.full.append(bool(np.array_equal(chosen, branch.answer)))
        asking, rest = item.prompt(branch.prompt), branch.answer[:-1]
        for way in retrieving:
            workspace = assembled(item, before, read, runner, len(branch.prompt) + len(rest))
            _, log = followed(asking, workspace, selector(way.method), way.fraction, rest)
            found.kept[way].append(completed(log, branch.answer))
    return found


def _cut(kv: KV, tokens: int) -> KV:
    return [{name: array[:, :tokens] for name, array in arrays.items()} for arrays in kv]


def measure_repair(
    texts: Sequence[Text], runner: ModelRunner, progress: Callable[[int, int], None], prompts: int = PROMPTS
) -> tuple[float, list[BlendMeasured]]:
    """KL per token without any context, and what each selector was measured to cost.

    Facts are asked for where the default selector repaired, and where nothing did. Raises InputError for
    texts of too few domains.
    """
    found: list[Compared] = []
    for item in items(texts, runner, prompts, facts=_FACTS):
        found.append(compare(item, runner, [NONE, *DEFAULTS, *OTHERS, ALL], [NONE, *DEFAULTS]))
        progress(len(found), prompts)
    lone = float(np.mean([one.no_context for one in found]))
    return lone, [summed_up(found, way) for way in found[0].kl]


def summed_up(found: Sequence[Compared], way: Way) -> BlendMeasured:
    """One way over all prompts: means, with intervals and bounds over prompts."""
    mean, low, high = mean_interval([one.kl[way] for one in found])
    tried = [sum(one.full) if way in one.kept else 0 for one in found]
    lost = [
        sum(there and not kept for there, kept in zip(one.full, one.kept[way], strict=True))
        if way in one.kept
        else 0
        for one in found
    ]
    return BlendMeasured(
        method=way.method,
        chosen=float(np.mean([one.chosen[way] for one in found])),
        fraction=float(np.mean([one.fraction[way] for one in found])),
        kl_mean=max(0.0, mean),
        kl_low=low,
        kl_high=high,
        top1=float(np.mean([one.top1[way] for one in found])),
        facts_tried=sum(tried),
        facts_lost=sum(lost),
        facts_lost_high=share_upper(lost, tried),
    )

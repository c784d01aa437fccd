"""Prompts of segments that were read elsewhere, and what reuse and repair of these cost the model."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.calibrate.tasks import branch_of, sentences_of, units_of
from kvass.calibrate.texts import Text
from kvass.errors import InputError
from kvass.reuse.assembly import Segment, put
from kvass.reuse.prompt import Prompt
from kvass.reuse.repair import Repaired, repair
from kvass.reuse.selectors.base import Selector
from kvass.runner import KV, Branch, ModelRunner, Workspace

SEGMENTS = 6
SHORTEST, LONGEST = 256, 512
QUESTION_TOKENS = 32
CONTINUED_TOKENS = 64
_SYSTEM = (
    "You are a careful assistant. Passages of several documents follow; go on from them as they would.\n\n"
)


class Item(NamedTuple):
    """One prompt: `system` before all, `segments`, and a `question` that goes on where the segment `asked`
    ends; `continued` follows on it. `facts`: questions about what was planted, and the answers."""

    system: list[int]
    segments: list[list[int]]
    asked: int
    question: list[int]
    continued: list[int]
    facts: list[Branch]

    def prompt(self, question: Sequence[int]) -> Prompt:
        """The prompt that ends with a question."""
        tokens, places = list(self.system), []
        for one in self.segments:
            places.append((len(tokens), len(tokens) + len(one)))
            tokens += one
        return Prompt([*tokens, *question], len(self.system), places)


def items(
    texts: Sequence[Text], runner: ModelRunner, count: int, *, facts: int = 1, seed: int = 0
) -> list[Item]:
    """Prompts of passages of several domains, the same for the same texts, tokenizer and seed.

    One of the passages, each time of another text, is what the question goes on from; the others are drawn
    from other texts, and `facts` of the passages hold a planted sentence each. Raises InputError for texts of
    fewer than four domains.
    """
    units = [[(unit, runner.encode(unit, begin=False)) for unit in units_of(one.text)] for one in texts]
    long = [n for n, one in enumerate(units) if sum(len(t) for _, t in one) > 2 * LONGEST + 100]
    if len({texts[n].domain for n in long}) < 4:
        raise InputError("prompts of passages need long texts of four domains or more")
    made = []
    for number in range(count):
        draw = random.Random(f"kvass blend {seed} {number}")
        target = long[number % len(long)]
        others = draw.sample([n for n in long if n != target], min(len(long) - 1, SEGMENTS - 1))
        while len(others) < SEGMENTS - 1:
            others.append(draw.choice([n for n in long if n != target]))
        passage, after = _passage(units[target], draw, QUESTION_TOKENS + CONTINUED_TOKENS)
        segments = [_passage(units[n], draw, 0)[0] for n in others]
        asked = draw.randrange(SEGMENTS)
        segments.insert(asked, passage)
        planted = sentences_of(draw, facts)
        places = draw.sample([n for n in range(SEGMENTS) if n != asked], facts)
        for place, (question, answer) in zip(places, planted, strict=True):
            segments[place].insert(
                draw.randrange(1, len(segments[place])), _sentence(question, answer, runner)
            )
        made.append(
            Item(
                runner.encode(_SYSTEM), [[t for unit in one for t in unit] for one in segments], asked,
                after[:QUESTION_TOKENS], after[QUESTION_TOKENS:],
                [branch_of(*one, runner) for one in planted],
            )
        )  # fmt: skip
    return made


def _passage(
    units: Sequence[tuple[str, list[int]]], draw: random.Random, room: int
) -> tuple[list[list[int]], list[int]]:
    """Consecutive units of a text, and the `room` tokens that follow on them."""
    wanted = draw.randrange(SHORTEST, LONGEST - 60)
    while True:
        first = draw.randrange(len(units))
        found: list[list[int]] = []
        at, size = first, 0
        while at < len(units) and size < wanted:
            found.append(units[at][1])
            size += len(units[at][1])
            at += 1
        after = [token for _, tokens in units[at : at + room + 1] for token in tokens][:room]
        if wanted <= size <= LONGEST - 30 and len(found) > 1 and len(after) == room:
            return found, after


def _sentence(question: str, answer: str, runner: ModelRunner) -> list[int]:
    return runner.encode(f"{question} {answer}\n", begin=False)


def read_segments(item: Item, runner: ModelRunner) -> list[KV]:
    """KV of each segment, read behind the system prefix alone."""
    found: list[KV] = []
    for segment in item.segments:
        kv = runner.prefill([*item.system, *segment])
        cut = len(item.system)
        found.append([{name: array[:, cut:] for name, array in arrays.items()} for arrays in kv])
    return found


def assembled(item: Item, prefix: KV, read: Sequence[KV], runner: ModelRunner, room: int) -> Workspace:
    """A workspace with prefix and segments in place, and room for so many tokens behind them."""
    prompt = item.prompt([0])
    workspace = runner.workspace(len(prompt.tokens) + room)
    start = len(item.system)
    segments = [Segment(place, start, kv) for (place, _), kv in zip(prompt.segments, read, strict=True)]
    put(workspace, [Segment(0, 0, prefix), *segments])
    return workspace


def followed(
    prompt: Prompt, workspace: Workspace, selector: Selector, fraction: float, continued: Sequence[int]
) -> tuple[Repaired, npt.NDArray[np.float32]]:
    """Repair a prompt; and log-probabilities of each of the tokens that follow, and of the one after them."""
    done = repair(prompt, workspace, selector, fraction)
    if not continued:
        return done, done.log[None]
    places = np.arange(len(continued)) + len(prompt.tokens)
    rest = workspace.recompute(continued, places, judged=len(continued))
    return done, np.concatenate([done.log[None], rest])


def completed(log: npt.NDArray[np.float32], answer: Sequence[int]) -> bool:
    """Whether greedy decoding gives the answer; `log` of `followed` with the answer less its last token."""
    return bool(np.array_equal(log.argmax(1), answer))

"""Planted facts: sentences set at many depths of a long text, that the model is to complete from memory."""

import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvass.calibrate.texts import Text, listed
from kvass.errors import InputError
from kvass.runner import Branch, ModelRunner

CONTEXTS = 30
FACTS_EACH = 15
_CONTEXT_TOKENS = 2000
_PARTS = 3
"""Texts, each of another domain, of which a context is made."""

_SENTENCE_TOKENS = 18
"""About what a planted sentence takes."""

_LONG_LINE = 160
_KINDS = 17


_GIVEN = listed(
    "Mirela, Tobias, Anouk, Casimir, Ludmila, Oskar, Fenna, Radek, Sunniva, Ivo, Marit, Bastian, Yara, "
    "Emeric, Dagny, Pavel, Liesl, Corin, Amira, Jorund, Thea, Matteo, Signe, Wim"
)
_FAMILY = listed(
    "Dovrin, Halloway, Brenk, Castellan, Ostrava, Lindqvist, Marchetti, Pomeroy, Vantongeren, Szabo, "
    "Kilbride, Arrieta, Thornbury, Demirel, Fauchard, Nygaard, Okonjo, Reinholt, Sandoval, Tremblay, "
    "Ullman, Wexford, Yilmaz, Zanetti"
)
_PLACES = listed(
    "north gate, boathouse, old granary, west tower, bakery, signal station, lower mill, chapel, "
    "greenhouse, customs house, ice cellar, printing shop, observatory, tannery, ferry landing, map room"
)
_TOWNS = listed(
    "Harlow, Vesterby, Montclair, Ashbourne, Kirkwall, Oldenburg, Sarnath, Belmonte, Tarrant, Wolvega, "
    "Quimper, Lindau"
)
_COLOURS = listed("green, red, blue, yellow, orange, purple, white, black, brown, grey")
_GOODS = listed(
    "copper wire, dried apricots, roof tiles, sewing machines, raw wool, olive oil, window glass, church "
    "bells, tinned sardines, cork bark, bicycle frames, sugar beet"
)
_FLOWERS = listed("tulip, rose, daisy, orchid, lily, violet, poppy, iris, sunflower, lavender")
_TOPICS = listed(
    "deep sea sponges, the history of salt, tower clocks, wild mushrooms, Roman roads, paper folding, "
    "river otters, the art of fencing, migrating cranes, lunar eclipses"
)
_MONTHS = listed(
    "January, February, March, April, May, June, July, August, September, October, November, December"
)
_WORDS = listed(
    "amber, falcon, copper, willow, saddle, marble, lantern, thistle, harbor, velvet, pepper, meadow"
)
_THINGS = listed(
    "stove, grandfather clock, mirror, piano, bookcase, curtain, barrel, ladder, portrait, wardrobe"
)
_PETS = listed("Biscuit, Juniper, Captain, Pebbles, Marmalade, Domino, Whisker, Clover, Bandit, Pepper")
_ANIMALS = listed("dog, cat, horse, parrot, donkey, goat")


Sentences = Callable[[random.Random, int], list[tuple[str, str]]]
"""Draws so many facts: what stands before the answer, and the answer."""


class Fact(NamedTuple):
    """One planted fact: what stands before its answer, the answer with its full stop, and how far into the
    context it stands (0 to 1)."""

    question: str
    answer: str
    depth: float


class FactContext(NamedTuple):
    """A context with facts in it; `branches[i]` asks for `facts[i]`."""

    tokens: list[int]
    facts: list[Fact]
    branches: list[Branch]


def fact_contexts(
    texts: Sequence[Text], runner: ModelRunner, *, contexts: int = CONTEXTS, facts_each: int = FACTS_EACH,
    context_tokens: int = _CONTEXT_TOKENS, seed: int = 0, sentences: Sentences | None = None,
) -> list[FactContext]:  # fmt: skip
    """Contexts of about `context_tokens` tokens, each of passages of several domains with facts in them.

    The same for the same texts, tokenizer and seed. `sentences`: what makes the facts, if not of those here.
    Raises InputError for texts of fewer than three domains, and for more than 17 facts a context.
    """
    make = sentences or sentences_of
    if not 0 < facts_each <= _KINDS:
        raise InputError(f"facts_each is {facts_each}; there are {_KINDS} kinds of facts, each used once")
    units: dict[str, list[list[tuple[str, int]]]] = {}
    for one in texts:
        cut = units_of(one.text)
        units.setdefault(one.domain, []).append(
            [(unit, len(runner.encode(unit, begin=False))) for unit in cut]
        )
    if len(units) < _PARTS:
        raise InputError(f"planted facts need texts of {_PARTS} domains or more, not {sorted(units)}")
    made = []
    for number in range(contexts):
        draw = random.Random(f"kvass facts {seed} {number}")
        passages: list[str] = []
        for domain in draw.sample(sorted(units), _PARTS):
            wanted = (context_tokens - facts_each * _SENTENCE_TOKENS) // _PARTS
            passages += _passage(draw.choice(units[domain]), wanted, draw)
        made.append(_planted(passages, make(draw, facts_each), runner, draw))
    return made


def units_of(text: str) -> list[str]:
    """Lines, the long ones cut into sentences; together they are the text."""
    made: list[str] = []
    for line in text.splitlines(keepends=True):
        made += re.split(r"(?<=[.!?] )", line) if len(line) > _LONG_LINE else [line]
    return [unit for unit in made if unit]


def _passage(units: Sequence[tuple[str, int]], wanted: int, draw: random.Random) -> list[str]:
    """Consecutive units of about `wanted` tokens, from where there are so many on; ends with a line."""
    left, last = 0, len(units)
    while last > 0 and left < wanted:
        last -= 1
        left += units[last][1]
    taken: list[str] = []
    have = 0
    for unit, tokens in units[draw.randint(0, last) :]:
        if have >= wanted:
            break
        taken.append(unit)
        have += tokens
    if taken and not taken[-1].endswith("\n"):
        taken[-1] = taken[-1].rstrip() + "\n"
    return taken


def _planted(
    passages: Sequence[str], sentences: Sequence[tuple[str, str]], runner: ModelRunner, draw: random.Random
) -> FactContext:
    """One sentence somewhere in each of as many equal parts of the context, in an order of their own."""
    edges = [len(passages) * at // len(sentences) for at in range(len(sentences) + 1)]
    places = [draw.randrange(first, max(first + 1, end)) for first, end in pairwise(edges)]
    total, before = sum(map(len, passages)), 0
    pieces: list[str] = []
    facts: list[Fact] = []
    waiting = list(zip(places, sentences, strict=True))
    for number, unit in enumerate(passages):
        pieces.append(unit)
        before += len(unit)
        while waiting and waiting[0][0] == number:
            question, answer = waiting.pop(0)[1]
            pieces.append(f"{question} {answer}" + ("\n" if unit.endswith("\n") else " "))
            facts.append(Fact(question, answer, before / total))
    tokens = runner.encode("".join(pieces).rstrip("\n") + "\n")
    return FactContext(tokens, facts, [branch_of(fact.question, fact.answer, runner) for fact in facts])


def branch_of(question: str, answer: str, runner: ModelRunner) -> Branch:
    """Question and answer as tokens, cut where the answer begins."""
    asked = runner.encode(f"\n{question}", begin=False)
    whole = runner.encode(f"\n{question} {answer}", begin=False)
    shared = 0
    while shared < min(len(asked), len(whole) - 1) and asked[shared] == whole[shared]:
        shared += 1
    return Branch(whole[:shared], whole[shared:])


def sentences_of(draw: random.Random, count: int) -> list[tuple[str, str]]:
    """Questions, no two of a context alike, and their answers."""
    place = iter(draw.sample(_PLACES, 6))
    town = iter(draw.sample(_TOWNS, 4))
    given = iter(draw.sample(_GIVEN, 9))
    family = iter(draw.sample(_FAMILY, 9))
    word = draw.sample(_WORDS, 2)
    goods = draw.sample(_GOODS, 2)

    def digits(length: int) -> str:
        return str(draw.randrange(10 ** (length - 1), 10**length))

    made = [
        (f"The pass code of the {next(place)} is", digits(4)),
        (f"The keeper of the {next(place)} is called", f"{next(given)} {next(family)}"),
        (f"The door of the {next(place)} is painted", draw.choice(_COLOURS)),
        (f"The telephone number of Doctor {next(family)} is", f"{digits(3)}-{digits(4)}"),
        (f"The {draw.choice(_ANIMALS)} that belongs to {next(given)} is called", draw.choice(_PETS)),
        (f"The parcel for {next(given)} was sent to the town of", next(town)),
        (
            f"The meeting about the roof of the {next(place)} will be held on",
            f"{draw.randrange(1, 29)} {draw.choice(_MONTHS)}",
        ),
        (f"The stone bridge at {next(town)} was opened in the year", str(draw.randrange(1720, 1990))),
        (f"The book that {next(given)} borrowed is about", draw.choice(_TOPICS)),
        (f"The secret word of the club in {next(town)} is", f"{word[0]}-{word[1]}-{digits(2)}"),
        (f"The ship Queen {next(given)} carries a cargo of", goods[0]),
        (f"The spare key to the {next(place)} hangs behind the", draw.choice(_THINGS)),
        (f"The favourite flower of Mrs {next(family)} is the", draw.choice(_FLOWERS)),
        (f"The serial number of the engine in the {next(place)} is", f"K{digits(2)}-{digits(3)}"),
        (f"The winner of the {draw.choice(_MONTHS)} regatta was", f"{next(given)} {next(family)}"),
        (f"The night train to {next(town)} leaves from platform", str(draw.randrange(2, 20))),
        (f"The price that {next(given)} {next(family)} paid for the {goods[1]} was", f"{digits(3)} crowns"),
    ]
    return [(question, f"{answer}.") for question, answer in draw.sample(made, count)]

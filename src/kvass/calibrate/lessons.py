"""Calibration texts that go on by repeating facts that stood in them: the probes learn to look for such."""

import random
from collections.abc import Sequence
from typing import Final

from kvass.calibrate.tasks import fact_contexts
from kvass.calibrate.texts import Sequenced, Text, listed
from kvass.runner import ModelRunner

_LESSONS: Final = 4
_FACTS_EACH = 15
_SENTENCE_TOKENS = 50
"""More than a planted sentence takes."""

_NAMES = listed(
    "Agnes, Bruno, Celia, Dorian, Edda, Felix, Gwen, Harald, Ilse, Jasper, Kerstin, Leander, Maud, Nestor, "
    "Odile, Piet, Rhea, Silas, Tamsin, Urban"
)
_HOUSES = listed(
    "Adler, Bexley, Cordes, Dunmore, Ebert, Fairfax, Gorman, Hestia, Ibsen, Jarrow, Keller, Lomax"
)
_ROOMS = listed(
    "archive, kitchen, workshop, laboratory, cellar, library, stable, infirmary, armoury, nursery, pantry"
)
_CITIES = listed("Almere, Bruges, Corinth, Delft, Elgin, Foix, Gdansk, Hanover, Imola, Jaffa, Kaunas, Lublin")
_METALS = listed("silver, bronze, tin, zinc, nickel, cobalt, iron, pewter")
_FRUITS = listed("pears, cherries, figs, lemons, plums, quinces, walnuts, almonds, grapes, dates")
_TOOLS = listed("hammer, chisel, telescope, compass, sextant, anvil, loom, plough, barometer, lathe")
_DAYS = listed("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
_BIRDS = listed("heron, magpie, kestrel, swallow, raven, wren, puffin, osprey")
_TRADES = listed("carpenter, surgeon, notary, gardener, miller, tailor, printer, baker, pilot, teacher")


def lessons(texts: Sequence[Text], runner: ModelRunner, tokens: int) -> list[Sequenced]:
    """Contexts of `tokens` tokens at most, made of calibration texts, with facts in them, none of which
    `kvass.calibrate.tasks` asks for; each is continued by its facts in another order."""
    made = fact_contexts(
        texts, runner, contexts=_LESSONS, facts_each=_FACTS_EACH, context_tokens=tokens, sentences=_sentences
    )
    found = []
    for number, one in enumerate(made):
        draw = random.Random(f"kvass lesson {number}")
        # the last ones may lie behind what is read
        there = [
            branch
            for fact, branch in zip(one.facts, one.branches, strict=True)
            if fact.depth * len(one.tokens) < tokens - _SENTENCE_TOKENS
        ]
        repeated = [
            token for branch in draw.sample(there, len(there)) for token in (*branch.prompt, *branch.answer)
        ]
        found.append(Sequenced(f"facts {number + 1}", "facts", one.tokens[:tokens], repeated))
    return found


def _sentences(draw: random.Random, count: int) -> list[tuple[str, str]]:
    """Questions, no two of a context alike, and their answers."""
    name, house = iter(draw.sample(_NAMES, 12)), iter(draw.sample(_HOUSES, 5))
    room, city = iter(draw.sample(_ROOMS, 5)), iter(draw.sample(_CITIES, 5))

    def digits(length: int) -> str:
        return str(draw.randrange(10 ** (length - 1), 10**length))

    plate = f"{draw.choice('BDFGHJK')}{draw.choice('LMNPRS')} {digits(4)}"
    made = [
        (f"To open the safe in the {next(room)}, one dials", f"{digits(2)}-{digits(2)}-{digits(2)}"),
        (f"On the voyage to {next(city)}, {next(name)} lost a", draw.choice(_TOOLS)),
        (f"House {next(house)} has its roof made of", draw.choice(_METALS)),
        (f"Before the war {next(name)} worked as a", draw.choice(_TRADES)),
        (f"The invoice sent to {next(city)} amounts to", f"{digits(4)} francs"),
        (f"{next(name)} {next(house)} was born on a", draw.choice(_DAYS)),
        (f"In the {next(room)} there is a basket of", draw.choice(_FRUITS)),
        (f"The road from {next(city)} to the coast measures", f"{digits(3)} miles"),
        (f"The emblem of the {next(house)} family shows a", draw.choice(_BIRDS)),
        (f"Room number {digits(3)} is reserved for", f"{next(name)} {next(house)}"),
        (f"The licence plate of {next(name)}'s van reads", plate),
        (f"The assistant in the {next(room)} goes by the name of", next(name)),
        (f"{next(name)} moved last spring to", next(city)),
        (f"The library card of {next(name)} expires in", f"20{draw.randrange(31, 60)}"),
        (
            f"The safest time to visit the {next(room)} is",
            f"{draw.randrange(1, 12)}:{draw.randrange(10, 60)}",
        ),
    ]
    return [(question, f"{answer}.") for question, answer in draw.sample(made, count)]

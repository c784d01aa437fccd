"""The texts that calibration learns from and the held ones that it is judged by; never the same."""

import importlib
import inspect
import random
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final, Literal, NamedTuple

from blake3 import blake3

from kvass.errors import InputError, ModelFilesError
from kvass.runner import ModelRunner

READ_TOKENS: Final = 2000
"""Of a held text, what is kept as KV."""

CONTINUED_TOKENS: Final = 200
"""Of a held text, what follows on it and is judged."""

_FEWEST_READ_TOKENS = 1000
_LARGEST_FILE_BYTES = 64 << 20

_Side = Literal["calibration", "held"]

_MODULES: Final[dict[_Side, tuple[str, ...]]] = {
    "calibration": ("inspect", "textwrap"),
    "held": ("tarfile", "shutil"),
}
_TOPICS: Final[dict[_Side, tuple[str, ...]]] = {
    "calibration": ("calls", "comparisons", "strings", "try", "with"),
    "held": ("import", "naming", "numeric-types", "objects", "operator-summary", "string-methods"),
}


class Text(NamedTuple):
    """A text, its name, and the kind of text it is."""

    name: str
    domain: str
    text: str


class Sequenced(NamedTuple):
    """A held text as tokens: those whose KV is kept, and those that continue it."""

    name: str
    domain: str
    read: list[int]
    continued: list[int]


def calibration_texts(own: Path | None = None) -> list[Text]:
    """Texts to calibrate with: kvass' own, and those of the folder `own` that fall to this side.

    The same on every machine with the same Python and folder. Raises InputError for a folder of which no
    text falls to each side, ModelFilesError where Python's own sources are not installed.
    """
    return _texts("calibration", own)


def held_texts(own: Path | None = None) -> list[Text]:
    """Texts to judge by, none of which is among `calibration_texts`. Raises as that does."""
    return _texts("held", own)


def sequenced(texts: Sequence[Text], runner: ModelRunner) -> list[Sequenced]:
    """The beginnings of texts: READ_TOKENS and CONTINUED_TOKENS of each, or less read where it is shorter.

    A text that is much too short is left out. Raises InputError where all are.
    """
    made = []
    for one in texts:
        # The rest of a long file need not become tokens: they have 40 characters each or less.
        tokens = runner.encode(one.text[: 40 * (READ_TOKENS + CONTINUED_TOKENS)])
        read = min(READ_TOKENS, len(tokens) - CONTINUED_TOKENS)
        if read >= _FEWEST_READ_TOKENS:
            made.append(
                Sequenced(one.name, one.domain, tokens[:read], tokens[read : read + CONTINUED_TOKENS])
            )
    if not made:
        raise InputError(
            f"none of the texts has {_FEWEST_READ_TOKENS + CONTINUED_TOKENS} tokens; give longer ones"
        )
    return made


def _texts(side: _Side, own: Path | None) -> list[Text]:
    made = [*_written(side), *_sources(side), _reference(side), _table(side)]
    if own is not None:
        made += _of_folder(own)[side]
    return made


def _written(side: _Side) -> Iterator[Text]:
    """One text a domain: of `prose-1.txt` and `prose-2.txt` neither is long enough for every tokenizer."""
    parts: dict[str, list[str]] = {}
    for file in sorted((files("kvass.calibrate") / "texts" / side).iterdir(), key=lambda one: one.name):
        domain = file.name.removesuffix(".txt").rstrip("-0123456789")
        parts.setdefault(domain, []).append(file.read_text("utf-8").strip())
    for domain, found in parts.items():
        yield Text(domain, domain, "\n\n".join(found) + "\n")


def _sources(side: _Side) -> Iterator[Text]:
    for name in _MODULES[side]:
        try:
            yield Text(name, "code", inspect.getsource(importlib.import_module(name)))
        except OSError as error:
            raise ModelFilesError(
                f"calibration reads the source of Python's module {name}, which is not installed: {error}"
            ) from error


def _reference(side: _Side) -> Text:
    text = "\n\n".join(topics[name] for name in _TOPICS[side] if name in topics)
    return Text("python-reference", "technical", text)


# -- tables -----------------------------------------------------------------------------------------


def listed(words: str) -> list[str]:
    """Words with commas between."""
    return words.split(", ")


_GIVEN = listed(
    "Ada, Boris, Clara, Dmitri, Elena, Farid, Greta, Hugo, Ines, Jonas, Katya, Lars, Mina, Nils, Olga, "
    "Petra, Quentin, Rosa, Samir, Tove"
)
_FAMILY = listed(
    "Almqvist, Berg, Castro, Dubois, Eriksen, Fontana, Gruber, Haas, Ito, Jansen, Kowalski, Lindt, "
    "Moreau, Novak, Okafor, Peters, Quist, Rossi, Silva, Tanaka"
)
_TOWNS = listed("Bergen, Porto, Graz, Lyon, Turku, Ghent, Brno, Split, Cadiz, Leeds")
_STATIONS = listed("harbour, ridge, quarry, airfield, mill, orchard, viaduct, reservoir")
_STATES = listed("paid, open, late, returned")
_WINDS = listed("N, NE, E, SE, S, SW, W, NW")
_SKIES = listed("clear, cloudy, overcast, light rain, heavy rain, fog, snow")


def _table(side: _Side) -> Text:
    draw = random.Random(f"kvass {side} table")
    rows = list(_orders(draw) if side == "calibration" else _weather(draw))
    return Text("table", "tables", "\n".join(rows) + "\n")


def _orders(draw: random.Random) -> Iterator[str]:
    yield "id,name,city,ordered,items,total,status"
    for number in range(400):
        name = f"{draw.choice(_GIVEN)} {draw.choice(_FAMILY)}"
        day = f"20{draw.randrange(18, 26)}-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
        paid = f"{draw.randrange(1, 40)},{draw.randrange(100, 99999) / 100:.2f},{draw.choice(_STATES)}"
        yield f"{1000 + 7 * number},{name},{draw.choice(_TOWNS)},{day},{paid}"


def _weather(draw: random.Random) -> Iterator[str]:
    yield "| day | station | low | high | wind | rain mm | sky | observer |"
    yield "|---|---|---|---|---|---|---|---|"
    for number in range(400):
        low = draw.uniform(-12, 18)
        felt = f"{low:.1f} | {low + draw.uniform(1, 11):.1f} | {draw.choice(_WINDS)} {draw.randrange(1, 9)}"
        seen = f"{max(0.0, draw.gauss(0, 6)):.1f} | {draw.choice(_SKIES)} | {draw.choice(_FAMILY)}"
        yield f"| {number // 8 + 1} | {_STATIONS[number % 8]} | {felt} | {seen} |"


# -- a user's own -----------------------------------------------------------------------------------


def _of_folder(folder: Path) -> dict[_Side, list[Text]]:
    """The texts of a folder, parted by what is in them: a copy under another name falls to the same side."""
    if not folder.is_dir():
        raise InputError(f"--texts {folder} is not a folder; give one with .txt files or other plain text")
    parted: dict[_Side, list[Text]] = {"calibration": [], "held": []}
    seen: set[bytes] = set()
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue
        try:
            if path.stat().st_size > _LARGEST_FILE_BYTES:
                raise InputError(f"{path} has more than {_LARGEST_FILE_BYTES >> 20} MB; give a part of it")
            text = path.read_text("utf-8").replace("\r\n", "\n").strip()
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 text; take it out of {folder}") from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error}") from error
        digest = blake3(text.encode()).digest()
        if text and digest not in seen:
            seen.add(digest)
            name = path.relative_to(folder).as_posix()
            side: _Side = "held" if digest[0] % 2 else "calibration"
            parted[side].append(Text(name, f"own/{Path(name).parent.as_posix()}", text))
    if not all(parted.values()):
        raise InputError(
            f"the {len(seen)} texts of {folder} do not give one to calibrate with and one to judge by: "
            "give more"
        )
    return parted

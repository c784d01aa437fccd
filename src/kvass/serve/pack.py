"""Packs files into contexts: texts that fit the model, and change only from where their files change."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvass.chunks import Tokens
from kvass.errors import InputError
from kvass.serve.gather import File, with_line_feeds

PLACEHOLDER: Final = "{files}"
DEFAULT_TEMPLATE: Final = f"These are files; a line with its path stands before each.\n\n{PLACEHOLDER}"

Encode = Callable[[str], Tokens]
"""The tokens with which every chat about a context begins."""

Count = Callable[[list[str]], list[int]]
"""How many tokens each text has, alone."""

_LEAST_ROOM = 256
"""Tokens for files, below which packing is refused."""


class Context(NamedTuple):
    """One context: the files (or the part of one) in it, its text, and the tokens to be read."""

    files: list[str]
    text: str
    tokens: Tokens


class _Piece(NamedTuple):
    name: str
    text: str


def read_template(path: Path | None) -> str:
    """The default, or the text of a file. Raises InputError where it cannot be read or has no placeholder."""
    if path is None:
        return DEFAULT_TEMPLATE
    try:
        template = with_line_feeds(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the template {path}: {error}") from error
    if template.count(PLACEHOLDER) != 1:
        raise InputError(f"the template {path} must hold {PLACEHOLDER} once: that is where the files go")
    return template


def pack(files: Sequence[File], template: str, limit: int, encode: Encode, count: Count) -> list[Context]:
    """Contexts of at most `limit` tokens, with files in order, as many in each as fit.

    A file that is larger than a context is cut at line ends; its parts share theirs with no other file,
    so that its neighbours stay where they are when it changes. Raises InputError for too small a limit.
    """
    room = limit - encode(_filled(template, [])).size
    while room >= _LEAST_ROOM:
        contexts = []
        for pieces in _packed(files, room, count):
            text = _filled(template, pieces)
            contexts.append(Context([one.name for one in pieces], text, encode(text)))
        over = max(one.tokens.size for one in contexts) - limit
        if over <= 0:
            return contexts
        room -= over  # a tokenizer may make more of a whole than of its pieces
    raise InputError(
        f"the template and the reserve leave {max(room, 0)} tokens for files, and {_LEAST_ROOM} are the "
        "least; give a smaller reserve or a shorter template"
    )


def _filled(template: str, pieces: Sequence[_Piece]) -> str:
    """Without the line ends behind it, which clients and shells are apt to drop."""
    return template.replace(PLACEHOLDER, "\n".join(one.text for one in pieces)).rstrip("\n")


def _packed(files: Sequence[File], room: int, count: Count) -> Iterator[list[_Piece]]:
    together: list[_Piece] = []
    used = 0
    pieces = [_piece(file.name, file.text) for file in files]
    for file, piece, alone in zip(files, pieces, count([one.text for one in pieces]), strict=True):
        size = alone + 1  # with the empty line between two
        if together and used + size > room:
            yield together
            together, used = [], 0
        if size > room:
            yield from ([part] for part in _parts(file, room, count))
        else:
            together.append(piece)
            used += size
    if together:
        yield together


def _parts(file: File, room: int, count: Count) -> Iterator[_Piece]:
    """Each cut depends on the text before it alone, so that a change leaves earlier parts as they are."""
    room -= count([_part(file.name, 1000, []).text])[0] + 1
    # Lines too long for a part are cut: a character is four tokens at most. Each run begins with the line
    # end before it, since tokenizers join that with the indentation.
    most = max(1, room // 8)
    runs = re.findall(rf"\n[^\n]{{0,{most}}}|[^\n]{{1,{most}}}", file.text.removesuffix("\n"))
    number, used = 1, 0
    taken: list[str] = []
    for run, size in zip(runs, count(runs), strict=True):
        if taken and used + size > room:
            yield _part(file.name, number, taken)
            number, used, taken = number + 1, 0, []
        taken.append(run)
        used += size
    yield _part(file.name, number, taken)


def _part(name: str, number: int, runs: list[str]) -> _Piece:
    text = "".join(runs) + "\n"
    return _piece(f"{name} (part {number})", text if number == 1 else text.removeprefix("\n"))


def _piece(name: str, text: str) -> _Piece:
    end = "" if text.endswith("\n") or not text else "\n"
    return _Piece(name, f"==> {name} <==\n{text}{end}")

"""A prompt as a strip: what is exact, what was read elsewhere, what of that is computed anew, what is new."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from rich.text import Text

EXACT, REUSED, RECOMPUTED, NEW = range(4)
_MARKS: Final = (("=", "green"), ("-", "cyan"), ("#", "yellow"), (".", "dim"))
_NAMES: Final = ("exact prefix", "reused", "recomputed", "new")

Kinds = npt.NDArray[np.int8]


def kinds(
    tokens: int, exact: int, segments: Sequence[tuple[int, int]], recomputed: npt.NDArray[np.int64]
) -> Kinds:
    """What each token of a prompt is, `[tokens]`."""
    found = np.full(tokens, NEW, np.int8)
    found[:exact] = EXACT
    for start, stop in segments:
        found[start:stop] = REUSED
    found[recomputed] = RECOMPUTED
    return found


def strip(found: Kinds, width: int) -> list[Text]:
    """The prompt from its first token to its last in `width` columns, and a legend with counts.

    A column stands for several tokens: two rows, so that what is computed anew is seen beside what is not:
    the upper one shows what most tokens of the column are, the lower one how many of them are computed anew.
    """
    columns = np.array_split(found, min(width, found.size))
    upper, lower = Text(), Text()
    for column in columns:
        most = int(np.bincount(np.where(column == RECOMPUTED, REUSED, column), minlength=4).argmax())
        upper.append(*_MARKS[most])
        share = float((column == RECOMPUTED).mean())
        lower.append(" .:-=+*#"[min(7, int(np.ceil(share * 7)))], _MARKS[RECOMPUTED][1])
    counts = np.bincount(found, minlength=4)
    legend = Text()
    for (mark, style), name, count in zip(_MARKS, _NAMES, counts, strict=True):
        legend.append(mark, style).append(f" {name} {count:,}   ")
    return [upper, lower, legend]

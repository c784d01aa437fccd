"""Why a prompt parts from what is stored: the usual causes, told from both texts, and what mends each.

Pure: texts in, a cause out. Only what both texts show is named; where they may have parted for another
reason, there is no answer.
"""

import json
import re
from collections.abc import Callable
from typing import Final, NamedTuple


class Cause(NamedTuple):
    """What differs, for people, and what to do about it."""

    name: str
    fix: str


class _Sides(NamedTuple):
    """Both texts with the end of what they have in common in front; they part at character `at`."""

    before: str
    mine: str
    other: str
    start: int
    at: int


def cause_of(before: str, prompt: str, stored: str) -> Cause | None:
    """The cause of a difference, or None where no usual one is certain.

    `before`: the text up to the first token that differs; `prompt` and `stored`: both texts from there on,
    as far as they are at hand. They may begin alike: the same text can be cut into other tokens.
    """
    lead = before[-_LEAD:]
    mine, other = lead + prompt, lead + stored
    sides = _Sides(before, mine, other, len(lead), _common(mine, other))
    return next((cause for holds, cause in _CAUSES if holds(sides)), None)


_LEAD = 4000
"""Characters in front of the difference in which what encloses it may begin."""

_WORDS = 4
_MARKS = r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]"
_MARK = re.compile(_MARKS)


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common from their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


# -- the same text ----------------------------------------------------------------------------------


def _retokenised(sides: _Sides) -> bool:
    """Both agree past the first token: over words, of which no token holds several, or a special token."""
    same = sides.mine[sides.start : sides.at]
    certain = len(same.split()) >= _WORDS or _MARK.search(same) is not None
    return certain and "\N{REPLACEMENT CHARACTER}" not in same


def _spaced(sides: _Sides) -> bool:
    """They part at a space or a line end, and without those they would go on alike."""
    mine, other = sides.mine[sides.at :], sides.other[sides.at :]
    if not (mine[:1].isspace() or other[:1].isspace()):
        return False
    return _common("".join(mine.split()), "".join(other.split())) >= 16


# -- values that change from call to call -----------------------------------------------------------

_DAY = r"(?:mon|tue(?:s)?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?[,.]?\s+"
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_TH = r"\d{1,2}(?:st|nd|rd|th)?"
_SHORT = r"(?:[01]?\d|2[0-3]):[0-5]\d"
_SECONDS = r":[0-5]\d(?:[.,]\d+)?"
_ZONE = r"(?:\s?[ap]\.?m\b\.?)?(?:\s?(?:z|utc|gmt|[+-]\d\d:?\d\d)\b)?"
_CLOCK = rf"{_SHORT}(?:{_SECONDS})?{_ZONE}"
_DATE = (
    rf"(?:\d{{4}}([-/])\d\d\1\d\d|\d{{1,2}}([./-])\d{{1,2}}\2\d{{4}}"
    rf"|(?:{_DAY})?(?:{_TH}\s+{_MONTH}|{_MONTH}\s+{_TH}\b))"
)
_TIMES: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?<![\w.]){_DATE}(?:,?\s+(?:19|20)\d\d\b)?(?:(?:t|[\s,]+(?:at\s+)?){_CLOCK})?(?:\s+(?:19|20)\d\d\b)?",
        rf"(?<![\w.:]){_SHORT}{_SECONDS}{_ZONE}",
        rf"\[{_CLOCK}\]",
        rf"\b(?:time|now|clock|timestamp)\b[^\n\d]{{0,24}}{_CLOCK}",
        r"(?<!\w)(?:19|20)\d{6}t\d{6}z?(?!\w)",
        r"(?<![\w.])1[4-9]\d{8}(?:\d{3}|\.\d+)?(?!\w)",  # seconds or milliseconds since 1970
    )
)
_IDS: Final = (
    re.compile(r"(?<![\w-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![\w-])", re.IGNORECASE),
    re.compile(r"(?<![\w-])(?:0x)?(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,64}(?![\w-])", re.IGNORECASE),
    # as the APIs name calls and messages; a digit before a letter is what no word of a program has
    re.compile(
        r"\b(?:call|chatcmpl|cmpl|req|msg|toolu|resp|sess|trace|run)[_-](?=[A-Za-z]*\d+[A-Za-z])\w{8,}"
    ),
    re.compile(r"(?:\b|(?<=_)|(?<=[a-z])(?=Id))(?:id|Id|ID)\b[\"']?\s{0,2}[:=#]?\s{0,2}[\"']?[\w-]*\d[\w-]*"),
    re.compile(
        r"\b(?:request|req|session|trace|run|ticket|order|conversation|message|msg|call|nonce|seed|attempt)"
        r"(?:\s{0,2}(?:no\.?|nr\.?|number|#|:|=)){1,2}\s{0,2}\d+\b",
        re.IGNORECASE,
    ),
)


def _value_changed(sides: _Sides, patterns: tuple[re.Pattern[str], ...]) -> bool:
    """Both have such a value where they part, each another one, and go on alike behind it."""
    for pattern in patterns:
        other = {found.start(): found for found in pattern.finditer(sides.other)}
        for one in pattern.finditer(sides.mine):
            two = other.get(one.start())
            if two is None or not one.start() <= sides.at < max(one.end(), two.end()):
                continue
            rests = sides.mine[one.end() :], sides.other[two.end() :]
            if one[0] != two[0] and _common(*rests) >= max(1, min(6, *map(len, rests))):
                return True
    return False


def _id_changed(sides: _Sides) -> bool:
    return _value_changed(sides, _IDS)


def _time_changed(sides: _Sides) -> bool:
    return _value_changed(sides, _TIMES)


# -- the same parts in another order ----------------------------------------------------------------

_JSON = json.JSONDecoder()
_ITEMS = 40
"""Places where an enclosing JSON item may begin that are tried, from the inside."""


def _reordered(sides: _Sides) -> bool:
    """What each has where they part, the other has further on; or both have one JSON value, ordered apart."""
    line = sides.mine.rfind("\n", 0, sides.at) + 1
    if _swapped(sides, _line(sides.mine, line), _line(sides.other, line), 12):
        return True
    opened = list(re.finditer(r"[{\[,]\s*", sides.mine[: sides.at]))
    starts = {found.end() for found in opened} | {found.start() for found in opened if found[0][0] != ","}
    for start in sorted(starts, reverse=True)[:_ITEMS]:
        one, two = _json_item(sides.mine, start), _json_item(sides.other, start)
        if one is None or two is None:
            continue
        if one.sorted == two.sorted and one.written != two.written:
            return True
        if _swapped(sides, (start, one.text), (start, two.text), 6):
            return True
    return False


def _swapped(sides: _Sides, one: tuple[int, str] | None, two: tuple[int, str] | None, least: int) -> bool:
    """Whether each part stands once on its own side, first, and once on the other side, later."""
    if one is None or two is None or min(len(one[1].strip()), len(two[1].strip())) < least:
        return False
    mine, other = sides.mine[one[0] :], sides.other[two[0] :]
    return (
        mine.count(one[1]) == other.count(one[1]) == mine.count(two[1]) == other.count(two[1]) == 1
        and other.find(one[1]) >= len(two[1])
        and mine.find(two[1]) >= len(one[1])
    )


def _line(text: str, start: int) -> tuple[int, str] | None:
    """A line, if all of it is at hand."""
    end = text.find("\n", start)
    return (start, text[start:end]) if end >= 0 else None


class _Item(NamedTuple):
    """A JSON value or a `"key": value`: as it stands, written anew, and that with its keys sorted."""

    text: str
    written: str
    sorted: str


def _json_item(text: str, start: int) -> _Item | None:
    """The item that begins there, if all of it is at hand."""
    try:
        value, end = _JSON.raw_decode(text, start)
        colon = re.compile(r"\s*:\s*").match(text, end)
        if isinstance(value, str) and colon:
            held, end = _JSON.raw_decode(text, colon.end())
            value = {value: held}
        return _Item(text[start:end], json.dumps(value), json.dumps(value, sort_keys=True))
    except (ValueError, RecursionError):
        return None


# -- messages ---------------------------------------------------------------------------------------

_ROLE = re.compile(
    r"<\|(?:im_start|start)\|>(?P<a>\w+)|<\|start_header_id\|>(?P<b>\w+)<\|end_header_id\|>"
    r"|<\|(?P<c>system|user|assistant|developer)\|>|<start_of_turn>(?P<d>\w+)"
    r"|(?P<e><<SYS>>|\[SYSTEM_PROMPT\])|<</SYS>>|\[/SYSTEM_PROMPT\]"
    r"|<\|(?:im_end|eot_id|end)\|>|<end_of_turn>|</s>|\[/?INST\]"
)
_SYSTEM = ("system", "developer", "<<SYS>>", "[SYSTEM_PROMPT]")


def _system_changed(sides: _Sides) -> bool:
    """They part inside the system message, or only one has any."""
    if re.search(r"<\|(?:im_start|start|start_header_id)\|>$", sides.before):
        roles = [re.match(r"\w*", side[sides.start :]) for side in (sides.mine, sides.other)]
        return sum(role is not None and role[0] in _SYSTEM for role in roles) == 1
    marks = list(_ROLE.finditer(sides.before))
    kind = marks[-1].lastgroup if marks else None
    return kind is not None and marks[-1][kind] in _SYSTEM


def _dropped(sides: _Sides) -> bool:
    """The prompt goes on with what is stored further on."""
    needle = sides.mine[sides.start :][:80]
    words = re.sub(rf"{_MARKS}|\b(?:user|assistant|system|model)\b", " ", needle).split()
    telling = len(set(words)) > _WORDS and len("".join(words)) >= 32
    return telling and sides.other.find(needle, sides.start + 1) > 0


_CAUSES: Final[tuple[tuple[Callable[[_Sides], bool], Cause], ...]] = (
    (
        _retokenised,
        Cause(
            "the same text, cut into other tokens",
            "append to the ids of the last request and its answer; do not encode their text again",
        ),
    ),
    (
        _spaced,
        Cause(
            "spaces or line ends",
            "join the prompt's parts in one way, strip them, and end lines with \\n only",
        ),
    ),
    (
        _id_changed,
        Cause("an id that changes", "leave it out, or put it behind all text that stays the same"),
    ),
    (
        _time_changed,
        Cause("a date or time", "put it at the end of the prompt, or give the day only"),
    ),
    (
        _reordered,
        Cause(
            "the same parts in another order",
            "write tools, documents and JSON keys in a fixed order (json.dumps with sort_keys=True)",
        ),
    ),
    (
        _system_changed,
        Cause(
            "another system message",
            "keep it the same word for word, and put what varies into the user's message",
        ),
    ),
    (
        _dropped,
        Cause(
            "earlier text that was left out",
            "keep the history's beginning; where it must be cut, cut much and seldom",
        ),
    ),
)

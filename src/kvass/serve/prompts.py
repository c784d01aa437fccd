"""Chats and texts to tokens: no special token but the template's own, answers as they were generated."""

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvass.engines.transformers import LoadedModel, render_chat
from kvass.engines.transformers.load import with_one_bos
from kvass.errors import InputError
from kvass.serve.answers import Answers, Place
from kvass.serve.segments import Marked, fenced, spans

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters of Unicode, for marks that are gone before anything is tokenised."""

_CUT_OFF = 64
"""Tokens that a stop text may have cut off an answer that is still remembered."""


class TooLongError(InputError):
    """A prompt is over the model's length."""


class _Answer(NamedTuple):
    """A former answer of the assistant, and at which character of a rendered chat it begins."""

    start: int
    text: str


class ChatEncoder:
    """Encodes for one model. Safe for several threads.

    A text of a message that reads like a special token stays text. An answer that comes back is encoded as
    the tokens that were generated for it, where these are known for exactly that place.
    """

    def __init__(self, loaded: LoadedModel, answers: Answers | None = None, *, max_tokens: int | None = None):
        self._loaded = loaded
        self._answers = answers
        self._tokenizer: Any = copy.deepcopy(loaded.tokenizer)  # others decode with theirs at the same time
        self._guard = threading.Lock()
        self._max_tokens = max_tokens
        self._special = _special(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder.items()
        self._special_ids = {*self._tokenizer.all_special_ids}
        self._special_ids |= {one for one, token in added if str(token) in self._special}
        self._longest = max(map(len, self._tokenizer.get_vocab()))
        self._joins = self._decode(self._encode("a") + self._encode("b")) == "ab"
        self._opening = _opening(loaded)

    # -- text -----------------------------------------------------------------------------------------

    def text(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of plain text. `special`: texts of special tokens stand for these. Raises InputError."""
        self._check_length([text])
        if special:
            return with_one_bos(self._tokenizer, self._encode(text))
        mark = _unused([text], 1)[0]
        return with_one_bos(self._tokenizer, self._pieces(_broken(text, self._special, mark), mark))

    def _encode(self, text: str) -> list[int]:
        with self._guard:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _pieces(self, text: str, mark: str, *, first: bool = True) -> list[int]:
        """Tokens of what stands between the marks; `first`: nothing stands before it."""
        ids: list[int] = []
        for number, piece in enumerate(text.split(mark)):
            if piece:
                ids += self._encode(piece) if self._joins or (first and not number) else self._inner(piece)
        return ids

    def _inner(self, piece: str) -> list[int]:
        """Tokens of a text inside of another, where a tokenizer puts a blank before every text."""
        anchor = self._encode("\n")
        ids = self._encode("\n" + piece)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self._encode(piece)

    def _decode(self, ids: Sequence[int]) -> str:
        with self._guard:
            text: str = self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def _check_length(self, texts: Sequence[str]) -> None:
        """Refuse what cannot fit before time is spent on it. Raises TooLongError."""
        size = sum(map(len, texts))
        if self._max_tokens is not None and size > self._max_tokens * self._longest:
            raise TooLongError(
                f"the prompt has {size} characters, far over the model's {self._max_tokens} tokens"
            )

    # -- chats ----------------------------------------------------------------------------------------

    def encode(
        self, messages: Sequence[Mapping[str, Any]], *, root: bytes = b"", tools: Any = None
    ) -> list[int]:
        """Tokens of a chat, up to where the next answer begins; see `encode_marked`."""
        return self.encode_marked(messages, root=root, tools=tools)[0]

    def encode_marked(
        self, messages: Sequence[Mapping[str, Any]], *, root: bytes = b"", tools: Any = None
    ) -> tuple[list[int], list[Marked]]:
        """Tokens of a chat, up to where the next answer begins, and where its segments lie. `root` names
        whose
        answers are recalled.

        A segment is tokenised by itself, so that it has the same tokens wherever it stands. Raises InputError
        where the template refuses the messages, and TooLongError.
        """
        if self._max_tokens is not None and len(messages) > self._max_tokens:
            raise TooLongError(f"{len(messages)} messages are over the model's {self._max_tokens} tokens")
        texts = list(_texts([messages, tools]))
        self._check_length(texts)
        mark, fence, border = _unused(texts, 3)
        messages, names = fenced(messages, border)
        plain = _broken(messages, self._special, mark)
        tools = _broken(tools, self._special, mark)
        rendered = render_chat(self._loaded, plain, tools=tools)
        answers = self._former(plain, rendered, fence, tools) if self._answers is not None and root else []
        ids, borders = self._spliced(rendered, mark, border, answers, root)
        return ids, spans(names, borders)

    def _former(
        self, messages: Sequence[Mapping[str, Any]], rendered: str, fence: str, tools: Any
    ) -> list[_Answer]:
        """Where the assistant's messages stand in the rendered chat; none where a template hides it."""
        fenced = [_fenced(message, fence) for message in messages]
        if fenced == list(messages):
            return []
        try:
            pieces = render_chat(self._loaded, fenced, tools=tools).split(fence)
        except InputError:
            return []
        if "".join(pieces) != rendered or len(pieces) % 2 == 0:
            return []
        found, at = [], 0
        texts = [str(one["content"]) for one, other in zip(messages, fenced, strict=True) if one != other]
        if len(texts) != len(pieces) // 2:
            return []
        for number, piece in enumerate(pieces):
            if number % 2:
                text = texts[number // 2]
                found.append(_Answer(self._start(rendered, at, text), text))
            at += len(piece)
        return found

    def _start(self, rendered: str, at: int, text: str) -> int:
        """Where an answer begins of which the first letter stands at `at`: with the blanks before it, unless
        a template cut these off and wrote its own. Those belong to the prompt, and stay in one piece."""
        blanks = text[: len(text) - len(text.lstrip())]
        start = at - len(blanks)
        whole = rendered.startswith(blanks, start) and rendered.endswith(self._opening, 0, start)
        return start if whole else at

    def _spliced(
        self, rendered: str, mark: str, border: str, answers: Sequence[_Answer], root: bytes
    ) -> tuple[list[int], list[int]]:
        """Tokens of a rendered chat: known answers by their ids, what stands between them by its text. And
        how
        many tokens stand before each border.

        The text is cut where an answer begins, known or not, as it was cut when the answer was asked for.
        """
        ids: list[int] = []
        borders: list[int] = []
        at, place = 0, Place(root)

        def add(more: list[int]) -> None:
            place.add(more)
            ids.extend(more)

        def add_text(text: str) -> None:
            for number, piece in enumerate(text.split(border)):
                if number:
                    borders.append(len(ids))
                if piece or not ids:
                    add(self._between(piece, mark, first=not ids))

        for answer in answers:
            if answer.start < at:
                continue
            add_text(rendered[at : answer.start])
            at = answer.start
            tokens, covered = self._recall(place.digest(), answer.text) or ([], 0)
            if covered > 0 and rendered[at : at + covered] == answer.text[:covered]:
                add(tokens)
                at += covered
        add_text(rendered[at:])
        return ids, borders

    def _between(self, text: str, mark: str, *, first: bool) -> list[int]:
        """A template writes its special tokens itself; only a forgotten BOS is made up for."""
        ids = self._pieces(text, mark, first=first)
        return with_one_bos(self._tokenizer, ids) if first else ids

    # -- answers --------------------------------------------------------------------------------------

    def _recall(self, place: bytes, text: str) -> tuple[list[int], int] | None:
        if self._answers is None or not text:
            return None
        found = self._answers.recall(place, text)
        if found is None:
            return None
        ids, covered = found
        return found if self._decodes_to(ids, text[:covered]) else None

    def _decodes_to(self, ids: list[int], text: str) -> bool:
        vocabulary = len(self._tokenizer)
        known = all(0 <= one < vocabulary for one in ids) and not self._special_ids & set(ids)
        return known and self._decode(ids) == text

    def remember(self, root: bytes, prompt: Sequence[int], written: Sequence[int], text: str) -> None:
        """Keep what was generated behind a prompt, for the turn in which it comes back as text."""
        if self._answers is None or not text:
            return
        ids = list(written)
        while ids and ids[-1] in self._special_ids:
            ids.pop()
        decoded = self._decode(ids)
        for _ in range(_CUT_OFF):  # a stop text was cut off, or half a character
            if not ids or text.startswith(decoded):
                break
            ids.pop()
            decoded = self._decode(ids)
        covered = len(decoded) if ids and text.startswith(decoded) else 0
        if covered and not self._special_ids & set(ids):
            where = Place(root)
            where.add(prompt)
            self._answers.remember(where.digest(), text, ids, covered)


def _opening(loaded: LoadedModel) -> str:
    """What a template writes before an answer; nothing where it has no chats of this kind."""
    question = [{"role": "user", "content": "a"}]
    try:
        asked, told = (render_chat(loaded, question, add_generation_prompt=one) for one in (True, False))
    except InputError:
        return ""
    return asked.removeprefix(told) if asked.startswith(told) else ""


def _special(tokenizer: Any) -> list[str]:
    """Texts that a tokenizer takes for control tokens, the longest first."""
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder.values()
    texts = {str(one) for one in added if one.special or (len(str(one)) > 2 and str(one) in template)}
    return sorted(texts | set(tokenizer.all_special_tokens), key=len, reverse=True)


def _texts(value: Any) -> Iterator[str]:
    """All texts in messages and tools, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _broken(value: Any, special: Sequence[str], mark: str) -> Any:
    """The same with a mark inside of whatever reads like a special token, in every text of it."""
    if isinstance(value, str):
        for one in special:
            if one in value:
                value = value.replace(one, one[0] + mark + one[1:])
    elif isinstance(value, Mapping):
        return {_broken(key, special, mark): _broken(one, special, mark) for key, one in value.items()}
    elif isinstance(value, list):
        return [_broken(one, special, mark) for one in value]
    return value


def _unused(texts: Sequence[str], count: int) -> list[str]:
    free = [mark for mark in _MARKS if not any(mark in text for text in texts)]
    if len(free) < count:
        raise InputError("the messages hold Unicode noncharacters (U+FDD0 to U+FDEF); leave these out")
    return free[:count]


def _fenced(message: Mapping[str, Any], fence: str) -> Mapping[str, Any]:
    """An assistant's message with its text, but for blanks around it, between two fences."""
    text = message.get("content")
    if message.get("role") != "assistant" or not isinstance(text, str) or not (inner := text.strip()):
        return message
    start = text.index(inner)
    return {**message, "content": text[:start] + fence + inner + fence + text[start + len(inner) :]}

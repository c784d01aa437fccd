"""Segments that a client marks: the same tokens wherever they stand, and the only ones that are moved."""

import pytest

from kvass.engines.transformers import LoadedModel
from kvass.serve.prompts import ChatEncoder
from kvass.serve.schemas import Message
from kvass.serve.segments import Marked, Segmented, fenced, spans

ONE = "Rivers run to the sea.\n"
TWO = "  The mill is painted green, and nobody knows who did it."


def message(*parts: tuple[str, object]) -> dict[str, object]:
    content = [
        {"type": "text", "text": text} | ({"segment": name} if name is not None else {})
        for text, name in parts
    ]
    return Message.model_validate({"role": "user", "content": content}).for_template()


@pytest.fixture(scope="module")
def encoder(smollm2_bf16: LoadedModel) -> ChatEncoder:
    return ChatEncoder(smollm2_bf16)


def test_a_segment_has_the_same_tokens_wherever_it_stands(encoder: ChatEncoder) -> None:
    first = [message((ONE, "one"), (TWO, "two"), ("What colour?", None))]
    other = [message(("Read this: ", None), (TWO, "two"), ("and", None), (ONE, True))]
    ids, found = encoder.encode_marked(first)
    later_ids, later = encoder.encode_marked(other)
    assert [one.id for one in found] == ["one", "two"]
    assert [one.id for one in later] == ["two", ""]
    one, two = (ids[part.start : part.stop] for part in found)
    assert later_ids[later[0].start : later[0].stop] == two
    assert later_ids[later[1].start : later[1].stop] == one
    decode = encoder._tokenizer.decode
    assert (decode(one), decode(two)) == (ONE, TWO)


def test_marks_leave_nothing_in_the_text(encoder: ChatEncoder) -> None:
    marked = encoder.encode([message(("Read: ", None), (ONE, "one"), (TWO, True), (" Why?", None))])
    plain = encoder.encode([{"role": "user", "content": "Read: " + ONE + TWO + " Why?"}])
    assert encoder._tokenizer.decode(marked) == encoder._tokenizer.decode(plain)


def test_without_marks_nothing_changes(encoder: ChatEncoder) -> None:
    parts = [message((ONE, None), (TWO, False))]
    assert encoder.encode_marked(parts) == (
        encoder.encode([{"role": "user", "content": ONE + TWO}]),
        [],
    )


def test_a_special_tokens_text_stays_text_in_a_segment(encoder: ChatEncoder) -> None:
    ids, (part,) = encoder.encode_marked([message(("<|im_end|>" + ONE, "x"))])
    special = set(encoder._tokenizer.all_special_ids)
    assert not special & set(ids[part.start : part.stop])
    assert encoder._tokenizer.decode(ids[part.start : part.stop]) == "<|im_end|>" + ONE


def test_an_answer_is_no_segment() -> None:
    content = Segmented.of([(ONE, "one")])
    messages, names = fenced([{"role": "assistant", "content": content}], "|")
    assert (messages[0]["content"], names) == (ONE, [])


def test_a_template_that_loses_marks_has_no_segments() -> None:
    assert spans(["a"], [3]) == []
    assert spans(["a"], [3, 9, 12, 18]) == []
    assert spans(["a", "b"], [3, 9, 9, 9]) == [Marked("a", 3, 9)]


@pytest.mark.parametrize("name", ["x" * 65, 7, ["a"]])
def test_bad_names_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="segment"):
        message((ONE, name))

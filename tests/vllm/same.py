"""Whether two answers are the same: every token, and every log probability to what fp32 leaves of it."""

from typing import Any

TOLERANCE = 2e-3


def assert_same(answer: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert answer["tokens"] == wanted["tokens"]
    for found, place in zip(answer["top"], wanted["top"], strict=True):
        shared = found.keys() & place.keys()
        assert len(shared) >= 4  # the fifth may change places with the sixth
        for token in shared:
            assert abs(found[token] - place[token]) < TOLERANCE


def assert_all_same(answers: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(answers) == len(wanted)
    for answer, want in zip(answers, wanted, strict=True):
        assert_same(answer, want)

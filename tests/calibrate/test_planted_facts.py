"""Planted facts: where they stand, and that a branch asks for exactly what the context says."""

from itertools import pairwise
from typing import Any

import pytest

from kvass.calibrate import lessons
from kvass.calibrate.tasks import FactContext, fact_contexts
from kvass.calibrate.texts import Text, calibration_texts, held_texts
from kvass.engines.transformers.load import LoadedModel
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import InputError


@pytest.fixture(scope="module", params=["smollm2_fp32", "gemma3_fp32"])
def asked(request: Any) -> tuple[TransformersRunner, LoadedModel, list[FactContext]]:
    loaded = request.getfixturevalue(request.param)
    runner = TransformersRunner(loaded)
    return runner, loaded, fact_contexts(held_texts(), runner, contexts=6)


def test_each_fact_is_in_its_context_once(asked: tuple[Any, LoadedModel, list[FactContext]]) -> None:
    _, loaded, contexts = asked
    for context in contexts:
        text = loaded.tokenizer.decode(context.tokens)
        questions = [fact.question for fact in context.facts]
        assert len(set(questions)) == len(questions) == len(context.branches)
        for fact in context.facts:
            assert text.count(fact.question) == 1
            assert f"{fact.question} {fact.answer}" in text


def test_a_branch_is_question_and_answer(asked: tuple[Any, LoadedModel, list[FactContext]]) -> None:
    _, loaded, contexts = asked
    lengths = set()
    for context in contexts:
        for fact, branch in zip(context.facts, context.branches, strict=True):
            assert loaded.tokenizer.decode([*branch.prompt, *branch.answer]) == (
                f"\n{fact.question} {fact.answer}"
            )
            assert loaded.tokenizer.decode(branch.answer).strip() == fact.answer
            lengths.add(len(branch.answer))
    assert min(lengths) <= 2 and max(lengths) >= 6  # a token and its full stop; several tokens


def test_facts_stand_at_many_depths(asked: tuple[Any, LoadedModel, list[FactContext]]) -> None:
    *_, contexts = asked
    for context in contexts:
        depths = [fact.depth for fact in context.facts]
        assert depths == sorted(depths)
        assert depths[0] < 0.2 and depths[-1] > 0.8
        assert max(later - former for former, later in pairwise(depths)) < 0.3
        assert 1600 <= len(context.tokens) <= 2400


def test_the_same_seed_gives_the_same_and_another_does_not(smollm2_fp32: LoadedModel) -> None:
    runner, texts = TransformersRunner(smollm2_fp32), held_texts()
    one, same, other = (fact_contexts(texts, runner, contexts=2, seed=seed) for seed in (5, 5, 6))
    assert one == same
    assert one != other
    assert one[0] != one[1]


def test_lessons_ask_for_what_stands_in_them_and_for_nothing_that_is_judged(
    smollm2_fp32: LoadedModel,
) -> None:
    runner = TransformersRunner(smollm2_fp32)
    made = lessons.lessons(calibration_texts(), runner, 1536)
    short = lessons.lessons(calibration_texts(), runner, 700)
    assert len({tuple(one.read) for one in made}) == len(made) == len(short) == 4
    judged = {fact.question for one in fact_contexts(held_texts(), runner) for fact in one.facts}
    for one in (*made, *short):
        read, asked = (smollm2_fp32.tokenizer.decode(part) for part in (one.read, one.continued))
        facts = asked.strip().splitlines()
        assert len(facts) >= 12
        for fact in facts:
            assert fact in read
            assert not any(fact.startswith(question) for question in judged)
    assert max(len(one.read) for one in made) <= 1536
    assert max(len(one.read) for one in short) <= 700


def test_too_few_domains_are_refused(runner: TransformersRunner) -> None:
    with pytest.raises(InputError, match="3 domains"):
        fact_contexts([], runner)
    with pytest.raises(InputError, match="facts_each is 18"):
        fact_contexts([Text("a", "b", "c")], runner, facts_each=18)

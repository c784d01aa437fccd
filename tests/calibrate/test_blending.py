"""Prompts of segments that were read elsewhere, and the figures that are taken of them."""

import numpy as np
import pytest

from kvass.bench.blend import FRACTION, OTHERS, measured, summed_up
from kvass.bench.moved import prompts
from kvass.calibrate.blending import (
    CONTINUED_TOKENS,
    LONGEST,
    QUESTION_TOKENS,
    SEGMENTS,
    SHORTEST,
    Item,
    items,
)
from kvass.calibrate.tasks import branch_of
from kvass.calibrate.texts import Text, held_texts
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import InputError

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runner(smollm2_fp32) -> TransformersRunner:
    return TransformersRunner(smollm2_fp32)


def test_prompts_are_of_segments_of_several_domains(runner):
    made = items(held_texts(), runner, 9)
    assert made == items(held_texts(), runner, 9)
    assert len({tuple(one.question) for one in made}) == 9
    for one in made:
        assert len(one.segments) == SEGMENTS
        assert all(SHORTEST <= len(segment) <= LONGEST for segment in one.segments)
        assert (len(one.question), len(one.continued)) == (QUESTION_TOKENS, CONTINUED_TOKENS)
        prompt = one.prompt(one.question)
        for (start, stop), segment in zip(prompt.segments, one.segments, strict=True):
            assert list(prompt.tokens[start:stop]) == segment
        assert prompt.question.size == QUESTION_TOKENS


def test_what_is_asked_goes_on_from_a_segment(runner):
    texts = {one.name: runner.encode(one.text, begin=False) for one in held_texts()}
    for one in items(held_texts(), runner, 8):
        seam = [*one.segments[one.asked][-8:], *one.question[:8]]
        whole = runner._loaded.tokenizer.decode(seam)
        assert any(whole in text.text for text in held_texts()), (whole, list(texts))


def test_planted_facts_stand_in_other_segments_than_the_one_that_is_asked(runner):
    for one in items(held_texts(), runner, 4, facts=2):
        texts = [runner._loaded.tokenizer.decode(segment) for segment in one.segments]
        for branch in one.facts:
            sentence = runner._loaded.tokenizer.decode([*branch.prompt, *branch.answer]).strip()
            places = [number for number, text in enumerate(texts) if sentence in text]
            assert places
            assert one.asked not in places


def test_too_few_domains_are_refused(runner):
    alike = [Text(str(n), "prose", "A line of text.\n" * 500) for n in range(9)]
    with pytest.raises(InputError, match="four domains"):
        items(alike, runner, 1)


def test_figures_of_one_prompt(runner):
    """A fact in the first of three short segments, of which each was read alone."""
    system = runner.encode("Go on.\n\n")
    texts = (
        "The door of the old mill is painted green. Nobody knows who did it.\n" * 2,
        "Rivers run to the sea, and the sea is never full; boats go out at dawn.\n" * 3,
        "One, two, three, four, five, six, seven, eight, nine, ten, eleven.\n" * 3,
    )
    item = Item(
        system, [runner.encode(text, begin=False) for text in texts], 2,
        runner.encode("One, two, three,", begin=False), runner.encode(" four, five, six, seven", begin=False),
        [branch_of("The door of the old mill is painted", "green.", runner)],
    )  # fmt: skip
    found = measured(item, runner, everything=True)
    assert found["kl"]["all 1"] < 1e-5
    assert found["charged"]["all 1"] == 1
    assert found["charged"]["none 0"] == 0
    assert 0 < found["kl"]["query 0.3"] < found["kl"]["none 0"] < found["kl"]["no context"]
    assert found["facts"] == {"full": [True], "none": [True], "query": [True]}


def test_figures_are_summed_up_in_pairs():
    random = np.random.default_rng(0)
    found = []
    for number in range(40):
        hard = float(random.exponential())
        kl = {"none 0": hard, f"query {FRACTION:g}": 0.4 * hard, "no context": 9.0}
        kl |= {f"{name} {FRACTION:g}": 0.5 * hard for name in OTHERS}
        if number == 0:
            kl["all 1"] = 2e-7
        charged = {key: 0.1 for key in kl if key != "no context"}
        facts = {"full": [True], "none": [number % 2 == 0], "query": [number != 7]}
        found.append({"kl": kl, "charged": charged, "facts": facts})
    report = summed_up(found)
    assert report["kl_query_vs_none"] == 0.4
    assert report["query_vs_deviation_ci_high"] < 0
    assert report["query_vs_boundary_ci_high"] < 0
    assert report["kl_all_fp32"] == 2e-7
    assert report["recall"] == {"full": 1.0, "none": 0.5, "query": 0.975}
    assert report["recall_loss"] == 0.025
    assert report["selectors"]["no context"]["kl"][0] == 9.0


def test_agents_prompts_recur_and_are_the_same_each_time(runner):
    made = [one.tolist() for one in prompts(runner)]
    assert made[:3] == [one.tolist() for one, _ in zip(prompts(runner), range(3), strict=False)]
    assert len(made) == 72
    assert len({tuple(one) for one in made}) == 72

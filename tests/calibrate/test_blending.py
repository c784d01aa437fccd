"""Prompts of segments that were read elsewhere, and the figures that are taken of them."""

import numpy as np
import pytest

from kvass.bench.blend import FRACTION, summed_up
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
from kvass.calibrate.repairing import ALL, DEFAULTS, NONE, Compared, Way, compare
from kvass.calibrate.repairing import summed_up as certified
from kvass.calibrate.tasks import branch_of
from kvass.calibrate.texts import Text, held_texts
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import InputError
from kvass.reuse.selectors import DEFAULT

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
    most = DEFAULTS[-1]
    found = compare(item, runner, [NONE, most, ALL], [NONE, most])
    assert found.kl[ALL] < 1e-5
    assert (found.fraction[ALL], found.chosen[ALL]) == (1, 1)
    assert (found.fraction[NONE], found.chosen[NONE]) == (0, 0)
    assert 0 < found.chosen[most] < found.fraction[most] <= most.fraction
    assert 0 < found.kl[most] < found.kl[NONE] < found.no_context
    assert found.top1[ALL] == 1 >= found.top1[most]
    assert (found.full, found.kept) == ([True], {NONE: [True], most: [True]})


def compared() -> list[Compared]:
    """Forty prompts of which the default halves what repair by others leaves."""
    random = np.random.default_rng(0)
    made = []
    for number in range(40):
        hard = float(random.exponential())
        kl = {NONE: hard, Way(DEFAULT, FRACTION): 0.4 * hard}
        kl |= {Way(name, FRACTION): 0.5 * hard for name in ("view", "boundary", "deviation", "random")}
        if number == 0:
            kl[ALL] = 2e-7
        ways = dict.fromkeys(kl, 0.1)
        kept = {NONE: [number % 2 == 0], Way(DEFAULT, FRACTION): [number != 7]}
        made.append(Compared(kl, dict.fromkeys(kl, 0.9), ways, ways, kept, [True], 9.0))
    return made


def test_figures_are_summed_up_in_pairs():
    report = summed_up(compared())
    assert report["kl_query_vs_none"] == 0.4
    assert report["query_vs_deviation_ci_high"] < 0
    assert report["query_vs_boundary_ci_high"] < 0
    assert report["kl_all_fp32"] == 2e-7
    assert report["recall"] == {"full": 1.0, "none 0": 0.5, f"{DEFAULT} {FRACTION:g}": 0.975}
    assert report["recall_loss"] == 0.025
    assert report["selectors"]["no context"]["kl"][0] == 9.0


def test_a_certificate_counts_the_facts_that_full_prefill_has_and_repair_has_not():
    found = compared()
    found[7].full = [False]
    row = certified(found, Way(DEFAULT, FRACTION))
    assert (row.method, row.facts_tried, row.facts_lost) == (DEFAULT, 39, 0)
    assert 0.05 < row.facts_lost_high < 0.1
    assert row.kl_low < row.kl_mean < row.kl_high
    found[7].full = [True]
    assert certified(found, Way(DEFAULT, FRACTION)).facts_lost == 1
    assert certified(found, Way("boundary", FRACTION)).facts_lost_high == 1  # none was asked for


def test_agents_prompts_recur_and_are_the_same_each_time(runner):
    made = [one.tolist() for one in prompts(runner)]
    assert made[:3] == [one.tolist() for one, _ in zip(prompts(runner), range(3), strict=False)]
    assert len(made) == 72
    assert len({tuple(one) for one in made}) == 72

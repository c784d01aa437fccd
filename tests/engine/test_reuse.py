"""Segments read elsewhere, in tiny models of several families: moved, put together, repaired."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.tiny import WINDOW, text, tiny
from fixtures.passages import segments
from kvass.engines.transformers import Engine
from kvass.engines.transformers.layers import kv_spec
from kvass.engines.transformers.load import LoadedModel
from kvass.engines.transformers.movable import refuse_unmovable
from kvass.engines.transformers.pool_cache import TorchPool
from kvass.engines.transformers.runner import TransformersRunner
from kvass.engines.transformers.workspace import TransformersWorkspace
from kvass.errors import InputError, UnsupportedModelError
from kvass.reuse.assembly import Segment, put
from kvass.reuse.prompt import Prompt
from kvass.reuse.repair import repair
from kvass.reuse.selectors import SELECTORS, selector
from kvass.reuse.stored import joined
from kvass.reuse.stored import segments as opened
from kvass.runner import Branch

FAMILIES = (
    "llama", "llama3-rope", "linear-rope", "yarn-rope", "qwen3", "phi", "gemma3", "mistral", "gpt-neox",
)  # fmt: skip
ATOL = 1e-4


class World:
    """A tiny model, and what it computes by itself."""

    def __init__(self, family: str):
        self.model = tiny(family)
        self.spec = kv_spec(self.model)

    def workspace(self, capacity: int) -> TransformersWorkspace:
        pool = TorchPool(self.spec, capacity)
        pool.fill(0xFF)  # what is used without having been put there shows
        return TransformersWorkspace(self.model, pool)

    def read(self, tokens):
        """KV of a sequence, by a plain prefill in a workspace of its own."""
        workspace = self.workspace(len(tokens))
        workspace.recompute(tokens, range(len(tokens)))
        return self.copied(workspace, 0, len(tokens))

    def copied(self, workspace, start, stop):
        return [
            {name: array.copy() for name, array in workspace.arrays(group, start, stop).items()}
            for group in range(len(self.spec.groups))
        ]

    def segment(self, prefix, tokens, start) -> Segment:
        kv = self.read([*prefix, *tokens])
        cut = len(prefix)
        return Segment(start, cut, [{n: a[:, cut:] for n, a in one.items()} for one in kv])

    def logits(self, tokens) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([tokens])).logits[0, -1], -1).numpy()


@pytest.fixture(params=FAMILIES)
def world(request) -> World:
    return World(request.param)


@pytest.fixture
def llama() -> World:
    return World("llama")


PREFIX, ONE, TWO, QUESTION = text(9, 1), text(70, 2), text(53, 3), text(12, 4)
TOKENS = [*PREFIX, *ONE, *TWO, *QUESTION]
PLACES = [(9, 79), (79, 132)]


def assembled(world: World, prompt: Prompt, *, bare: bool = False) -> TransformersWorkspace:
    """A prompt's segments, each read behind the prefix alone, at their places."""
    workspace = world.workspace(len(prompt.tokens) + 8)
    before = [] if bare else list(prompt.tokens[: prompt.exact])
    put(workspace, [world.segment([], prompt.tokens[: prompt.exact], 0)] if prompt.exact else [])
    put(
        workspace,
        [world.segment(before, prompt.tokens[start:stop], start) for start, stop in prompt.segments],
    )
    return workspace


def test_families_are_tried(world):
    refuse_unmovable(world.model, world.spec)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt-j", "cohere", "glm", "codegen", "gemma2", "bloom"])
def test_families_whose_keys_do_not_turn_so_are_refused(family):
    model = tiny(family)
    with pytest.raises(UnsupportedModelError):
        refuse_unmovable(model, kv_spec(model))
    runner = TransformersRunner(LoadedModel(model, None, family, Path()))
    with pytest.raises(UnsupportedModelError):
        runner.workspace(32)


def test_keys_are_those_of_a_fresh_prefill_in_the_first_layer(world):
    prompt = Prompt(TOKENS, 9, PLACES)
    found, fresh = assembled(world, prompt), world.read(TOKENS)
    number, place = next((n, g.layers.index(0)) for n, g in enumerate(world.spec.groups) if 0 in g.layers)
    keys = found.arrays(number, 0, 132)["k"][place]
    assert np.allclose(keys, fresh[number]["k"][place, :132], atol=1e-5)


def test_there_and_back(world):
    kv = world.read(ONE)
    workspace = world.workspace(700)
    put(workspace, [Segment(600, 0, kv)])
    there = world.copied(workspace, 600, 670)
    put(workspace, [Segment(3, 600, there)])
    for group, arrays in enumerate(world.copied(workspace, 3, 73)):
        put_back = world.workspace(70)
        put(put_back, [Segment(0, 3, world.copied(workspace, 3, 73))])
        for name in ("k", "v"):
            assert np.allclose(put_back.arrays(group, 0, 70)[name], kv[group][name], atol=1e-5)
        assert np.array_equal(arrays["v"], kv[group]["v"])


def test_all_is_full_prefill(world):
    prompt = Prompt(TOKENS, 9, PLACES)
    done = repair(prompt, assembled(world, prompt), selector("all"), 1.0)
    assert done.fraction == 1.0
    assert np.abs(done.log - world.logits(TOKENS)).max() < ATOL


def test_none_is_not_full_prefill(world):
    prompt = Prompt(TOKENS, 9, PLACES)
    done = repair(prompt, assembled(world, prompt), selector("none"), 1.0)
    assert done.fraction == 0.0
    assert not len(done.positions)
    assert np.abs(done.log - world.logits(TOKENS)).max() > 10 * ATOL


def test_a_segment_at_its_old_place_is_full_prefill(world):
    tokens = [*PREFIX, *ONE, *QUESTION]
    prompt = Prompt(tokens, 9, [(9, 79)])
    done = repair(prompt, assembled(world, prompt), selector("none"), 0.0)
    assert np.abs(done.log - world.logits(tokens)).max() < ATOL


def test_a_later_segment_changes_nothing_before_it(world):
    """The mask: rows that are computed together lie scattered, and must not see what comes after them."""
    found = []
    for later in (TWO, text(53, 99)):
        prompt = Prompt([*PREFIX, *ONE, *later, *QUESTION], 9, PLACES)
        workspace = assembled(world, prompt)
        rows = np.array([12, 40, 78, 90, 131])
        workspace.recompute(prompt.rows(rows), rows)
        found.append(world.copied(workspace, 0, 79))
    for one, other in zip(*found, strict=True):
        for name in ("k", "v"):
            assert np.array_equal(one[name], other[name])


def test_a_segment_without_kv_is_full_prefill_where_all_is_computed(world):
    long = text(250, 8)
    tokens = [*PREFIX, *long, *QUESTION]
    prompt = Prompt(tokens, 9, [(9, 259)])
    workspace = world.workspace(len(tokens))
    put(workspace, [world.segment([], PREFIX, 0)])
    done = repair(prompt, workspace, selector("all"), 1.0)
    assert np.abs(done.log - world.logits(tokens)).max() < ATOL
    fresh = world.read(tokens)
    for group, arrays in enumerate(world.copied(workspace, 0, len(tokens))):
        for name in ("k", "v"):
            assert np.allclose(arrays[name], fresh[group][name], atol=1e-4)


def test_tokens_between_segments_are_new(world):
    """An exact prefix, a segment, new text, the same segment again, one right behind it, the question."""
    tokens = [*PREFIX, *ONE, *text(5, 7), *ONE, *TWO, *QUESTION]
    prompt = Prompt(tokens, 9, [(9, 79), (84, 154), (154, 207)])
    assert prompt.new.tolist() == [*range(79, 84), *range(207, 219)]
    assert prompt.question.tolist() == [*range(207, 219)]
    done = repair(prompt, assembled(world, prompt), selector("all"), 1.0)
    assert np.abs(done.log - world.logits(tokens)).max() < ATOL


def test_segments_at_the_very_start_and_up_to_the_last_token(world):
    tokens = [*ONE, *TWO, 5]
    prompt = Prompt(tokens, 0, [(0, 70), (70, 123)])
    done = repair(prompt, assembled(world, prompt), selector("all"), 1.0)
    assert np.abs(done.log - world.logits(tokens)).max() < ATOL


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_segments_longer_than_the_window(family):
    world = World(family)
    long = text(3 * WINDOW, 5)
    tokens = [*PREFIX, *long, *ONE, *QUESTION]
    prompt = Prompt(tokens, 9, [(9, 9 + len(long)), (9 + len(long), 9 + len(long) + 70)])
    done = repair(prompt, assembled(world, prompt), selector("all"), 1.0)
    assert np.abs(done.log - world.logits(tokens)).max() < ATOL


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_every_selector_keeps_within_its_fraction(world, name):
    prompt = Prompt(TOKENS, 9, PLACES)
    for fraction in (0.0, 0.3, 0.8):
        done = repair(prompt, assembled(world, prompt), selector(name), fraction)
        assert np.isfinite(done.log).all()
        assert set(done.positions) <= set(prompt.reused)
        assert (np.diff(done.positions) > 0).all()
        if name in ("query", "view", "boundary", "random") and len(done.positions):
            assert done.fraction <= fraction + 1e-9
        again = repair(prompt, assembled(world, prompt), selector(name), fraction)
        assert np.array_equal(done.positions, again.positions)


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_nothing_is_seen_that_was_never_put_there(llama, name):
    """New text between segments, and a question longer than what is asked of it."""
    tokens = [*PREFIX, *ONE, *text(5, 7), *TWO, *text(40, 4)]
    prompt = Prompt(tokens, 9, [(9, 79), (84, 137)])
    found = []
    for _ in range(2):
        workspace = assembled(llama, prompt)
        if found:
            workspace._pool._tensors[0]["k"][:, 79:84] = workspace._pool._tensors[0]["v"][:, 79:84] = 9.0
            workspace._pool._tensors[0]["k"][:, 137:] = workspace._pool._tensors[0]["v"][:, 137:] = -9.0
        found.append(repair(prompt, workspace, selector(name), 0.6))
    assert np.array_equal(found[0].positions, found[1].positions)
    assert np.array_equal(found[0].log, found[1].log)
    assert np.isfinite(found[0].log).all()


def test_boundary_takes_as_many_of_each_segment(llama):
    prompt = Prompt(TOKENS, 9, PLACES)
    done = repair(prompt, assembled(llama, prompt), selector("boundary"), 20 / 123)
    assert done.positions.tolist() == [*range(9, 19), *range(79, 89)]


def test_view_takes_what_the_question_looks_at_and_rather_what_stands_early(llama):
    prompt = Prompt(TOKENS, 9, PLACES)
    workspace = assembled(llama, prompt)
    mass = workspace.attention(prompt.rows(prompt.question), prompt.question, judged=12)
    assert mass.shape == (3, 4, len(TOKENS))
    assert np.allclose(mass.sum(-1), 1, atol=1e-4)
    done = repair(prompt, workspace, selector("view"), 0.3)
    assert len(done.positions) == int(0.3 * 123 - 12 + 1e-9)
    assert done.fraction <= 0.3
    seen = mass[:, :, prompt.reused]
    score = (seen / seen.sum(-1, keepdims=True)).mean((0, 1)) / (1 + prompt.depth) ** 0.6
    best = prompt.reused[np.argsort(-score)]
    assert set(done.positions) == set(best[: len(done.positions)])


def test_a_fraction_that_looking_alone_exceeds_repairs_nothing(llama):
    prompt = Prompt(TOKENS, 9, PLACES)
    assert not len(repair(prompt, assembled(llama, prompt), selector("view"), 0.09).positions)


def test_deviation_counts_the_layers_that_it_computes_of_all(llama):
    prompt = Prompt(TOKENS, 9, PLACES)
    done = repair(prompt, assembled(llama, prompt), selector("deviation"), 0.0)
    assert done.fraction == pytest.approx(2 / 3)
    more = repair(prompt, assembled(llama, prompt), selector("deviation"), 0.9)
    assert 2 / 3 < more.fraction <= 0.9


def test_a_deviation_of_nothing_is_of_no_token(llama):
    """Layer 1 of all tokens is as in a full prefill after the check, whichever are then chosen."""
    prompt = Prompt(TOKENS, 9, PLACES)
    workspace = assembled(llama, prompt)
    selector("deviation").choose(prompt, workspace, 0.0)
    fresh = llama.read(TOKENS)
    for layer in (0, 1):
        for name in ("k", "v"):
            assert np.allclose(workspace.arrays(0, 9, 144)[name][layer], fresh[0][name][layer, 9:], atol=1e-5)


def test_prompts_that_do_not_fit_are_refused(llama):
    with pytest.raises(InputError, match="does not lie behind"):
        Prompt(TOKENS, 9, [(9, 79), (78, 132)])
    with pytest.raises(InputError, match="does not lie behind"):
        Prompt(TOKENS, 9, [(5, 79)])
    with pytest.raises(InputError, match="does not lie behind"):
        Prompt(TOKENS, 9, [(20, 20)])
    with pytest.raises(InputError, match="must end"):
        Prompt(TOKENS, 9, [(9, len(TOKENS))])
    with pytest.raises(InputError, match="no selector 'oracle'"):
        selector("oracle")


def test_rows_that_do_not_fit_are_refused(llama):
    workspace = llama.workspace(16)
    for tokens, positions in (([1, 2], [3]), ([1, 2], [3, 3]), ([1, 2], [4, 3]), ([1], [-1]), ([], [])):
        with pytest.raises(InputError, match="positions that rise"):
            workspace.recompute(tokens, positions)
    with pytest.raises(InputError, match="outside of a workspace of 16"):
        workspace.recompute([1], [16])
    put(workspace, [llama.segment([], ONE[:5], 0), llama.segment([], ONE[:5], 6)])
    with pytest.raises(InputError, match="token 5 before position 11"):
        workspace.recompute([1], [11])
    workspace.recompute([1, 2], [5, 11])
    with pytest.raises(InputError, match="overlaps"):
        put(workspace, [llama.segment([], ONE[:5], 0), llama.segment([], ONE[:5], 4)])


class TestStored:
    """Segments out of a cache, found in what an engine has read."""

    @pytest.fixture
    def engine(self, cache) -> Engine:
        return Engine(tiny("llama"), cache)

    def put_in(self, engine, *texts):
        for one in texts:
            engine.read(one)
        engine.cache.flush()

    def test_what_was_read_elsewhere_is_found_and_put_together(self, engine, llama):
        """Read behind the same beginning, behind another one, and as a part of something longer."""
        more, other = text(90, 5), text(40, 6)
        self.put_in(engine, [*PREFIX, *ONE], [*other, *more, *TWO], [*PREFIX, *other])
        tokens = [*PREFIX, *more[10:85], *ONE, *QUESTION]
        found = segments(engine.cache, engine.namespace, tokens, 9)
        assert [(one.start, one.stop, one.read_at) for one in found] == [(9, 84, 50), (84, 154, 9)]
        workspace = llama.workspace(len(tokens))
        put(workspace, [llama.segment([], PREFIX, 0), *found])
        own = llama.workspace(len(tokens))
        before = [*other, *more[:10]]
        moved = Segment(9, 50, llama.segment(before, more[10:85], 9).kv)
        put(own, [llama.segment([], PREFIX, 0), moved, llama.segment(PREFIX, ONE, 84)])
        for name in ("k", "v"):
            assert np.allclose(workspace.arrays(0, 0, 154)[name], own.arrays(0, 0, 154)[name], atol=1e-5)

    def test_all_of_it_computed_anew_is_full_prefill(self, engine, llama):
        self.put_in(engine, [*text(30, 6), *ONE])
        tokens = [*PREFIX, *ONE, *QUESTION]
        found = segments(engine.cache, engine.namespace, tokens, 9)
        prompt = Prompt(tokens, 9, [(one.start, one.stop) for one in found])
        assert prompt.segments == [(9, 79)]
        workspace = llama.workspace(len(tokens))
        put(workspace, [llama.segment([], PREFIX, 0), *found])
        done = repair(prompt, workspace, selector("all"), 1.0)
        assert np.abs(done.log - llama.logits(tokens)).max() < ATOL

    @pytest.mark.parametrize("family", ["mistral", "gemma3"])
    def test_a_passage_longer_than_the_window_comes_in_pieces(self, cache, family):
        world = World(family)
        engine = Engine(tiny(family), cache)
        self.put_in(engine, [*text(30, 6), *ONE, *TWO])
        tokens = [*PREFIX, *ONE, *TWO, *QUESTION]
        with opened(cache, engine.namespace, tokens, 9) as pieces:
            assert joined(pieces) == [(9, 9 + len(ONE) + len(TWO))]
            assert len(pieces) > 2
            assert all(piece.tokens < WINDOW for piece in pieces)
        found = segments(cache, engine.namespace, tokens, 9)
        workspace = world.workspace(len(tokens))
        put(workspace, [world.segment([], PREFIX, 0), *found])
        own = world.workspace(len(tokens))
        whole = Segment(9, 30, world.segment(text(30, 6), [*ONE, *TWO], 9).kv)
        put(own, [world.segment([], PREFIX, 0), whole])
        for group in range(len(world.spec.groups)):
            for name in ("k", "v"):
                moved, wanted = (
                    one.arrays(group, 9, len(tokens) - len(QUESTION)) for one in (workspace, own)
                )
                assert np.allclose(moved[name], wanted[name], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_branches_are_kept_apart_whatever_kinds_of_layers_there_are(family):
    """A model whose layers are all of one kind takes one mask, also where that kind has a window."""
    world = World(family)
    runner = TransformersRunner(LoadedModel(world.model, None, family, Path()), kv_dtype="float32")
    kv = runner.prefill(ONE)
    branches = [Branch(QUESTION[:4], TWO[:3]), Branch(QUESTION[5:9], TWO[7:8])]
    both = runner.choose_over(kv, branches)
    for found, branch in zip(both, branches, strict=True):
        rows = runner.continue_over(kv, [*branch.prompt, *branch.answer[:-1]])
        assert found.tolist() == rows[-len(branch.answer) :].argmax(1).tolist()

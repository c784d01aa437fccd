"""Passages that were read elsewhere, in requests: used where asked for and certified, else not at all."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Asked
from tiny import text, tiny

from kvass.cache import KVCache
from kvass.engines.transformers import Engine, Sampling, Scope, Usage
from kvass.keys import blend_namespace
from kvass.provenance import Blended
from kvass.quality import BlendMeasured, Budget, Gate, certify_blends, keep_blends
from kvass.reuse.plan import Reuse
from kvass.tiers.directory import DirectoryTier

CHUNK = 32
WIDE = Budget(kl=0.1)
ROW = BlendMeasured(
    method="query", chosen=0.1, fraction=0.15, kl_mean=0.02, kl_low=0.01, kl_high=0.03, top1=0.9,
    facts_tried=200, facts_lost=0, facts_lost_high=0.015,
)  # fmt: skip
HALF = Reuse(0.5)

SYSTEM, QUESTION = text(40, seed=1), text(21, seed=2)
ONE, TWO = text(150, seed=3), text(130, seed=4)
PROMPT = SYSTEM + TWO + ONE + QUESTION


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def machine(model: Any, folder: Path) -> Iterator[Callable[..., Engine]]:
    """Engines over one tier, of a model for which repair is certified."""
    with ExitStack() as stack:

        def made(*rows: BlendMeasured) -> Engine:
            space = Engine(model, None).namespace
            if rows:
                keep_blends(folder, space, certify_blends(space, 50, 1.0, list(rows)))
            tier = DirectoryTier(folder / "tier", 256 << 20, name="disk")
            cache = stack.enter_context(KVCache([tier], chunk_tokens=CHUNK, gate=Gate(folder)))
            return Engine(model, cache, slice_tokens=24)

        yield made


def told(engine: Engine, prompt: list[int], count: int = 6, **options: Any) -> Asked:
    """Ask, and wait until all is stored."""
    usage = Usage()
    steps = list(engine.generate(prompt, Sampling(max_tokens=count), usage=usage, **options))
    if engine.cache is not None:
        engine.cache.flush(30)
    logits = torch.stack([one.logits for one in steps]) if steps else torch.empty(0)
    return Asked([one.token for one in steps], logits, usage, "")


def blended(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> Asked:
    return told(engine, prompt, **{"reuse": HALF, "budget": WIDE, **options})


def read_apart(engine: Engine) -> None:
    """Both passages are read behind the system prompt alone."""
    for one in (ONE, TWO):
        engine.read(SYSTEM + one)
    assert engine.cache is not None
    engine.cache.flush(30)


def divergence(one: Asked, other: Asked) -> float:
    log, exact = (torch.log_softmax(asked.logits[0].float(), -1) for asked in (one, other))
    return float((exact.exp() * (exact - log)).sum())


def test_passages_in_another_order_are_moved_and_repaired(machine: Any, model: Any) -> None:
    engine = machine(ROW)
    read_apart(engine)
    found = blended(engine)
    usage = found.usage
    exact = len(SYSTEM) + len(TWO)  # the second one stands where it was read: a prefix, to the token
    assert usage.exact_tokens == exact
    assert len(ONE) - 8 <= usage.reused_tokens <= len(ONE)
    assert usage.cached_tokens == usage.exact_tokens + usage.reused_tokens
    assert 0.1 < usage.recomputed_fraction <= HALF.max_fraction
    assert usage.provenance == "blend"
    cold = told(Engine(model, None, slice_tokens=24), PROMPT)
    alone = told(Engine(model, None, slice_tokens=24), SYSTEM + QUESTION)
    assert divergence(found, cold) < 0.2 * divergence(alone, cold)


def test_the_answer_goes_on_from_repaired_state(machine: Any) -> None:
    """Every token behind the first is computed upon the pool as repair left it: a second request, which loads
    what the first one stored, says the same."""
    engine = machine(ROW)
    read_apart(engine)
    first = blended(engine)
    again = blended(engine)
    assert again.usage.cached_tokens == len(PROMPT) - 1
    assert again.usage.provenance == "blend"
    assert again.usage.recomputed_fraction == pytest.approx(first.usage.recomputed_fraction)
    assert again.tokens == first.tokens
    one, other = (torch.log_softmax(asked.logits, -1) for asked in (first, again))
    assert torch.allclose(one, other, atol=1e-4)


def test_a_request_for_exact_state_gets_none_of_it(machine: Any, model: Any) -> None:
    engine = machine(ROW)
    read_apart(engine)
    blended(engine)
    plain = told(engine, PROMPT)
    assert plain.usage.provenance == "exact"
    assert plain.usage.reused_tokens == 0
    assert plain.usage.cached_tokens == len(SYSTEM) + len(TWO)
    cold = told(Engine(model, None, slice_tokens=24), PROMPT)
    assert torch.allclose(plain.logits, cold.logits, atol=1e-5)


def test_it_is_stored_under_its_own_prompt_with_what_was_done(machine: Any) -> None:
    engine = machine(ROW)
    read_apart(engine)
    usage = blended(engine).usage
    space = blend_namespace(engine.namespace, torch.tensor(PROMPT, dtype=torch.int32).numpy())
    made = [one.header() for one in engine.cache.entries(space)]
    assert sum(len(header.tokens) for header in made) == len(PROMPT) + 5
    for header in made:
        assert isinstance(header.provenance, Blended)
        assert header.provenance.method == "query"
        assert header.provenance.fraction == pytest.approx(usage.recomputed_fraction)
        assert 0.09 <= header.provenance.chosen <= 0.11


def test_another_question_is_repaired_anew(machine: Any) -> None:
    engine = machine(ROW)
    read_apart(engine)
    blended(engine)
    other = blended(engine, PROMPT[: -len(QUESTION)] + text(21, seed=9))
    assert other.usage.provenance == "blend"
    assert other.usage.cached_tokens < len(PROMPT) - len(QUESTION) + 1


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ((), {}),  # no certificate
        ((ROW,), {"budget": Budget(kl=0.01)}),
        ((ROW,), {"budget": None}),  # the default budget
        ((ROW,), {"reuse": Reuse(0.15)}),  # choosing costs 21 of 150 tokens, and more is to be computed
        ((ROW,), {"reuse": None}),
    ],
)
def test_what_is_not_certified_or_allowed_is_read_as_ever(machine: Any, model: Any, rows, options) -> None:
    engine = machine(*rows)
    read_apart(engine)
    found = blended(engine, **options)
    assert (found.usage.reused_tokens, found.usage.provenance) == (0, "exact")
    assert found.usage.cached_tokens == len(SYSTEM) + len(TWO)
    cold = told(Engine(model, None, slice_tokens=24), PROMPT)
    assert torch.allclose(found.logits, cold.logits, atol=1e-5)


def test_a_passage_at_the_very_start_and_one_twice(machine: Any, model: Any) -> None:
    engine = machine(ROW)
    read_apart(engine)
    prompt = ONE + TWO + ONE + QUESTION
    found = blended(engine, prompt)
    assert found.usage.exact_tokens == 0
    assert 2 * len(ONE) + len(TWO) - 12 <= found.usage.reused_tokens <= len(prompt) - len(QUESTION)
    assert found.usage.provenance == "blend"


def test_a_request_without_an_answer_is_repaired_too(machine: Any) -> None:
    engine = machine(ROW)
    read_apart(engine)
    assert blended(engine, count=0).usage.provenance == "blend"
    assert blended(engine).usage.cached_tokens == len(PROMPT) - 1


def test_a_model_whose_kv_cannot_be_moved_reads_as_ever(folder: Path) -> None:
    odd = tiny("gpt2")
    space = Engine(odd, None).namespace
    keep_blends(folder, space, certify_blends(space, 50, 1.0, [ROW]))
    tier = DirectoryTier(folder / "tier", 256 << 20, name="disk")
    with KVCache([tier], chunk_tokens=CHUNK, gate=Gate(folder)) as cache:
        engine = Engine(odd, cache, slice_tokens=24)
        read_apart(engine)
        assert blended(engine).usage.provenance == "exact"


def test_a_request_that_is_cancelled_ends_between_two_layers(machine: Any) -> None:
    engine = machine(ROW)
    read_apart(engine)
    cancelled, usage = threading.Event(), Usage()
    scope = Scope(reuse=HALF, budget=WIDE)
    answering = engine.start(PROMPT, Sampling(max_tokens=6), usage=usage, scope=scope, cancelled=cancelled)
    cancelled.set()
    answering.begin()
    assert answering.blended is None
    assert answering.advance() is None
    answering.close()
    assert engine.cache is not None
    engine.cache.flush(30)
    assert {one.header().namespace.state for one in engine.cache.entries()} == {"exact"}

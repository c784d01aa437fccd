"""Lossy state in the engine: only for requests that allow it, kept apart from exact state, exact first."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Asked, ask
from tiny import text, tiny

from fixtures.coders import calibrate, measured
from kvass.cache import KVCache
from kvass.chunks import as_tokens
from kvass.config import Settings
from kvass.engines.transformers import Engine, LoadedModel, Sampling, Scope, Usage, kv_spec
from kvass.engines.transformers.hosting import kept_under
from kvass.keys import Namespace, address, chain, lossy_namespace
from kvass.models.shared import shared_namespace
from kvass.quality import Budget, Gate, binding
from kvass.tiers.directory import DirectoryTier

CHUNK, CODEC, STATE = 32, "int8", "lossy-int8"


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    """One of full attention, and one with windows of 48 tokens."""
    return tiny(request.param)


@pytest.fixture
def space(model: Any, folder: Path) -> Namespace:
    """Where the model's exact state lies; the model is certified for int8."""
    found = Engine(model, None).namespace
    calibrate(folder, found, [measured(CODEC)])
    return found


@pytest.fixture
def machine(model: Any, space: Namespace, folder: Path) -> Iterator[Callable[..., Engine]]:
    """Engines, each on a host tier of its own, over one SSD tier that stores by int8."""
    with ExitStack() as stack:

        def made(host: str, **options: Any) -> Engine:
            tiers = [DirectoryTier(folder / name, 256 << 20, name=name) for name in (host, "disk")]
            cache = KVCache(tiers, chunk_tokens=CHUNK, codecs={"disk": CODEC}, gate=Gate(folder))
            stack.enter_context(cache)
            return Engine(model, cache, slice_tokens=24, **options)

        yield made


def told(engine: Engine, prompt: list[int], count: int = 8, **options: Any) -> Asked:
    """Ask with the options of a request, and wait until all tiers have what it left."""
    usage = Usage()
    steps = list(engine.generate(prompt, Sampling(max_tokens=count), usage=usage, **options))
    assert engine.cache is not None
    engine.cache.flush(30)
    return Asked([one.token for one in steps], torch.stack([one.logits for one in steps]), usage, "")


def used(asked: Asked) -> tuple[int, int, str]:
    return asked.usage.cached_tokens, asked.usage.exact_tokens, asked.usage.provenance


def states(engine: Engine, tier: str) -> set[str]:
    assert engine.cache is not None
    return {one.header().namespace.state for one in engine.cache.entries() if one.tier == tier}


def cold(model: Any, prompt: list[int]) -> Asked:
    return ask(Engine(model, None, slice_tokens=24), prompt, 8)


def test_only_a_request_that_allows_it_gets_lossy_state(machine: Any, model: Any) -> None:
    prompt = text(4 * CHUNK + 7)
    one, other = machine("one"), machine("two")
    assert used(told(one, prompt)) == (0, 0, "exact")
    found = told(other, prompt, lossy=True)
    assert used(found) == (len(prompt) - 1, 0, STATE)
    wanted = cold(model, prompt)
    assert not torch.equal(found.logits, wanted.logits)  # else there is nothing to keep apart
    assert states(other, "two") == {STATE}
    exact = told(other, prompt, lossy=False)
    assert used(exact) == (0, 0, "exact")
    assert torch.equal(exact.logits, wanted.logits)
    warm = told(one, prompt)  # never saw a lossy request; other forward calls than a cold one's
    for lossy in (False, True):
        again = told(other, prompt, lossy=lossy)
        assert used(again) == (len(prompt) - 1, len(prompt) - 1, "exact")  # exact state comes first
        assert torch.equal(again.logits, warm.logits)


def test_a_chat_upon_lossy_state_is_kept_apart_from_the_exact_one(machine: Any, model: Any) -> None:
    first = text(3 * CHUNK + 5)
    told(machine("one"), first)
    engine = machine("two")
    answer = told(engine, first, 40, lossy=True)
    second = [*first, *answer.tokens, *text(CHUNK, seed=3)]
    found = told(engine, second, lossy=True)
    assert used(found) == (len(first) + 39, 0, STATE)
    third = [*second, *found.tokens, *text(5, seed=4)]
    assert used(told(engine, third, lossy=True)) == (len(second) + 7, 0, STATE)
    assert states(engine, "two") == states(engine, "disk") == {STATE}
    exact = told(engine, third)
    assert used(exact) == (0, 0, "exact")
    assert torch.equal(exact.logits, cold(model, third).logits)


def test_what_is_exact_of_a_prompt_is_loaded_as_such(machine: Any, space: Namespace) -> None:
    engine, prompt = machine("one"), text(5 * CHUNK + 3)
    told(engine, prompt)
    engine.cache.tiers[0].delete([address(chain(space.root(), as_tokens(prompt), CHUNK)[2], 0)])
    assert used(told(engine, prompt, lossy=True)) == (len(prompt) - 1, 2 * CHUNK, STATE)
    kept = engine.cache.lookup([*prompt, 7], lossy_namespace(space, CODEC))
    assert kept.length == len(prompt)
    assert engine.cache.lookup(prompt, space).length == 2 * CHUNK


def test_a_requests_budget_decides(machine: Any, space: Namespace, folder: Path) -> None:
    prompt = text(3 * CHUNK)
    told(machine("one"), prompt)
    strict, loose = Budget(kl=0.0001), Budget(kl=0.5)
    assert used(told(machine("two"), prompt, lossy=True, budget=strict)) == (0, 0, "exact")
    calibrate(folder, space, [measured(CODEC, kl_mean=0.4)])
    assert used(told(machine("three"), prompt, lossy=True)) == (0, 0, "exact")
    engine = machine("four")
    assert used(told(engine, prompt, lossy=True, budget=loose)) == (len(prompt) - 1, 0, STATE)
    assert states(engine, "four") == {STATE}  # stored within the request's budget too


def test_an_engine_may_allow_it_for_requests_that_say_nothing(machine: Any) -> None:
    prompt = text(3 * CHUNK)
    told(machine("one"), prompt)
    assert used(told(machine("two", allow_lossy=True), prompt, lossy=False)) == (0, 0, "exact")
    assert used(told(machine("three", allow_lossy=True), prompt))[2] == STATE


def test_public_lossy_state_is_kept_again_under_the_tenants_own_root(
    machine: Any, model: Any, space: Namespace
) -> None:
    prompt = text(3 * CHUNK + 9)
    told(machine("one", tenant_salt="handbook"), prompt)
    engine, usage = machine("two"), Usage()
    scope = Scope("alice", ("handbook",), lossy=True)
    answering = engine.start(prompt, Sampling(max_tokens=2), usage=usage, scope=scope)
    while not answering.finished:
        answering.advance()
    answering.close()
    engine.cache.flush(30)
    assert (usage.cached_tokens, usage.provenance) == (len(prompt) - 1, STATE)
    own = Engine(model, None, tenant_salt="alice").namespace
    windows = any(group.window is not None for group in space.spec.groups)
    kept = engine.cache.lookup(prompt, lossy_namespace(own, CODEC)).length
    assert kept == (0 if windows else len(prompt))
    assert (usage.ticket is None) == windows  # what lies before a window was not loaded, and cannot be kept
    assert engine.cache.lookup(prompt, own).length == 0


def test_where_lossy_state_is_wanted_the_models_files_name_it(model: Any, folder: Path) -> None:
    model.save_pretrained(folder / "model")
    loaded = LoadedModel(model, None, "tiny", folder / "model")  # type: ignore[arg-type]
    settings = Settings.load(models_path=folder)
    assert kept_under(loaded, settings) is None
    own = Engine(model, None).namespace
    shared = shared_namespace(folder / "model", kv_spec(model), "equal", models_path=folder)
    for wanted in ({"allow_lossy": True}, {"disk_codec": CODEC}):
        named = kept_under(loaded, Settings.load(models_path=folder, **wanted))
        engine = Engine(model, None, shared=named)
        assert engine.namespace.numerics == own.numerics != shared.numerics
        assert engine.namespace.root() not in (own.root(), shared.root())
        assert lossy_namespace(engine.namespace, CODEC).root() == lossy_namespace(shared, CODEC).root()
        assert binding(engine.namespace) == binding(shared)
    declared = Settings.load(models_path=folder, allow_lossy=True, shared_numerics="equal")
    assert kept_under(loaded, declared) == shared

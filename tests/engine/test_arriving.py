"""Segments that arrive layer by layer while the model computes: as if they had been there from the start."""

import threading
import time

import numpy as np
import pytest

from engine.test_reuse import ONE, PLACES, PREFIX, QUESTION, TOKENS, TWO, World, assembled
from engine.tiny import tiny
from kvass.engines.transformers import Engine
from kvass.errors import CorruptObjectError, InputError, TierError
from kvass.reuse.arriving import Arrival, Lost, blend
from kvass.reuse.assembly import Segment, put
from kvass.reuse.prompt import Prompt
from kvass.reuse.repair import repair
from kvass.reuse.selectors import SELECTORS, selector
from kvass.reuse.selectors.query import asked_layers
from kvass.reuse.stored import Stored

PROMPT = Prompt(TOKENS, 9, PLACES)
FRACTION = 0.5


class Coming:
    """A segment in memory, to be had layer by layer; `before(layer, name)` is called first."""

    def __init__(self, segment, spec, before=lambda layer, name: None):
        self.segment, self.spec, self.before = segment, spec, before
        self.start, self.read_at, self.tokens = segment.start, segment.read_at, segment.tokens

    def rows(self, layer, name):
        self.before(layer, name)
        group, place = self.spec.places[layer]
        return self.segment.kv[group][name][place]


def coming(world, before=lambda layer, name: None):
    """A workspace with the prefix in place, and the segments of the prompt."""
    workspace = world.workspace(len(TOKENS) + 8)
    put(workspace, [world.segment([], PREFIX, 0)])
    made = [world.segment(PREFIX, TOKENS[start:stop], start) for start, stop in PLACES]
    return workspace, [Coming(one, world.spec, before) for one in made]


def threads() -> int:
    return sum(one.name.startswith("kvass-arriving") for one in threading.enumerate())


@pytest.fixture(params=["llama", "gemma3", "mistral", "phi"])
def world(request) -> World:
    return World(request.param)


@pytest.fixture
def llama() -> World:
    return World("llama")


@pytest.mark.parametrize("name", sorted(SELECTORS))
@pytest.mark.parametrize("slow", [0, 0.005])
def test_what_arrives_is_what_was_there_bit_by_bit(world, name, slow):
    whole = assembled(world, PROMPT)
    wanted = repair(PROMPT, whole, selector(name), FRACTION)
    workspace, segments = coming(world, lambda layer, name: time.sleep(slow))
    found = blend(PROMPT, workspace, segments, selector(name), FRACTION)
    assert np.array_equal(found.positions, wanted.positions)
    assert np.array_equal(found.log, wanted.log)
    for one, other in zip(
        world.copied(workspace, 0, len(TOKENS)), world.copied(whole, 0, len(TOKENS)), strict=True
    ):
        assert all(np.array_equal(one[name], other[name]) for name in ("k", "v"))
    assert threads() == 0


@pytest.mark.parametrize(
    "error", [TierError("gone"), CorruptObjectError("damaged"), OSError("x"), KeyError("y")]
)
@pytest.mark.parametrize("where", [(0, "k"), (1, "v"), (2, "v")])
@pytest.mark.parametrize("name", ["query", "view", "boundary", "deviation"])
def test_a_layer_that_cannot_be_had_is_a_miss(llama, error, where, name):
    def fail(*at):
        if at == where:
            raise error

    workspace, segments = coming(llama, fail)
    assert blend(PROMPT, workspace, segments, selector(name), FRACTION) is None
    assert threads() == 0


def test_any_other_error_is_a_miss_too(llama, caplog):
    def fail(*at):
        raise ZeroDivisionError

    workspace, segments = coming(llama, fail)
    assert blend(PROMPT, workspace, segments, selector("none"), FRACTION) is None
    assert "treated as a miss" in caplog.text


@pytest.mark.parametrize("where", [(0, "k"), (1, "v"), (2, "v")])
def test_a_layer_that_is_late_is_a_miss(llama, where, monkeypatch):
    """Nobody waits for it longer than was said, and when it comes after all, it is put nowhere."""
    monkeypatch.setattr("kvass.reuse.arriving._PATIENCE", 0.1)
    going = threading.Event()

    def late(*at):
        if at == where:
            going.wait(20)

    workspace, segments = coming(llama, late)
    began = time.monotonic()
    assert blend(PROMPT, workspace, segments, selector("view"), FRACTION, seconds=0.3) is None
    assert time.monotonic() - began < 5
    before = llama.copied(workspace, 0, len(TOKENS))
    going.set()
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 0
    for one, other in zip(before, llama.copied(workspace, 0, len(TOKENS)), strict=True):
        assert all(one[name].tobytes() == other[name].tobytes() for name in ("k", "v"))


def test_the_model_fails_and_the_thread_ends(llama):
    workspace, segments = coming(llama)
    with pytest.raises(InputError):
        blend(PROMPT, workspace, segments[:1], selector("none"), FRACTION)  # the second is nowhere
    assert threads() == 0
    with pytest.raises(InputError, match="overlaps"):
        blend(PROMPT, workspace, [segments[0], segments[0]], selector("none"), FRACTION)
    assert threads() == 0


def first(arrival: Arrival, wanted) -> bool:
    """Whether that is the next to come, or came already."""
    with arrival._changed:  # while a list is being sorted, it looks empty
        return wanted not in arrival._left or arrival._left[0] == wanted


def test_what_is_waited_for_comes_next(llama):
    order, going = [], threading.Event()

    def note(*at):
        order.append(at)
        going.wait(20)

    workspace, segments = coming(llama, note)
    arrival = Arrival(workspace, segments[:1])
    waiting = threading.Thread(target=arrival.wait, args=(2, ("k",)))
    waiting.start()
    while not first(arrival, (2, "k")):
        time.sleep(0.001)
    going.set()
    waiting.join(20)
    arrival.wait(2, ("k", "v"))
    arrival.close()
    assert (2, "k") in order[:2]  # at once, or behind what was being read
    late = Arrival(workspace, segments, seconds=-1)
    with pytest.raises(Lost):
        late.wait(2, ("v",))
    late.close()


def test_query_sees_nothing_but_keys_of_few_layers(world):
    """Whatever else the segments hold, the choice is the same."""
    asked = asked_layers(world.spec)
    chosen = []
    for byte in (0x00, 0x3C):
        workspace = assembled(world, PROMPT)
        for group, held in enumerate(world.spec.groups):
            arrays = workspace.arrays(group, 9, 132)
            for place, layer in enumerate(held.layers):
                arrays["v"][place].view(np.uint8)[:] = byte
                if layer not in asked:
                    arrays["k"][place].view(np.uint8)[:] = byte
        chosen.append(selector("query").choose(PROMPT, workspace, 0.3))
    assert np.array_equal(chosen[0].positions, chosen[1].positions)
    assert chosen[0].token_layers == len(QUESTION) * (asked[-1] + 1)
    for layer in asked:
        group, place = world.spec.places[layer]
        keys = workspace.arrays(group, 9, 132)["k"][place]
        keys[:] = np.random.default_rng(layer).normal(size=keys.shape)
    other = selector("query").choose(PROMPT, workspace, 0.3)
    assert not np.array_equal(other.positions, chosen[0].positions)


def test_query_asks_layers_that_see_all():
    assert list(asked_layers(World("gemma3").spec)) == [1]
    assert list(asked_layers(World("llama").spec)) == [1, 2]


class TestOutOfACache:
    """Segments that an engine read, in a directory tier."""

    @pytest.fixture
    def engine(self, cache) -> Engine:
        engine = Engine(tiny("llama"), cache)
        for one in (ONE, TWO):
            engine.read([*PREFIX, *one])
        cache.flush()
        return engine

    def blended(self, engine, world, harm=lambda: None):
        cache = engine.cache
        workspace = world.workspace(len(TOKENS) + 8)
        put(workspace, [self.read(engine, PREFIX, 0, 0)])
        matches = [cache.lookup([*PREFIX, *one], engine.namespace) for one in (ONE, TWO)]
        harm()
        with cache.layers(matches[0]) as one, cache.layers(matches[1]) as two:
            segments = [
                Stored(start, 9, stop - start, layers)
                for (start, stop), layers in zip(PLACES, (one, two), strict=True)
            ]
            return blend(PROMPT, workspace, segments, selector("query"), FRACTION)

    def read(self, engine, tokens, read_at, start) -> Segment:
        """What is stored of a text behind its first tokens, all at once."""
        count, pool = engine.cache.context(tokens, engine.namespace)
        assert count == len(tokens)
        groups = range(len(pool.spec.groups))
        return Segment(start, read_at, [pool.arrays(group, read_at, count) for group in groups])

    def test_it_is_what_whole_loading_gives(self, engine, llama):
        workspace = llama.workspace(len(TOKENS) + 8)
        found = [
            self.read(engine, [*PREFIX, *one], len(PREFIX), start)
            for one, (start, _) in zip((ONE, TWO), PLACES, strict=True)
        ]
        put(workspace, [self.read(engine, PREFIX, 0, 0), *found])
        wanted = repair(PROMPT, workspace, selector("query"), FRACTION)
        done = self.blended(engine, llama)
        assert np.array_equal(done.log, wanted.log)
        assert np.array_equal(done.positions, wanted.positions)

    def test_damage_on_the_way_is_a_miss(self, engine, llama):
        def harm():
            for path in (engine.cache.tiers[0].path / "objects").glob("*/*"):
                raw = bytearray(path.read_bytes())
                raw[-1] ^= 1  # of the last layer's values: most of the repair is done by then
                path.write_bytes(raw)

        assert self.blended(engine, llama) is not None
        assert self.blended(engine, llama, harm) is None
        assert threads() == 0

"""A cache, whatever is done to it, against a plain dict: what it hits, and that every byte of it is right."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.kv import CHUNK, namespace, same_bits, values
from kvass.cache import KVCache, Match, Pool
from kvass.chunks import Tokens, as_tokens
from kvass.container import Array
from kvass.keys import Namespace
from kvass.testing.clock import ManualClock
from kvass.tiers.base import Tier
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.files import charge
from kvass.tiers.memory import MemoryTier

AMPLE = 64 << 20
LITTLE = 224 << 10
SCARCE = 640 << 10
"""Of which the index takes a third."""

HEADS = 12
SPACES = (
    namespace(HEADS),
    namespace(HEADS, tenant="t" * 64),
    msgspec.structs.replace(namespace(HEADS), adapter="a"),
)
"""Alike in all but whom they are for: each has values of its own, so that no state may stray."""

Ids = tuple[int, ...]

stems = st.sampled_from([(1, 2, 3), (7,) * 5, (0, 1), (16_777_214,)])


@st.composite
def texts(draw: st.DrawFn) -> Ids:
    """Up to four chunks of a few stems, which part at some token, often near a chunk's end."""
    stem = draw(stems)
    length = draw(
        st.one_of(
            st.integers(1, 4 * CHUNK), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK])
        )
    )
    ids = list((stem * (4 * CHUNK))[:length])
    if draw(st.booleans()):
        at = draw(st.integers(0, length - 1))
        ids[at:] = [draw(st.integers(8, 9))] * (length - at)
    return tuple(ids)


class Source:
    """The KV of a text in one namespace."""

    def __init__(self, tokens: Tokens, space: Namespace):
        self._tokens, self._space = tokens, space

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        return {name: right(self._space, group, name, self._tokens, start, stop) for name in ("k", "v")}


def right(space: Namespace, group: int, name: str, tokens: Tokens, start: int, stop: int) -> Array:
    made = values(space.spec.groups[group], name, tokens, start, stop)
    raw = made.view(np.uint8) ^ np.uint8(37 * SPACES.index(space))
    return raw.view(made.dtype)


class Model:
    """Chunks by the text before them: a dict that behaves as the cache says that it does."""

    def __init__(self) -> None:
        self.children: dict[Ids, set[Ids]] = {}
        """What is stored behind a text of whole chunks."""

    def store(self, ids: Ids) -> None:
        for start in range(0, len(ids), CHUNK):
            part, siblings = ids[start : start + CHUNK], self.children.setdefault(ids[:start], set())
            if len(part) < CHUNK and any(one[: len(part)] == part for one in siblings):
                return  # it lies within what is there
            siblings -= {one for one in siblings if len(one) < len(part) and part[: len(one)] == one}
            siblings.add(part)

    def hit(self, ids: Ids) -> int:
        start = 0
        while ids[start : start + CHUNK] in self.children.get(ids[:start], ()) and start < len(ids):
            part = ids[start : start + CHUNK]
            if len(part) < CHUNK:
                return len(ids)
            start += CHUNK
        rest = ids[start:]
        return start + max((agree(one, rest) for one in self.children.get(ids[:start], ())), default=0)

    def forget(self, ids: Ids, keep: int) -> None:
        start = max(0, min(keep, len(ids))) // CHUNK * CHUNK
        rest = ids[start : start + CHUNK]
        if not rest:
            return
        siblings = self.children.get(ids[:start], set())
        for one in [one for one in siblings if agree(one, rest) in (len(rest), len(one))]:
            siblings.discard(one)
            gone = ids[:start] + one
            for before in [before for before in self.children if before[: len(gone)] == gone]:
                del self.children[before]

    def objects(self) -> int:
        return sum(len(parts) for parts in self.children.values())


def agree(one: Ids, other: Ids) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class CacheMachine(RuleBasedStateMachine):
    """Everything that may be asked of a cache. Subclasses say which tiers, and whether they evict."""

    budget = AMPLE
    stored: Bundle[Ids] = Bundle("stored")
    known = st.one_of(stored, texts())

    def tiers(self) -> list[Tier]:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
        self.clock = ManualClock()
        self.cache = self.opened()
        self.models = [Model() for _ in SPACES]
        self.pins: dict[tuple[int, Ids], tuple[float, int]] = {}
        self.evicts = self.budget < AMPLE

    def opened(self) -> KVCache:
        return KVCache(self.tiers(), chunk_tokens=CHUNK, io_threads=1, clock=self.clock)

    def teardown(self) -> None:
        self.cache.close()
        shutil.rmtree(self.path)

    @initialize(target=stored, ids=texts(), space=st.integers(0, 1))
    def first(self, ids: Ids, space: int) -> Ids:
        return self.put(ids, space)

    @rule(target=stored, ids=texts(), space=st.integers(0, len(SPACES) - 1))
    def store(self, ids: Ids, space: int) -> Ids:
        return self.put(ids, space)

    @rule(target=stored, ids=stored, more=st.integers(1, CHUNK), space=st.integers(0, len(SPACES) - 1))
    def store_more(self, ids: Ids, more: int, space: int) -> Ids:
        """A sequence that grew: its last chunk is replaced."""
        return self.put((ids + ids[-1:] * more)[: 4 * CHUNK], space)

    def put(self, ids: Ids, space: int) -> Ids:
        ticket = self.cache.store(ids, SPACES[space], Source(as_tokens(ids), SPACES[space])).wait(30)
        assert ticket.copied
        self.cache.flush(30)
        before = self.models[space].hit(ids)
        self.models[space].store(ids)
        if not self.evicts:
            assert self.models[space].hit(ids) == len(ids)
            assert (ticket.objects > 0) == (before < len(ids))
        return ids

    @rule(ids=known, space=st.integers(0, len(SPACES) - 1), data=st.data())
    def load(self, ids: Ids, space: int, data: st.DataObject) -> None:
        limit = data.draw(st.one_of(st.none(), st.integers(0, len(ids) + 1)))
        match = self.cache.lookup(ids, SPACES[space], limit=limit)
        self.assert_hit(match, ids if limit is None else ids[:limit], space)
        self.assert_right(match, ids, space)

    def assert_hit(self, match: Match, ids: Ids, space: int) -> None:
        expected = self.models[space].hit(ids)
        assert match.length <= expected
        if not self.evicts:
            assert match.length == expected

    def assert_right(self, match: Match, ids: Ids, space: int) -> None:
        pool = Pool(SPACES[space].spec, match.length)
        pool.fill(0xA5)
        announced: list[int] = []
        result = self.cache.load(match, pool, ready=announced.append)
        assert result.tokens == match.length
        assert announced == ([match.length] if match.length else [])
        for number, group in enumerate(SPACES[space].spec.groups):
            start = group.first_needed(match.length)
            for name, array in pool.arrays(number, start, match.length).items():
                assert same_bits(
                    array, right(SPACES[space], number, name, as_tokens(ids), start, match.length)
                )

    @rule(ids=known, space=st.integers(0, len(SPACES) - 1), data=st.data())
    def forget(self, ids: Ids, space: int, data: st.DataObject) -> None:
        keep = data.draw(st.one_of(st.just(0), st.integers(0, len(ids) + 1)))
        before = self.models[space].objects()
        gone = self.cache.forget(ids, SPACES[space], keep=keep)
        self.models[space].forget(ids, keep)
        if not self.evicts:
            assert (gone > 0) == (self.models[space].objects() < before)
        assert self.cache.lookup(ids, SPACES[space]).length <= max(self.models[space].hit(ids), 0)
        self.pins = {pin: held for pin, held in self.pins.items() if pin[0] != space}

    @rule(ids=known, space=st.integers(0, len(SPACES) - 1), seconds=st.sampled_from([0, 10, 1e6]))
    def pin(self, ids: Ids, space: int, seconds: float) -> None:
        length = self.cache.lookup(ids, SPACES[space]).length
        assert self.cache.pin(ids, SPACES[space], seconds) == length
        if not seconds:  # others that share its chunks may have lost their pins with it
            self.pins = {}
        elif length:
            self.shorten(self.clock() + seconds)
            self.pins[space, ids] = (self.clock() + seconds, length)

    def shorten(self, until: float) -> None:
        """A new pin may end sooner than one that it replaces on a chunk that both share."""
        self.pins = {pin: (min(end, until), length) for pin, (end, length) in self.pins.items()}

    @rule(ids=known, space=st.integers(0, len(SPACES) - 1))
    def touch(self, ids: Ids, space: int) -> None:
        match = self.cache.lookup(ids, SPACES[space])
        for tier in self.cache.tiers:
            tier.touch([piece.address for piece in match.pieces()])

    @rule(seconds=st.sampled_from([1.0, 20.0, -5.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def keep_house(self) -> None:
        self.cache._keep_house()

    @rule(ids=known, space=st.integers(0, len(SPACES) - 1))
    def explain(self, ids: Ids, space: int) -> None:
        explanation = self.cache.explain(ids, SPACES[space])
        assert explanation.hit == self.cache.lookup(ids, SPACES[space]).length
        difference = explanation.difference
        if difference is not None:
            assert difference.position == explanation.hit
            assert difference.prompt[0] == ids[explanation.hit]
            assert difference.stored[0] != difference.prompt[0]

    @precondition(lambda self: not self.evicts)
    @invariant()
    def it_holds_what_it_should(self) -> None:
        expected = sum(model.objects() for model in self.models) * 2
        for usage in self.cache.stats().values():
            assert usage.objects == expected

    @invariant()
    def pinned_texts_stay(self) -> None:
        for (space, ids), (until, length) in self.pins.items():
            if until > self.clock():
                assert self.cache.lookup(ids, SPACES[space]).length >= length

    @invariant()
    def budgets_hold(self) -> None:
        for usage in self.cache.stats().values():
            assert usage.bytes <= usage.budget


class InMemory(CacheMachine):
    def tiers(self) -> list[Tier]:
        return [MemoryTier(self.budget, clock=self.clock, seed=1)]


class InDirectory(CacheMachine):
    def tiers(self) -> list[Tier]:
        return [DirectoryTier(self.path / "one", self.budget, name="host", clock=self.clock, seed=1)]

    @rule(anew=st.booleans())
    def reopen(self, anew: bool) -> None:
        """Closed and opened again, with its index or with one that is made from the files."""
        self.cache.close()
        if anew:
            shutil.rmtree(self.path / "one" / "index")
            self.pins = {}  # they live in the index alone
        self.cache = self.opened()
        for space, model in enumerate(self.models):
            for before, parts in model.children.items():
                for part in parts:
                    self.assert_hit(self.cache.lookup(before + part, SPACES[space]), before + part, space)

    @invariant()
    def files_are_what_is_charged(self) -> None:
        (tier,) = self.cache.tiers
        assert isinstance(tier, DirectoryTier)
        files = [*(self.path / "one" / "objects").glob("*/*")]
        usage = tier.usage()
        assert usage.objects == len(files)
        assert usage.bytes - tier._live().bytes_on_disk() == sum(charge(one.stat().st_size) for one in files)


class InTwoTiers(CacheMachine):
    def tiers(self) -> list[Tier]:
        return [
            MemoryTier(self.budget, clock=self.clock, seed=1),
            DirectoryTier(self.path / "two", AMPLE, name="disk", clock=self.clock, seed=1),
        ]


class InLittleMemory(InMemory):
    budget = LITTLE


class InALittleDirectory(InDirectory):
    budget = SCARCE


class InTwoTiersOneOfThemLittle(InTwoTiers):
    """What the first tier evicts is still in the second: nothing is lost."""

    budget = LITTLE

    @invariant()
    def the_lower_tier_has_all(self) -> None:
        for space, model in enumerate(self.models):
            for before, parts in model.children.items():
                for part in parts:
                    ids = before + part
                    assert self.cache.lookup(ids, SPACES[space]).length == model.hit(ids)


def case(machine: type[CacheMachine], examples: int, steps: int) -> Callable[..., None]:
    made = machine.TestCase
    made.settings = settings(
        deadline=None,
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )
    return made


TestInMemory = case(InMemory, 25, 30)
TestInDirectory = case(InDirectory, 20, 25)
TestInTwoTiers = case(InTwoTiers, 10, 25)
TestInLittleMemory = case(InLittleMemory, 25, 40)
TestInALittleDirectory = case(InALittleDirectory, 40, 40)
TestInTwoTiersOneOfThemLittle = case(InTwoTiersOneOfThemLittle, 10, 25)

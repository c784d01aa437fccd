"""What a tier of this machine owes besides: parents before children, a budget, pins and leases.

Longer than other files: one class is the suite that somebody else subclasses.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvass.chunks import MAX_TOKEN_ID, Tokens, as_tokens, common_prefix
from kvass.errors import TierError
from kvass.keys import address, next_key, split_address
from kvass.testing.clock import ManualClock
from kvass.testing.marking import MarkingConformance
from kvass.testing.strategies import related_tokens
from kvass.testing.tiers import (
    ROOT,
    Broken,
    Sequencer,
    absent,
    blob,
    content,
    pooled,
    read,
    text,
)
from kvass.tiers.base import Tier, WriteItem

_EXAMPLES = settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


class LocalTierConformance(MarkingConformance):
    """`controls_clock`: whether the tier takes the time from the clock it is given."""

    controls_clock = True

    def _fits(self, tier: Tier) -> int:
        """How many objects of `payload` bytes fit at least."""
        used = tier.usage()
        return (used.budget - used.bytes) // (2 * self.payload)

    # -- storing and reading --------------------------------------------------------------------------

    def test_the_same_object_twice_in_one_write_is_charged_once(self, tier: Tier) -> None:
        before = tier.usage().bytes
        for first in range(40):
            (item,) = self._chain(1, first)
            assert tier.write([item, item]) == [True, True]
            tier.delete([item.address])
        assert tier.usage().objects == 0
        assert tier.usage().bytes - before < 10 * self.payload

    def test_usage_counts_objects_and_bytes(self, tier: Tier) -> None:
        before = tier.usage()
        assert (before.budget, before.objects) == (self.budget, 0)
        items = self._chain(6, groups=2)
        tier.write(items)
        after = tier.usage()
        assert after.objects == 12
        assert after.bytes - before.bytes >= 12 * self.payload
        tier.delete([items[0].address])
        assert tier.usage().objects == 0
        assert tier.usage().bytes < after.bytes - 11 * self.payload

    def test_scan_lists_what_is_there(self, tier: Tier, clock: ManualClock) -> None:
        items = self._chain(7, groups=2)
        tier.write(items)
        tier.pin([items[0].address], clock() + 50)
        found = {entry.address: entry for entry in tier.scan()}
        assert found.keys() == {item.address for item in items}
        for item in items:
            entry = found[item.address]
            assert (entry.parent, entry.root) == (item.parent, item.root)
            assert (entry.position, entry.length) == (item.position, item.length)
            assert entry.size >= self.payload
        assert found[items[0].address].pinned_until == clock() + 50
        assert found[items[1].address].pinned_until == 0.0
        if self.controls_clock:
            assert found[items[0].address].created == clock()

    def test_scan_goes_on_while_the_tier_changes(self, tier: Tier) -> None:
        for first in range(8):
            tier.write(self._chain(2, first))
        listing = tier.scan()
        next(listing)
        tier.delete([self._chain(1, first)[0].address for first in range(8)])
        tier.write(self._chain(2, 99))
        assert sum(1 for _ in listing) <= 18

    # -- visibility -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("error", [OSError("no"), TierError("no")])
    def test_a_blob_that_fails_leaves_nothing(self, tier: Tier, error: Exception) -> None:
        self._fill_and_refill(tier, error, raises=False)

    def test_a_blob_that_raises_anything_else_leaves_nothing_and_raises(self, tier: Tier) -> None:
        self._fill_and_refill(tier, ValueError("no"), raises=True)

    def _fill_and_refill(self, tier: Tier, error: Exception, *, raises: bool) -> None:
        size = (tier.usage().budget - tier.usage().bytes) // 4
        for first in range(30):
            good, bad, behind = self._chain(3, first)
            items = [good, bad._replace(blob=Broken(size, error)), behind]
            for run in (map, pooled):
                if raises:
                    with pytest.raises(type(error)):
                        tier.write(items, run)
                else:
                    assert tier.write(items, run) == [True, False, False]
                assert tier.contains([bad.address, behind.address]) == [False, False]
                assert absent(tier, bad.address)
        tier.delete([self._chain(1, first)[0].address for first in range(30)])
        assert tier.usage().objects == 0
        assert all(tier.write(self._chain(2, 1000, size=size)))  # half of it is free: nothing was lost

    # -- parents and children -------------------------------------------------------------------------

    def test_an_orphan_is_refused(self, tier: Tier) -> None:
        items = self._chain(3)
        assert tier.write(items[1:]) == [False, False]
        assert tier.usage().objects == 0
        assert tier.write([items[0]]) == [True]
        assert tier.write([items[2]]) == [False]
        assert tier.write(items[1:]) == [True, True]

    def test_parents_come_before_their_children(self, tier: Tier) -> None:
        items = self._chain(3)
        assert tier.write([items[0], items[2], items[1]]) == [True, False, True]

    def test_delete_takes_all_parts_and_what_is_behind(self, tier: Tier) -> None:
        items = self._chain(4, groups=3)
        branch = Sequencer(groups=3, size=self.payload).items([text(0, 0, 1, 2), text(7, 7)])
        tier.write([*items, *branch])
        assert tier.usage().objects == 15
        assert tier.delete([items[3].address]) == 9  # chunk 1 and on, all parts; not the branch
        there = tier.contains([item.address for item in items])
        assert there == [True] * 3 + [False] * 9
        assert tier.contains([branch[-1].address]) == [True]
        assert tier.delete([items[1].address]) == 6  # by another part than the primary
        assert tier.usage().objects == 0

    def test_delete_takes_children_that_lack_their_primary_part(self, tier: Tier) -> None:
        items = self._chain(2, groups=2)
        assert tier.write(items[:2]) == [True, True]
        assert tier.write([items[3]]) == [True]
        assert tier.delete([items[0].address]) == 3
        assert tier.usage().objects == 0

    def test_a_longer_tail_replaces_the_shorter_one_that_it_extends(self, tier: Tier) -> None:
        start = text(1, 2, 3, 4)
        tails = [as_tokens(range(10, 10 + length)) for length in (1, 5, 147, 148, 149, 296, 297, 592, 593)]
        chains = [Sequencer(groups=2, size=1000).items([start, tail]) for tail in tails]
        for before, after in zip([None, *chains], chains, strict=False):
            assert all(tier.write(after))
            assert tier.usage().objects == 4
            if before is not None:
                assert tier.contains([before[2].address, before[3].address]) == [False, False]
        child = tier.nearest_child(chains[0][0].address, tails[-1])
        assert child is not None
        assert (child.address, child.common) == (chains[-1][2].address, 593)
        tier.delete([chains[0][0].address])
        assert tier.usage().objects == 0

    def test_a_tail_that_differs_replaces_nothing(self, tier: Tier) -> None:
        one = Sequencer(size=1000).items([text(1, 2, 3)])
        other = Sequencer(size=1000).items([text(1, 2, 4, 5)])
        assert all(tier.write([*one, *other]))
        assert tier.usage().objects == 2

    def test_a_sibling_with_children_is_not_replaced(self, tier: Tier) -> None:
        short = Sequencer(groups=2, size=1000).items([text(1, 2), text(3)])
        long = Sequencer(groups=2, size=1000).items([text(1, 2, 4)])
        tier.write([*short, *long])
        assert tier.contains([item.address for item in [*short, *long]]) == [True] * 6

    def test_a_replacement_inherits_the_pin(self, tier: Tier, clock: ManualClock) -> None:
        short, long = (Sequencer(size=self.payload).items([text(*range(n))])[0] for n in (3, 5))
        tier.write([short])
        tier.pin([short.address], clock() + 1e6)
        tier.write([long])
        self._crowd_out(tier, clock)
        assert tier.contains([long.address]) == [True]

    # -- nearest child --------------------------------------------------------------------------------

    def test_no_child_that_agrees_is_none(self, tier: Tier) -> None:
        tier.write(self._chain(2))
        assert tier.nearest_child(address(ROOT, 0), text(5, 5)) is None
        assert tier.nearest_child(address(ROOT, 0), text()) is None
        assert tier.nearest_child(address(bytes(32), 0), text(0, 0)) is None

    def test_the_highest_token_is_told_from_none(self, tier: Tier) -> None:
        items = Sequencer(size=1000).items([text(MAX_TOKEN_ID, 0, MAX_TOKEN_ID)])
        tier.write(items)
        for asked, common in [
            ([MAX_TOKEN_ID], 1),
            ([MAX_TOKEN_ID, 0], 2),
            ([MAX_TOKEN_ID, 1], 1),
            ([MAX_TOKEN_ID, 0, MAX_TOKEN_ID, MAX_TOKEN_ID, 0], 3),
            ([MAX_TOKEN_ID - 1, 0], 0),
            ([0], 0),
        ]:
            child = tier.nearest_child(address(ROOT, 0), as_tokens(asked))
            assert (0 if child is None else child.common) == common

    @_EXAMPLES
    @given(stored=related_tokens(), asked=related_tokens(count=4))
    def test_the_child_is_the_one_that_agrees_longest(
        self, tmp_path: Path, stored: list[Tokens], asked: list[Tokens]
    ) -> None:
        tier = self._scratch(tmp_path)
        try:
            for below in (None, text(9, 9)):
                start = [] if below is None else [below]
                chains = [Sequencer(size=100).items([*start, one]) for one in stored]
                for items in chains:
                    assert all(tier.write(items))
                tips = {items[-1].address: one for items, one in zip(chains, stored, strict=True)}
                present = [one for one, ok in zip(tips, tier.contains(list(tips)), strict=True) if ok]
                for one, tokens in tips.items():  # what is gone lies within something longer
                    assert one in present or any(
                        common_prefix(tips[other], tokens) == tokens.size < tips[other].size
                        for other in present
                    )
                parent = chains[0][-1].parent or address(ROOT, 0)
                for query in [*asked, *stored, *(one[: one.size // 2] for one in stored)]:
                    best = max(common_prefix(tips[one], query) for one in present)
                    child = tier.nearest_child(parent, query)
                    if child is None:
                        assert best == 0
                        continue
                    assert child.common == best
                    assert child.address in present
                    assert common_prefix(tips[child.address], query) == best
                    assert child.length == tips[child.address].size
        finally:
            tier.close()

    @_EXAMPLES
    @given(data=st.data())
    def test_any_sequence_of_writes_and_deletes_agrees_with_a_model(
        self, tmp_path: Path, data: st.DataObject
    ) -> None:
        tier = self._scratch(tmp_path)
        model: dict[bytes, WriteItem] = {}
        try:
            for _ in range(data.draw(st.integers(1, 25))):
                if model and data.draw(st.integers(0, 3)) == 0:
                    victim = data.draw(st.sampled_from(sorted(model)))
                    gone = _behind(model, victim)
                    assert tier.delete([victim]) == len(gone)
                    for one in gone:
                        del model[one]
                else:
                    self._grow(tier, model, data)
                assert tier.usage().objects == len(model)
                assert tier.contains(sorted(model)) == [True] * len(model)
            assert {entry.address for entry in tier.scan()} == model.keys()
            tops = [one for one, item in model.items() if item.parent is None]
            assert tier.delete(tops) == len(model)
        finally:
            tier.close()

    def _scratch(self, tmp_path: Path) -> Tier:
        return self.make_tier(tmp_path / str(time.monotonic_ns()), self.budget, ManualClock())

    def _grow(self, tier: Tier, model: dict[bytes, WriteItem], data: st.DataObject) -> None:
        """Store a chunk somewhere in the tree, and let the model follow."""
        above = data.draw(st.sampled_from([None, *sorted(model)]))
        length = data.draw(st.sampled_from([1, 2, 147, 148, 149, 296]))
        tokens = as_tokens([*[3] * (length - 1), data.draw(st.integers(3, 4))])
        key = next_key(split_address(above)[0] if above else ROOT, tokens.tobytes(), length)
        position = model[above].position + model[above].length if above else 0
        one = address(key, 0)
        item = WriteItem(one, above, ROOT, position, length, tokens, blob(one, 200))
        assert tier.write([item]) == [True]
        if one in model:
            return
        shorter = [
            old for old, held in model.items()
            if held.parent == above and held.length < length and len(_behind(model, old)) == 1
            and held.tokens is not None and common_prefix(held.tokens, tokens) == held.length
        ]  # fmt: skip
        model[one] = item
        assert not any(tier.contains(shorter))
        for old in shorter:
            del model[old]

    # -- budget and eviction --------------------------------------------------------------------------

    def _crowd_out(self, tier: Tier, clock: ManualClock) -> None:
        """Write three times the budget of other objects."""
        size = self.payload
        for first in range(100_000, 100_000 + 3 * self.budget // size):
            clock.advance(1.0)
            tier.write(self._chain(1, first, size=size))

    def test_the_budget_is_never_exceeded(self, tier: Tier, clock: ManualClock) -> None:
        for first in range(6 * self.budget // (10 * self.payload)):
            clock.advance(1.0)
            tier.write(self._chain(10, first), pooled if first % 2 else map)
            assert tier.usage().bytes <= self.budget
        assert tier.usage().bytes > self.budget // 2
        _assert_closed(tier)

    def test_the_budget_holds_at_every_moment(self, tier: Tier) -> None:
        stop = threading.Event()
        most = [0]

        def watch() -> None:
            while not stop.is_set():
                most[0] = max(most[0], tier.usage().bytes)

        def work(worker: int) -> None:
            for first in range(2 * self.budget // (10 * self.payload)):
                tier.write(self._chain(10, 1000 * worker + first))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(work, range(3)))
        finally:
            stop.set()
            watcher.join()
        assert self.budget // 2 < most[0] <= self.budget
        _assert_closed(tier)

    def test_what_is_larger_than_the_budget_is_refused(self, tier: Tier) -> None:
        kept = self._chain(2)
        tier.write(kept)
        assert tier.write(self._chain(1, 5, size=self.budget + 1)) == [False]
        assert tier.contains([item.address for item in kept]) == [True, True]

    def test_a_text_longer_than_the_budget_keeps_its_beginning(self, tier: Tier) -> None:
        items = self._chain(2 * self.budget // self.payload)
        there = tier.write(items)
        assert there[0]
        assert not there[-1]
        assert there == sorted(there, reverse=True)
        assert tier.contains([item.address for item in items]) == there

    def test_only_leaves_are_evicted(self, tier: Tier, clock: ManualClock) -> None:
        for first in range(3 * self.budget // (4 * self.payload)):
            clock.advance(1.0)
            tier.write(self._chain(4, first))
            if first % 10 == 0:
                _assert_closed(tier)

    def test_parts_of_one_chunk_go_together(self, tier: Tier, clock: ManualClock) -> None:
        for first in range(3 * self.budget // (6 * self.payload)):
            clock.advance(1.0)
            tier.write(self._chain(3, first, groups=2))
        keys: dict[bytes, int] = {}
        for entry in tier.scan():
            keys[entry.address[:32]] = keys.get(entry.address[:32], 0) + 1
        assert set(keys.values()) == {2}

    def test_the_least_recently_used_goes_first(self, tier: Tier, clock: ManualClock) -> None:
        count = self._fits(tier)
        items = [self._chain(1, first)[0] for first in range(count)]
        for item in items:
            clock.advance(1.0)
            assert tier.write([item]) == [True]
        used = items[: count // 4]
        clock.advance(1.0)
        tier.touch([item.address for item in used])
        tier.maintain()
        written = [item.address for item in items]
        for first in range(10_000, 10_000 + 4 * self.budget // self.payload):
            if tier.contains(written).count(False) >= count // 3:
                break
            clock.advance(1.0)
            (item,) = self._chain(1, first)
            assert tier.write([item]) == [True]
            written.append(item.address)
        there = tier.contains(written)
        unused = there[len(used) : count].count(False)
        assert unused >= 0.7 * there.count(False)  # a tier may decide by samples; at random it were half
        assert there[: len(used)].count(True) >= 0.7 * len(used)

    def test_pinned_objects_stay(self, tier: Tier, clock: ManualClock) -> None:
        items = self._chain(3, groups=2)
        tier.write(items)
        tip = [items[-1].address]
        assert tier.pin(tip, clock() + 1e6) == 1
        assert tier.pin([self._chain(1, 77)[0].address], clock() + 1e6) == 0
        self._crowd_out(tier, clock)
        assert tier.contains([item.address for item in items]) == [True] * 6
        assert tier.pin(tip, 0) == 1
        self._crowd_out(tier, clock)
        assert not any(tier.contains([item.address for item in items]))

    def test_a_pin_ends_with_its_time(self, tier: Tier, clock: ManualClock) -> None:
        if not self.controls_clock:
            pytest.skip("the tier has a clock of its own")
        (item,) = self._chain(1)
        tier.write([item])
        tier.pin([item.address], clock() + 1e6)
        clock.advance(2e6)
        self._crowd_out(tier, clock)
        assert tier.contains([item.address]) == [False]

    def test_one_evictable_object_among_many_pinned_ones_is_found(
        self, tier: Tier, clock: ManualClock
    ) -> None:
        for first in range(2 * self.budget // self.payload):
            assert tier.write(self._chain(1, first)) == [True]
        there = [entry.address for entry in tier.scan()]
        for number in range(5):
            free = there[number * 7 % len(there)]
            tier.pin(there, clock() + 1e6)
            tier.pin([free], 0)
            (item,) = self._chain(1, 50_000 + number)
            assert tier.write([item]) == [True]
            assert tier.contains([free]) == [False]
            there = [entry.address for entry in tier.scan()]

    def test_when_nothing_may_go_nothing_does(self, tier: Tier, clock: ManualClock) -> None:
        items = self._chain(2 * self.budget // self.payload)
        held = [item.address for item, ok in zip(items, tier.write(items), strict=True) if ok]
        tier.pin(held, clock() + 1e6)
        assert tier.write(self._chain(3, 5)) == [False] * 3
        assert tier.contains(held) == [True] * len(held)

    def test_leased_objects_stay(self, tier: Tier, clock: ManualClock) -> None:
        items = self._chain(3)
        missing = self._chain(1, 77)[0].address
        tier.write(items)
        with tier.lease([items[-1].address, missing], 600.0) as lease:
            assert lease.addresses == (items[-1].address,)
            self._crowd_out(tier, clock)
            assert tier.contains([item.address for item in items]) == [True] * 3
            assert read(tier, items[-1].address) == content(items[-1].address, self.payload)
        lease.close()
        self._crowd_out(tier, clock)
        assert not any(tier.contains([item.address for item in items]))

    def test_two_leases_on_one_object_end_apart(self, tier: Tier, clock: ManualClock) -> None:
        (item,) = self._chain(1)
        tier.write([item])
        one, other = tier.lease([item.address], 600.0), tier.lease([item.address], 600.0)
        one.close()
        one.close()
        self._crowd_out(tier, clock)
        assert tier.contains([item.address]) == [True]
        other.close()
        self._crowd_out(tier, clock)
        assert tier.contains([item.address]) == [False]

    def test_a_lease_ends_with_its_time(self, tier: Tier, clock: ManualClock) -> None:
        (item,) = self._chain(1)
        tier.write([item])
        tier.lease([item.address], 0.05)
        time.sleep(0.1)
        tier.maintain()
        self._crowd_out(tier, clock)
        assert tier.contains([item.address]) == [False]

    def test_pins_and_leases_do_not_hold_against_delete(self, tier: Tier, clock: ManualClock) -> None:
        items = self._chain(2)
        tier.write(items)
        tier.pin([items[1].address], clock() + 1e6)
        with tier.lease([items[1].address], 600.0):
            assert tier.delete([items[0].address]) == 2
            assert tier.contains([item.address for item in items]) == [False, False]

    def test_a_clock_that_jumps_back_does_no_harm(self, tier: Tier, clock: ManualClock) -> None:
        tier.write(self._chain(4))
        clock.advance(-1e8)
        tier.touch([self._chain(1)[0].address])
        tier.maintain()
        self._crowd_out(tier, clock)
        assert tier.usage().bytes <= self.budget
        assert tier.usage().objects > 0
        _assert_closed(tier)

    # -- quarantine, life -----------------------------------------------------------------------------

    def test_a_quarantined_object_is_out_of_sight_with_what_is_behind(self, tier: Tier) -> None:
        items = self._chain(3, groups=2)
        tier.write(items)
        tier.quarantine(items[3].address)
        assert tier.contains([item.address for item in items]) == [True, True] + [False] * 4
        assert absent(tier, items[3].address)
        assert tier.nearest_child(items[0].address, text(0, 1, 1, 2)) is None
        assert all(tier.write(items))
        assert read(tier, items[3].address) == content(items[3].address, self.payload)
        tier.quarantine(self._chain(1, 77)[0].address)
        assert tier.usage().objects == 6

    def test_quarantine_takes_no_room_from_others(self, tier: Tier, clock: ManualClock) -> None:
        for first in range(3 * self.budget // self.payload):
            items = self._chain(1, first)
            assert tier.write(items) == [True]
            tier.quarantine(items[0].address)
            assert tier.usage().bytes <= self.budget
        assert tier.usage().objects == 0
        size = (tier.usage().budget - tier.usage().bytes) // 2
        assert tier.write(self._chain(1, 5, size=max(size, self.budget // 2))) == [True]


def _behind(model: dict[bytes, WriteItem], one: bytes) -> list[bytes]:
    found = [one]
    for above in found:
        found += [other for other, item in model.items() if item.parent == above]
    return found


def _assert_closed(tier: Tier) -> None:
    """Every object's parent is there, and every object can be read."""
    entries = {entry.address: entry for entry in tier.scan()}
    for one, entry in entries.items():
        assert entry.parent is None or entry.parent in entries
        assert np.isfinite(entry.accessed)
        if one[0] % 8 == 0:
            assert read(tier, one)

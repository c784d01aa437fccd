"""What a tier owes that finds chunks by fingerprints (`kvass.tiers.base.Marking`); others skip it."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvass.chunks import Tokens, as_tokens
from kvass.testing.clock import ManualClock
from kvass.testing.tiers import ROOT, Broken, Sequencer, TierConformance, Watched, content
from kvass.tiers.base import MOST_MARKS, Mark, Marking, Replacing, Tier, WriteItem
from kvass.tiers.memory import BytesBlob

_CHUNK = 100


def words(seed: int, size: int) -> Tokens:
    """Tokens that no other seed has."""
    return as_tokens(np.random.default_rng(seed).integers(0, 50_000, size))


def chunked(tokens: Tokens, root: bytes = ROOT) -> list[WriteItem]:
    """A text's items, of `_CHUNK` tokens each and the rest."""
    cuts = [tokens[at : at + _CHUNK] for at in range(0, tokens.size, _CHUNK)]
    return Sequencer(root, size=1000).items(cuts)


def marks_of(items: Sequence[WriteItem]) -> list[Mark]:
    """All that must lead to these objects."""
    return [
        Mark(value, item.address, place)
        for item in items
        if item.marks is not None
        for value, place in zip(item.marks.values.tolist(), item.marks.places.tolist(), strict=True)
    ]


def values_of(items: Sequence[WriteItem]) -> list[int]:
    """Their fingerprints, each once."""
    return list(dict.fromkeys(mark.value for mark in marks_of(items)))


def led_to(tier: Tier, items: Sequence[WriteItem], root: bytes = ROOT) -> set[Mark]:
    """Where the fingerprints of these items lead."""
    if not isinstance(tier, Marking):
        pytest.skip("the tier finds nothing by fingerprints")
    found = tier.seen(root, values_of(items))
    assert len(found) == len(set(found)), "the same place twice"
    return set(found)


class MarkingConformance(TierConformance):
    """What leads to an object comes with it, and goes with it."""

    def test_fingerprints_lead_to_what_was_written(self, tier: Tier) -> None:
        items = chunked(words(1, 450))
        assert any(mark.place < 0 for mark in marks_of(items))
        assert led_to(tier, items) == set()
        assert all(tier.write(items))
        assert led_to(tier, items) == set(marks_of(items))
        tier.write(items)
        assert led_to(tier, items) == set(marks_of(items))
        assert led_to(tier, chunked(words(2, 450))) == set()
        assert led_to(tier, []) == set()

    def test_fingerprints_of_one_root_lead_to_nothing_of_another(self, tier: Tier) -> None:
        alike = ROOT[:8] + bytes(24)
        for root in (alike, bytes(32)):
            assert all(tier.write(chunked(words(1, 450), root)))
        assert led_to(tier, chunked(words(1, 450))) == set()
        items = chunked(words(1, 450), alike)
        assert led_to(tier, items, alike) == set(marks_of(items))

    def test_what_is_deleted_or_quarantined_is_led_to_no_more(self, tier: Tier) -> None:
        items = chunked(words(1, 450))
        tier.write(items)
        tier.delete([items[3].address])
        assert led_to(tier, items) == set(marks_of(items[:3]))
        tier.quarantine(items[1].address)
        assert led_to(tier, items) == set(marks_of(items[:1]))
        assert all(tier.write(items))
        assert led_to(tier, items) == set(marks_of(items))

    def test_what_is_evicted_is_led_to_no_more(self, tier: Tier, clock: ManualClock) -> None:
        items = chunked(words(1, 250))
        tier.write(items)
        for first in range(3 * self.budget // self.payload):
            clock.advance(1.0)
            tier.write(self._chain(1, first))
        assert not any(tier.contains([item.address for item in items]))
        assert led_to(tier, items) == set()

    def test_what_is_superseded_is_led_to_no_more(self, tier: Tier) -> None:
        short, long = chunked(words(1, 270)), chunked(words(1, 290))
        tier.write(short)
        tier.write(long)
        assert led_to(tier, [*short, *long]) == set(marks_of(long))

    def test_of_what_many_have_the_latest_are_kept(self, tier: Tier) -> None:
        common = words(1, 80)
        all_items = [chunked(as_tokens([number, *common])) for number in range(MOST_MARKS + 3)]
        for items in all_items:
            assert all(tier.write(items))
        latest = [item for items in all_items[-MOST_MARKS:] for item in items]
        shared = set(values_of(all_items[0])) & set(values_of(all_items[-1]))
        assert shared
        found = {mark for mark in led_to(tier, latest) if mark.value in shared}
        assert found == {mark for mark in marks_of(latest) if mark.value in shared}
        for items in all_items:
            tier.delete([items[0].address])
        assert led_to(tier, [item for items in all_items for item in items]) == set()

    def test_what_is_replaced_is_still_led_to(self, tier: Tier) -> None:
        items = chunked(words(1, 250))
        tier.write(items)
        if isinstance(tier, Replacing):
            assert tier.replace(items[1]._replace(marks=None, blob=BytesBlob(b"other")))
        assert led_to(tier, items) == set(marks_of(items))

    def test_nothing_leads_to_what_is_not_there(self, tier: Tier) -> None:
        first, second, third = chunked(words(1, 300))
        seen: list[set[Mark]] = []
        watched = Watched(content(second.address, 1000), lambda: seen.append(led_to(tier, [second])))
        tier.write([first])
        assert tier.write([second._replace(blob=Broken(1000, OSError("no"))), third]) == [False, False]
        assert led_to(tier, [second, third]) <= set(marks_of([first]))
        assert tier.write([second._replace(blob=watched)]) == [True]
        assert seen
        assert set.union(*seen) <= set(marks_of([first]))
        assert led_to(tier, [first, second]) == set(marks_of([first, second]))

    def test_a_mark_that_is_none_of_its_text_does_no_harm(self, tier: Tier) -> None:
        (item,) = chunked(words(1, 100))
        assert item.marks is not None
        odd = item.marks._replace(places=np.array([-(1 << 31), (1 << 31) - 1, *item.marks.places[2:]]))
        assert tier.write([item._replace(marks=odd)]) == [True]
        assert led_to(tier, [item]) == set(marks_of([item._replace(marks=odd)]))
        tier.delete([item.address])
        assert led_to(tier, [item]) == set()

    @settings(
        deadline=None,
        max_examples=15,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(data=st.data())
    def test_rows_agree_with_a_model(self, tmp_path: Path, data: st.DataObject) -> None:
        """Texts of a few passages, written and deleted in any order."""
        tier = self.make_tier(tmp_path / str(time.monotonic_ns()), self.budget, ManualClock())
        rows: dict[int, list[Mark]] = {}
        held: dict[bytes, WriteItem] = {}

        def follow(item: WriteItem | None) -> None:
            """What went first, then what came."""
            there = dict(zip(held, tier.contains(list(held)), strict=True))
            for one in [one for one, ok in there.items() if not ok]:
                for mark in marks_of([held.pop(one)]):
                    rows[mark.value] = [other for other in rows[mark.value] if other.address != one]
            for mark in marks_of([item] if item else []):
                rows[mark.value] = [*rows.get(mark.value, []), mark][-MOST_MARKS:]
            if item:
                held[item.address] = item

        try:
            for _ in range(data.draw(st.integers(1, 12))):
                if held and data.draw(st.integers(0, 3)) == 0:
                    tier.delete([data.draw(st.sampled_from(sorted(held)))])
                    follow(None)
                else:
                    parts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
                    for item in chunked(np.concatenate([words(seed, 70) for seed in parts])):
                        new = item.address not in held
                        assert tier.write([item]) == [True]
                        follow(item if new else None)
                found = led_to(tier, list(held.values()))
                assert found == {mark for value in values_of(list(held.values())) for mark in rows[value]}
        finally:
            tier.close()

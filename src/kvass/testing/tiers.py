"""What every tier owes the cache: subclass `TierConformance` and supply `make_tier`."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvass.chunks import Tokens, as_tokens
from kvass.container import Blob, Buffer
from kvass.errors import TierUnavailableError
from kvass.fingerprints import fingerprints_of_parts
from kvass.keys import address, next_key
from kvass.testing.clock import ManualClock
from kvass.tiers.base import Pruning, Tier, WriteItem
from kvass.tiers.memory import BytesBlob

ROOT = bytes(range(32))
"""A root to store under: any 32 bytes."""


class Broken:
    """A blob that raises half way."""

    def __init__(self, size: int, error: Exception):
        self.size = size
        self._error = error

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        yield 0, [memoryview(bytes(self.size // 2))]
        raise self._error


class Watched:
    """A blob that looks at the tier while it is being written."""

    def __init__(self, data: bytes, look: Callable[[], None]):
        self.size = len(data)
        self._data = data
        self._look = look

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        half = self.size // 2
        yield half, [memoryview(self._data)[half:]]
        self._look()
        yield 0, [memoryview(self._data)[:half]]
        self._look()


class Sequencer(NamedTuple):
    """Items for a text cut into chunks, without a cache."""

    root: bytes = ROOT
    groups: int = 1
    size: int = 8192

    def items(self, cuts: Sequence[Tokens]) -> list[WriteItem]:
        """One chunk behind the other, all groups of each."""
        found: list[WriteItem] = []
        keys = [self.root]
        position = 0
        starts = np.cumsum([0, *(part.size for part in cuts[:-1])]).tolist() if cuts else []
        marks = fingerprints_of_parts(np.concatenate([text(), *cuts]), starts)
        for number, part in enumerate(cuts):
            keys.append(next_key(keys[-1], part.tobytes(), part.size))
            for group in range(self.groups):
                parent = address(keys[-2], group) if position else None
                found.append(
                    WriteItem(
                        address(keys[-1], group), parent, self.root, position, part.size,
                        part if group == 0 else None, blob(address(keys[-1], group), self.size),
                        None if group else marks[number],
                    )
                )  # fmt: skip
            position += part.size
        return found


def content(one: bytes, size: int) -> bytes:
    """Bytes that belong to one address only."""
    return random.Random(one).randbytes(size)


def blob(one: bytes, size: int) -> Blob:
    """An object's blob with the bytes that belong to its address."""
    return BytesBlob(content(one, size))


def read(tier: Tier, one: bytes) -> bytes:
    """All bytes of an object. Raises KeyError."""
    with tier.open(one) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, [memoryview(data)])
    return bytes(data)


def pooled(function: Callable[[WriteItem], bool], items: Iterable[WriteItem]) -> Iterator[bool]:
    """A `Run` over four threads, as a cache's."""
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(function, item) for item in items]
        wait(futures)
        yield from [future.result() for future in futures]


def text(*ids: int) -> Tokens:
    """Token ids as a tier takes them."""
    return as_tokens(ids)


def absent(tier: Tier, one: bytes) -> bool:
    """Whether reading the object is a KeyError."""
    try:
        read(tier, one)
    except KeyError:
        return True
    return False


class TierConformance:
    """What every tier owes the cache, on this machine or another.

    `budget` bytes hold at least eight objects of `payload` bytes and whatever the tier itself takes.
    """

    budget = 8 << 20
    payload = 64 << 10

    def make_tier(self, path: Path, budget: int, clock: ManualClock) -> Tier:
        """The tier under test, empty, in `path` if it needs a place."""
        raise NotImplementedError("supply make_tier")

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(time.time())  # for tiers that have a clock of their own

    @pytest.fixture
    def tier(self, tmp_path: Path, clock: ManualClock) -> Iterator[Tier]:
        made = self.make_tier(tmp_path / "tier", self.budget, clock)
        yield made.within(ROOT)
        made.close()

    def _chain(self, count: int, first: int = 0, groups: int = 1, size: int | None = None) -> list[WriteItem]:
        """A text of `count` chunks of four tokens that no other `first` shares."""
        return Sequencer(groups=groups, size=size or self.payload).items(
            [text(first, number, 1, 2) for number in range(count)]
        )

    def test_what_was_written_is_read(self, tier: Tier) -> None:
        items = self._chain(5, groups=2)
        assert tier.write(items) == [True] * 10
        assert tier.contains([item.address for item in items]) == [True] * 10
        for item in items:
            assert read(tier, item.address) == content(item.address, self.payload)

    def test_any_range_is_read_into_any_buffers(self, tier: Tier) -> None:
        (item,) = self._chain(1)
        tier.write([item])
        whole = content(item.address, self.payload)
        with tier.open(item.address) as reader:
            assert reader.size == self.payload
            parts = [bytearray(1), bytearray(4097), bytearray(333)]
            reader.read_into(1000, [memoryview(part) for part in parts])
            assert b"".join(parts) == whole[1000 : 1000 + 1 + 4097 + 333]
            many = [bytearray(2) for _ in range(3000)]
            reader.read_into(0, [memoryview(part) for part in many])
            assert b"".join(many) == whole[:6000]

    def test_reading_past_the_end_is_an_error(self, tier: Tier) -> None:
        from kvass.errors import CorruptObjectError

        (item,) = self._chain(1)
        tier.write([item])
        with tier.open(item.address) as reader, pytest.raises(CorruptObjectError):
            reader.read_into(self.payload - 4, [memoryview(bytearray(8))])

    def test_an_absent_object_is_a_key_error(self, tier: Tier) -> None:
        (item,) = self._chain(1)
        assert tier.contains([item.address]) == [False]
        with pytest.raises(KeyError):
            read(tier, item.address)

    def test_nothing_asked_for_is_nothing_done(self, tier: Tier) -> None:
        assert tier.contains([]) == []
        assert tier.write([]) == []
        assert tier.delete([]) == 0
        assert tier.pin([], 1e12) == 0
        tier.touch([])
        with tier.lease([], 1.0) as lease:
            assert lease.addresses == ()
        assert list(tier.scan()) == []

    def test_a_second_write_changes_nothing(self, tier: Tier) -> None:
        items = self._chain(3)
        tier.write(items)
        used = tier.usage()
        again = [item._replace(blob=BytesBlob(bytes(self.payload))) for item in items]
        assert tier.write(again) == [True] * 3
        assert read(tier, items[0].address) == content(items[0].address, self.payload)
        assert tier.usage().objects == used.objects

    def test_it_writes_with_the_callers_threads(self, tier: Tier) -> None:
        items = self._chain(20, groups=2)
        assert tier.write(items, pooled) == [True] * 40
        for item in items:
            assert read(tier, item.address) == content(item.address, self.payload)

    def test_an_object_is_visible_only_when_it_is_whole(self, tier: Tier) -> None:
        (item,) = self._chain(1)
        seen: list[bool] = []

        def look() -> None:
            seen.append(tier.contains([item.address])[0])
            seen.append(tier.nearest_child(address(ROOT, 0), text(0, 0, 1, 2)) is not None)
            seen.append(any(entry.address == item.address for entry in tier.scan()))
            seen.append(not absent(tier, item.address))

        data = content(item.address, self.payload)
        assert tier.write([item._replace(blob=Watched(data, look))]) == [True]
        assert seen == [False] * 8
        assert read(tier, item.address) == data

    def test_a_blob_of_another_size_than_it_said_is_not_stored(self, tier: Tier) -> None:
        for wrong in (-1, 1):
            (item,) = self._chain(1)
            lying = BytesBlob(bytes(self.payload))
            lying.size += wrong
            assert tier.write([item._replace(blob=lying)]) == [False]
            assert tier.contains([item.address]) == [False]

    def test_readers_keep_what_is_unlinked(self, tier: Tier) -> None:
        (item,) = self._chain(1)
        tier.write([item])
        with tier.open(item.address) as reader:
            tier.delete([item.address])
            assert tier.contains([item.address]) == [False]
            data = bytearray(self.payload)
            reader.read_into(0, [memoryview(data)])
        assert bytes(data) == content(item.address, self.payload)
        assert absent(tier, item.address)

    def test_writers_of_the_same_objects_do_not_disturb_each_other(self, tier: Tier) -> None:
        items = self._chain(6)
        barrier = threading.Barrier(6)

        def work(_: int) -> None:
            barrier.wait()
            for _ in range(10):
                tier.write(items)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert tier.write(items) == [True] * 6
        for item in items:
            assert read(tier, item.address) == content(item.address, self.payload)
        if not tier.remote:  # the server of a remote one may hold other things too
            assert tier.usage().objects == 6
            before = tier.usage().bytes
            tier.delete([items[0].address])
            assert before - tier.usage().bytes > 5 * self.payload

    def test_only_leaves_that_are_not_pinned_go_where_leaves_are_meant(self, tier: Tier) -> None:
        if not isinstance(tier, Pruning):
            assert tier.remote  # keeps no tree
            return
        items = self._chain(3)
        assert tier.write(items) == [True] * 3
        first, second, third = (item.address for item in items)
        assert tier.delete_leaves([first, second]) == 0
        tier.pin([third], 1e12)
        assert tier.delete_leaves([third]) == 0
        assert tier.contains([first, second, third]) == [True] * 3
        tier.pin([third], 0.0)
        assert tier.delete_leaves([third]) == 1
        assert tier.delete_leaves([third]) == 0
        assert tier.contains([first, second, third]) == [True, True, False]

    def test_delete_of_what_is_not_there_is_nothing(self, tier: Tier) -> None:
        assert tier.delete([self._chain(1)[0].address]) == 0

    def test_unknown_objects_are_touched_and_pinned_without_harm(
        self, tier: Tier, clock: ManualClock
    ) -> None:
        one = self._chain(1)[0].address
        tier.touch([one])
        tier.maintain()
        assert tier.pin([one], clock() + 5) == 0
        assert tier.usage().objects == 0

    def test_a_closed_tier_answers_nothing(self, tmp_path: Path, clock: ManualClock) -> None:
        tier = self.make_tier(tmp_path / "closed", self.budget, clock).within(ROOT)
        (item,) = self._chain(1)
        tier.write([item])
        tier.close()
        tier.close()
        calls: list[Callable[[], Any]] = [
            lambda: tier.contains([item.address]),
            lambda: tier.nearest_child(address(ROOT, 0), text(0)),
            lambda: read(tier, item.address),
            lambda: tier.write([item]),
            lambda: tier.delete([item.address]),
            lambda: tier.quarantine(item.address),
            lambda: tier.touch([item.address]),
            lambda: tier.pin([item.address], 1.0),
            lambda: tier.lease([item.address], 1.0),
            tier.scan,
            tier.usage,
            tier.maintain,
        ]
        for call in calls:
            with pytest.raises(TierUnavailableError):
                call()

    def test_closing_waits_for_nobody_for_long(self, tmp_path: Path, clock: ManualClock) -> None:
        tier = self.make_tier(tmp_path / "busy", self.budget, clock).within(ROOT)
        barrier = threading.Barrier(4)

        def work(worker: int) -> None:
            barrier.wait()
            for first in range(10_000):
                try:
                    tier.write(self._chain(3, 100_000 * worker + first))
                    tier.contains([self._chain(1)[0].address])
                    list(tier.scan())
                except TierUnavailableError:
                    return

        with ThreadPoolExecutor(3) as pool:
            done = [pool.submit(work, worker) for worker in range(3)]
            barrier.wait()
            time.sleep(0.1)
            began = time.monotonic()
            tier.close()
            assert time.monotonic() - began < 9.0
            for future in done:
                future.result(30)

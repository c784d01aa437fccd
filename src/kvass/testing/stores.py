"""The conformance suite of stores: subclass `StoreConformance` and override its `make_store` fixture."""

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvass.container import Buffer
from kvass.errors import CorruptObjectError, TierUnavailableError
from kvass.testing.tiers import content
from kvass.tiers.store import Held, Store

MakeStore = Callable[[], Store]
"""Opens one more client of the server under test."""

LIMIT = 64 << 20
"""More bytes than any object of the suite has."""


def pieces(data: bytes, size: int) -> list[Buffer]:
    """The same bytes in parts of `size`."""
    view = memoryview(data)
    return [view[start : start + size] for start in range(0, len(view), size)]


def put(store: Store, name: str, data: bytes) -> bool:
    """Write an object in one part."""
    return store.put(name, [memoryview(data)])


def get(store: Store, name: str, limit: int = LIMIT) -> bytes:
    """All bytes of an object, given back to the store at once. Raises what `Store.get` does."""
    fetched = store.get(name, limit)
    data = b"".join(fetched.parts)
    fetched.release()
    return data


class StoreConformance:
    """What a store owes `RemoteTier`.

    The server may hold objects of others, and keeps those of one test for the next: names are new each time.
    """

    payload = 64 << 10
    """Bytes of an ordinary object."""
    rounds = 8
    """How often a race is run."""
    lists = True
    """Whether the server says what it holds; where it does not, listing yields nothing."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Stores over one server, each with connections of its own."""
        raise NotImplementedError("override the make_store fixture")

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Iterator[Store]:
        made = make_store()
        yield made
        made.close()

    @pytest.fixture
    def prefix(self) -> str:
        """A folder of names that no other test uses."""
        return f"test/{uuid.uuid4().hex}/"

    # -- one object -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [1, 4095, 4096, 64 << 10, 6_000_001, 9 << 20])
    def test_what_was_put_is_read(self, store: Store, prefix: str, size: int) -> None:
        data = content(prefix.encode(), size)
        assert put(store, prefix + "one", data) is True
        assert get(store, prefix + "one", size) == data
        assert store.head(prefix + "one", 0)[0] == size

    @pytest.mark.parametrize("size", [1000, 64 << 10, (4 << 20) + 1])
    def test_parts_are_joined_in_order(self, store: Store, prefix: str, size: int) -> None:
        data = content(prefix.encode(), 9 << 20)
        assert store.put(prefix + "one", pieces(data, size))
        assert get(store, prefix + "one") == data

    def test_parts_that_are_empty_change_nothing(self, store: Store, prefix: str) -> None:
        nothing = memoryview(b"")
        assert store.put(
            prefix + "one", [nothing, memoryview(b"ab"), nothing, nothing, memoryview(b"c"), nothing]
        )
        assert get(store, prefix + "one") == b"abc"
        assert store.head(prefix + "one", 10)[0] == 3

    def test_what_becomes_of_the_buffers_later_is_not_stored(self, store: Store, prefix: str) -> None:
        data = bytearray(content(prefix.encode(), self.payload))
        wanted = bytes(data)
        store.put(prefix + "one", [memoryview(data)])
        data[:] = bytes(len(data))
        assert get(store, prefix + "one") == wanted

    def test_what_was_read_stays_while_others_are_read(self, store: Store, prefix: str) -> None:
        wanted = [content(bytes([number]), self.payload) for number in range(6)]
        for number, data in enumerate(wanted):
            put(store, f"{prefix}{number}", data)
        fetched = [store.get(f"{prefix}{number}", LIMIT) for number in range(6)]
        store.delete([f"{prefix}{number}" for number in range(6)])
        assert [b"".join(one.parts) for one in fetched] == wanted
        for one in fetched:
            one.release()

    def test_an_object_is_written_once(self, store: Store, make_store: MakeStore, prefix: str) -> None:
        first = content(b"1", self.payload)
        assert put(store, prefix + "one", first) is True
        other = make_store()
        assert other.exists([prefix + "one"]) == [True]
        for data in (content(b"2", self.payload), b"shorter", content(b"3", 2 * self.payload)):
            assert put(store, prefix + "one", data) is False
            assert put(other, prefix + "one", data) is False
        assert get(store, prefix + "one") == get(other, prefix + "one") == first
        other.close()

    def test_an_object_above_the_limit_is_not_read(self, store: Store, prefix: str) -> None:
        put(store, prefix + "one", content(b"1", self.payload))
        for limit in (0, 1, self.payload - 1):
            with pytest.raises(CorruptObjectError):
                store.get(prefix + "one", limit)
        assert len(get(store, prefix + "one", self.payload)) == self.payload

    def test_a_head_is_the_size_and_the_first_bytes(self, store: Store, prefix: str) -> None:
        data = content(prefix.encode(), 9 << 20)
        store.put(prefix + "one", pieces(data, 1 << 20))
        for size in (0, 1, 8192, 5 << 20, len(data), len(data) + 1):
            found, first = store.head(prefix + "one", size)
            assert found == len(data)
            assert bytes(first) == data[:size]

    # -- what is there --------------------------------------------------------------------------------

    def test_what_is_absent_is_a_key_error(self, store: Store, prefix: str) -> None:
        with pytest.raises(KeyError):
            store.get(prefix + "none", LIMIT)
        with pytest.raises(KeyError):
            store.head(prefix + "none", 16)
        assert store.exists([prefix + "none"]) == [False]
        assert store.delete([prefix + "none"]) == 0

    def test_exists_answers_in_the_order_asked(self, store: Store, prefix: str) -> None:
        for number in range(0, 40, 3):
            put(store, f"{prefix}{number}", b"x")
        asked = [*range(40), 3, 1, 0]
        found = store.exists([f"{prefix}{number}" for number in asked])
        assert found == [number % 3 == 0 for number in asked]
        assert store.exists([]) == []

    def test_what_was_deleted_is_gone_and_can_be_put_anew(self, store: Store, prefix: str) -> None:
        for number in range(5):
            put(store, f"{prefix}{number}", content(bytes([number]), 5000))
        assert store.delete([f"{prefix}{number}" for number in (0, 2, 7)]) == 2
        assert store.exists([f"{prefix}{number}" for number in range(5)]) == [False, True, False, True, True]
        for gone in (0, 2):
            with pytest.raises(KeyError):
                store.get(f"{prefix}{gone}", LIMIT)
            with pytest.raises(KeyError):
                store.head(f"{prefix}{gone}", 16)
        assert get(store, f"{prefix}1") == content(b"\1", 5000)
        assert put(store, f"{prefix}0", b"anew") is True
        assert get(store, f"{prefix}0") == b"anew"
        assert store.delete([]) == 0

    def test_a_list_has_names_sizes_and_times(self, store: Store, prefix: str) -> None:
        began = time.time()
        sizes = {f"{prefix}{number:02}.0.0": 1 + 100_000 * (number % 3) for number in range(30)}
        for name, size in sizes.items():
            put(store, name, content(b"1", size))
        listed = list(store.list(prefix))
        if not self.lists:
            assert listed == []
            return
        assert {one.name: one.size for one in listed} == sizes
        assert len(listed) == len(sizes)
        for one in listed:
            assert one.created == 0 or began - 5 < one.created < time.time() + 5

    def test_a_list_has_only_what_begins_so(self, store: Store, prefix: str) -> None:
        names = [prefix + rest for rest in ("a/1", "a/2", "ab/1", "b/1", "a-1", "A/1")]
        for name in names:
            put(store, name, b"x")
        if not self.lists:
            return
        for begin in ("a/", "a", "ab/", "b/1", "c/", "A/", ""):
            assert sorted(one.name for one in store.list(prefix + begin)) == sorted(
                name for name in names if name.startswith(prefix + begin)
            )

    def test_a_list_has_what_stays_while_others_come_and_go(self, store: Store, prefix: str) -> None:
        kept = [f"{prefix}kept-{number}" for number in range(20)]
        gone = [f"{prefix}gone-{number}" for number in range(20)]
        for name in kept + gone:
            put(store, name, b"x")
        listing = store.list(prefix)
        seen = [one.name for one in itertools.islice(listing, 3)]
        store.delete(gone)
        for number in range(20):
            put(store, f"{prefix}new-{number}", b"x")
        seen += [one.name for one in listing]
        if not self.lists:
            assert seen == []
            return
        assert set(kept) <= set(seen)
        assert all(name.startswith(prefix) for name in seen)

    # -- the server, and the end ----------------------------------------------------------------------

    def test_what_is_held_is_known_or_minus_one(self, store: Store, prefix: str) -> None:
        put(store, prefix + "one", content(b"1", self.payload))
        held = store.held()
        assert isinstance(held, Held)
        assert held.bytes == -1 or held.bytes >= self.payload
        assert held.objects == -1 or held.objects >= 1
        assert held.budget >= -1

    def test_advice_says_what_was_found(self, store: Store) -> None:
        found = list(store.advice())
        assert found
        assert all(text and (fix is None or fix) for text, fix in found)

    def test_a_closed_store_is_unavailable(self, make_store: MakeStore, prefix: str) -> None:
        make_store().close()  # one that was never used, too
        store = make_store()
        put(store, prefix + "one", b"x")
        store.close()
        store.close()
        calls: Sequence[Callable[[], object]] = (
            lambda: store.exists([prefix + "one"]),
            lambda: store.get(prefix + "one", LIMIT),
            lambda: store.head(prefix + "one", 1),
            lambda: put(store, prefix + "two", b"x"),
            lambda: store.delete([prefix + "one"]),
            lambda: list(store.list(prefix)),
            store.held,
            lambda: list(store.advice()),
        )
        for call in calls:
            with pytest.raises(TierUnavailableError):
                call()

    # -- many at once ---------------------------------------------------------------------------------

    def test_of_two_that_put_one_name_at_once_one_wins_whole(
        self, store: Store, make_store: MakeStore, prefix: str
    ) -> None:
        other = make_store()
        for number in range(self.rounds):
            name = f"{prefix}{number}"
            bodies = [content(bytes([number, 1]), 5 << 20), content(bytes([number, 2]), (5 << 20) + number)]
            start = threading.Barrier(2)

            def write(one: Store, data: bytes, start: threading.Barrier = start, name: str = name) -> bool:
                start.wait(10)
                return one.put(name, pieces(data, 1 << 20))

            with ThreadPoolExecutor(2) as pool:
                won = list(pool.map(write, (store, other), bodies))
            assert sorted(won) == [False, True]
            assert get(store, name) == get(other, name) == bodies[won.index(True)]
        other.close()

    def test_a_reader_sees_an_object_whole_or_not_at_all(
        self, store: Store, make_store: MakeStore, prefix: str
    ) -> None:
        other = make_store()
        done = threading.Event()
        bodies = [content(bytes([number]), 5 << 20) for number in range(2)]

        def write() -> None:
            try:
                for number in range(self.rounds):
                    put(other, prefix + "one", bodies[number % 2])
                    other.delete([prefix + "one"])
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not done.is_set():
                with contextlib.suppress(KeyError):
                    assert get(store, prefix + "one") in bodies
            writing.result()
        other.close()

    def test_many_threads_read_and_write_at_once(self, store: Store, prefix: str) -> None:
        def use(worker: int) -> None:
            for number in range(10):
                name = f"{prefix}{worker}-{number}"
                data = content(name.encode(), self.payload + worker)
                assert put(store, name, data)
                assert put(store, f"{prefix}shared-{number}", content(bytes([number]), 3000)) in (True, False)
                assert get(store, name) == data
                assert store.exists([name, prefix + "none"]) == [True, False]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(use, range(8)))
        for number in range(10):
            assert get(store, f"{prefix}shared-{number}") == content(bytes([number]), 3000)
        assert len(list(store.list(prefix))) == (90 if self.lists else 0)

"""The Mooncake store on a real master: conformance, two processes, a master and a member that die."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.mooncake_server import MooncakeMaster, mooncake_master
from kvass.config import Settings
from kvass.errors import ConfigError, CorruptObjectError, TierUnavailableError
from kvass.testing.stores import LIMIT, MakeStore, StoreConformance, get, put
from kvass.testing.tiers import content
from kvass.tiers.mooncake import MooncakeStore
from kvass.tiers.store import Store

_PEER = {"mooncake_bytes": 128 << 20, "mooncake_metadata": "P2PHANDSHAKE"}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """One with a member that lends 512 MB."""
    with mooncake_master(tmp_path_factory.mktemp("mooncake")) as one, one.lender(512 << 20):
        yield one


@pytest.fixture(scope="module")
def used(master: MooncakeMaster) -> Iterator[MooncakeStore]:
    """A store in the other member's memory."""
    made = master.store()
    yield made
    made.close()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """One with no member."""
    with mooncake_master(tmp_path_factory.mktemp("mooncake")) as one:
        yield one


@pytest.fixture(scope="module")
def peer(peers: MooncakeMaster) -> Iterator[MooncakeStore]:
    made = peers.store(**_PEER)
    yield made
    made.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """One with no member, which the test may kill."""
    with mooncake_master(tmp_path) as one:
        yield one


def _name() -> str:
    return f"test/{os.urandom(8).hex()}"


class _WithoutLists(StoreConformance):
    """Mooncake lists nothing to its members. Leaving a store takes a second, so one serves all tests."""

    rounds = 2
    lists = False


class TestMooncake(_WithoutLists):
    @pytest.fixture
    def make_store(self, master: MooncakeMaster) -> MakeStore:
        return master.store

    @pytest.fixture
    def store(self, used: Store) -> Store:
        return used


class TestMooncakeInOwnMemory(_WithoutLists):
    """Each store lends some, and the members find each other without a metadata server."""

    @pytest.fixture
    def make_store(self, peers: MooncakeMaster) -> MakeStore:
        return lambda: peers.store(**_PEER)

    @pytest.fixture
    def store(self, peer: Store) -> Store:
        return peer


_OTHER = """
import sys
from kvass.config import Settings
from kvass.testing.stores import get, put
from kvass.testing.tiers import content
from kvass.tiers.mooncake import MooncakeStore
master, metadata, ours, theirs = sys.argv[1:]
store = MooncakeStore.open(
    Settings.load(mooncake_master=master, mooncake_metadata=metadata, mooncake_bytes=64 << 20)
)
assert get(store, ours) == content(b"ours", 20_000_001)
assert put(store, ours, b"theirs") is False
assert put(store, theirs, content(b"theirs", 20_000_001)) is True
store.close()
"""


def test_two_processes_read_what_the_other_put(master: MooncakeMaster, used: MooncakeStore) -> None:
    ours, theirs = _name(), _name()
    put(used, ours, content(b"ours", 20_000_001))
    arguments = [master.address, master.metadata, ours, theirs]
    subprocess.run([sys.executable, "-c", _OTHER, *arguments], check=True, timeout=60)
    assert get(used, ours) == content(b"ours", 20_000_001)
    with contextlib.suppress(KeyError):  # it lay in the memory of the one that has left, or here
        assert get(used, theirs) == content(b"theirs", 20_000_001)


def test_what_another_program_wrote_is_no_object(alone: MooncakeMaster) -> None:
    from mooncake.store import MooncakeDistributedStore

    other = MooncakeDistributedStore()
    assert other.setup("127.0.0.1", alone.metadata, 64 << 20, 1 << 20, "tcp", "", alone.address) == 0
    other.put("long", b"what others write" * 10)
    other.put("short", b"x")
    store = alone.store()
    with pytest.raises(CorruptObjectError, match="no object of kvass"):
        store.get("long", LIMIT)
    with pytest.raises(KeyError):
        store.get("short", LIMIT)
    assert put(store, "long", b"x") is False
    store.close()
    other.close()


def test_what_was_read_outlives_its_store(master: MooncakeMaster) -> None:
    store = master.store()
    data = content(b"outlives", 9 << 20)
    name = _name()
    put(store, name, data)
    fetched = [store.get(name, LIMIT) for _ in range(20)]  # of more blocks than are kept
    store.close()
    for one in fetched:
        assert b"".join(one.parts) == data
        one.release()
        one.release()


def test_blocks_are_used_again_only_once_they_are_released(master: MooncakeMaster) -> None:
    store = master.store()
    names = [_name() for _ in range(40)]
    for name in names:
        put(store, name, name.encode())
    held = store.get(names[0], LIMIT)
    forgotten = store.get(names[1], LIMIT).parts
    for name in names:
        assert get(store, name) == name.encode()
    assert [bytes(held.parts[0]), bytes(forgotten[0])] == [name.encode() for name in names[:2]]
    held.release()
    held.release()
    pair = [store.get(name, LIMIT) for name in names[2:4]]
    assert [bytes(one.parts[0]) for one in pair] == [name.encode() for name in names[2:4]]
    store.close()


def test_no_message_holds_the_metadata_servers_password(master: MooncakeMaster) -> None:
    for metadata in ("redis://:secret@127.0.0.1:1", "http://me:secret@127.0.0.1:1/", "http://me:secret@a:b/"):
        with pytest.raises((ConfigError, TierUnavailableError)) as raised:
            master.store(mooncake_metadata=metadata).exists(["one"])
        assert "secret" not in str(raised.value)


def test_a_forked_child_is_refused(used: MooncakeStore) -> None:
    name = _name()
    assert used.exists([name]) == [False]
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            for call in (
                lambda: used.exists([name]), lambda: used.get(name, LIMIT), lambda: used.head(name, 1),
                lambda: put(used, name, b"x"), lambda: used.delete([name]), lambda: list(used.list("")),
                used.held, lambda: list(used.advice()),
            ):  # fmt: skip
                with pytest.raises(TierUnavailableError, match="fork"):
                    call()
            used.close()
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert used.exists([name]) == [False]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mooncake_master": "10.0.0.5"}, "mooncake_master: '10.0.0.5' is no host:port"),
        ({"mooncake_master": "10.0.0.5:70000"}, "mooncake_master"),
        ({"mooncake_master": "a:1", "mooncake_bytes": 1 << 20}, "mooncake_bytes: 1048576 is less"),
        ({"mooncake_master": "a:1", "mooncake_host": ""}, "mooncake_host is empty"),
        ({"mooncake_master": "a:1", "mooncake_metadata": "etcd://a:1"}, "mooncake_metadata is neither"),
        ({"mooncake_master": "a:1", "mooncake_metadata": "http://a:b/"}, "mooncake_metadata is neither"),
        (
            {"mooncake_master": "a:1", "mooncake_protocol": "udp"},
            "mooncake_protocol: 'udp' is none of tcp, rdma",
        ),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MooncakeStore.open(Settings.load(**settings))


def test_without_the_extra_the_command_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvass\[mooncake\]'"):
        MooncakeStore.open(Settings.load(mooncake_master="127.0.0.1:1"))


def test_advice_names_a_host_that_others_cannot_reach() -> None:
    store = MooncakeStore.open(Settings.load(mooncake_master="192.0.2.1:1", remote_call_seconds=0.2))
    found = list(store.advice())
    assert any("mooncake_host" in (fix or "") for _, fix in found)
    assert found[-1][1]

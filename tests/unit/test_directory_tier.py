"""The directory tier from inside: opening, rebuilding, owners, quarantine, and what goes wrong with them."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import lmdb
import pytest

from harness.consistency import assert_consistent, opened, rows_of
from harness.kv import CHUNK, load, namespace, store, text
from harness.mounts import tmpfs
from kvass.cache import KVCache
from kvass.errors import CorruptObjectError, InputError, TierError, TierFullError, TierUnavailableError
from kvass.keys import address, address_text
from kvass.testing.tiers import Sequencer, blob
from kvass.testing.tiers import text as ids
from kvass.tiers import directory, environment, owners, rebuild, removing
from kvass.tiers import index as index_module
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.files import FileReader, discard, on_tmpfs, open_object, write_all
from kvass.tiers.index import Record
from kvass.tiers.owners import Owner, dead_owner

BUDGET = 8 << 20
SPACE = namespace()
TEXT = text(1, 0, 100)


def fill(path: Path, *families: int) -> None:
    """Some sequences in a tier, closed."""
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        for family in families or (1,):
            store(cache, text(family, 0, 100), SPACE)


def loaded(tier: DirectoryTier, tokens=TEXT) -> int:
    """How much of a text a tier gives, all of it right."""
    cache = KVCache([tier], chunk_tokens=CHUNK)
    try:
        return load(cache, tokens, SPACE)
    finally:
        cache._executor.close(5)


def chain(count: int, first: int = 0, size: int = 9000):
    return Sequencer(size=size).items([ids(first, number) for number in range(count)])


# -- files ----------------------------------------------------------------------------------------


def test_a_tmpfs_is_told_from_a_disk_whatever_its_name(tmp_path: Path, shm: Path) -> None:
    assert on_tmpfs(shm)
    assert on_tmpfs(shm / "not" / "there" / "yet")
    assert not on_tmpfs(Path("/proc"))
    assert not on_tmpfs(Path("/"))
    strange = tmp_path / "käse und\tkvass \\040"
    strange.mkdir()
    before = on_tmpfs(strange)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "kvass-test", strange], check=True)
    try:
        assert on_tmpfs(strange)
        link = tmp_path / "link"
        link.symlink_to(strange)
        assert on_tmpfs(link)
    finally:
        subprocess.run(["umount", strange], check=True)
    assert on_tmpfs(strange) is before


def test_nobody_can_tell_without_a_list_of_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert not on_tmpfs(Path("/dev/shm"))


@pytest.mark.alone
def test_only_regular_files_are_objects(tmp_path: Path) -> None:
    regular = tmp_path / "regular"
    regular.write_bytes(b"0123456789")
    with open_object(regular) as reader:
        assert reader.size == 10
        with pytest.raises(CorruptObjectError):
            reader.read_into(8, [memoryview(bytearray(4))])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(regular)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    listening.close()
    for name in ("folder", "fifo", "link", "dangling", "socket"):
        began = time.monotonic()
        with pytest.raises(CorruptObjectError), open_object(tmp_path / name):
            pass
        assert time.monotonic() - began < 0.5
    with pytest.raises(FileNotFoundError), open_object(tmp_path / "nothing"):
        pass
    with pytest.raises(TierError), open_object(tmp_path / ("x" * 300)):
        pass


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:7]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, [buffers[0][:5]], at))
    data = bytes(range(100))
    with (tmp_path / "file").open("w+b") as file:
        write_all(file.fileno(), [memoryview(data)[:33], memoryview(data)[33:]], 3)
        parts = [bytearray(1), bytearray(99)]
        FileReader(file.fileno()).read_into(3, [memoryview(part) for part in parts])
        assert b"".join(parts) == data
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(OSError, match="nothing was written"):
            write_all(file.fileno(), [memoryview(data)], 0)


def test_anything_can_be_discarded(tmp_path: Path) -> None:
    (tmp_path / "folder" / "within").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("folder", "file", "nothing"):
        discard(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


# -- opening and rebuilding -----------------------------------------------------------------------


def test_opening_waits_for_a_rebuild_but_not_for_ever(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "_SETUP_SECONDS", 0.2)
    fill(shm / "tier")
    with (shm / "tier" / "setup.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TierUnavailableError, match="being rebuilt"):
            DirectoryTier(shm / "tier", BUDGET, name="host")
    assert len(list((shm / "tier" / "owners").iterdir())) == 0
    with opened(shm / "tier", BUDGET) as tier:
        assert loaded(tier) == 100


def test_two_tiers_of_one_process_share_an_index(shm: Path) -> None:
    with opened(shm / "tier", BUDGET) as one, opened(shm / "tier", BUDGET) as other:
        assert one._index is other._index
        assert one.write(chain(2)) == [True, True]
        assert other.contains([item.address for item in chain(2)]) == [True, True]
        shutil.rmtree(shm / "tier" / "index")
        for _ in range(3):
            for tier in (one, other):
                with contextlib.suppress(TierUnavailableError):
                    tier.maintain()
        assert one._index is other._index
        assert one.usage().objects == 0  # those were no files that a rebuild takes


def test_a_rebuild_sets_aside_what_does_not_belong(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shm / "tier"
    fill(path, 1, 2)
    files = sorted((path / "objects").glob("*/*"))
    good = files[0].read_bytes()
    (path / "objects" / "zz").mkdir()
    (path / "objects" / "00").mkdir(exist_ok=True)
    strange = [
        path / "objects" / "zz" / files[0].name,
        path / "objects" / "00" / ("0" * 64 + "-0-0.safetensors"),
        path / "objects" / "00" / "nonsense.safetensors",
        path / "objects" / "00" / (os.fsdecode(b"\xff\xfe") + ".safetensors"),
        path / "objects" / "00" / ("n" * 240 + ".safetensors"),
    ]
    for file in strange:
        file.write_bytes(good)
    (path / "objects" / "00" / "folder.safetensors").mkdir()
    os.mkfifo(path / "objects" / "00" / "fifo.safetensors")
    (path / "objects" / "00" / "link.safetensors").symlink_to(files[0])
    shutil.rmtree(path / "index")
    with opened(path, BUDGET) as tier:
        assert tier.usage().objects == len(files)
        for family in (1, 2):
            assert loaded(tier, text(family, 0, 100)) == 100
    left = {file.name for file in (path / "objects").glob("*/*")}
    assert left == {file.name for file in files}
    assert (
        len(list((path / "quarantine").iterdir())) == len(strange) - 1
    )  # one has too long a name to be kept
    shutil.rmtree(path / "objects" / "zz")
    assert assert_consistent(path, BUDGET).objects == len(files)


def test_a_rebuild_that_was_broken_off_is_begun_anew(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shm / "tier"
    fill(path, 1, 2, 3)
    with opened(path, BUDGET) as tier:
        tier.quarantine(next(tier.scan()).address)
        before = tier.usage().objects
        used = rows_of(tier._live()).used
    shutil.rmtree(path / "index")
    monkeypatch.setattr(rebuild, "_ROWS", 4)
    real = index_module.Index.insert
    count = [0]

    def dying(*arguments: object):
        count[0] += 1
        if count[0] == 11:
            raise OSError(errno.EIO, "as if killed")
        return real(*arguments)

    monkeypatch.setattr(index_module.Index, "insert", dying)
    with pytest.raises(TierUnavailableError):
        DirectoryTier(path, BUDGET, name="host")
    monkeypatch.setattr(index_module.Index, "insert", real)
    with opened(path, BUDGET) as tier:
        assert tier.usage().objects == before
        assert rows_of(tier._live()).used == used
    assert_consistent(path, BUDGET)


def test_a_rebuild_keeps_a_short_chunk_that_has_children(shm: Path) -> None:
    """Two caches cut the same text: one's first chunk is a beginning of the other's, and has children."""
    path = shm / "tier"
    fill(path)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=3 * CHUNK) as cache:
        store(cache, TEXT, SPACE)
    with opened(path, BUDGET) as tier:
        before = {entry.address for entry in tier.scan()}
    shutil.rmtree(path / "index")
    with opened(path, BUDGET) as tier:
        assert {entry.address for entry in tier.scan()} == before
    assert_consistent(path, BUDGET)


def test_a_rebuild_drops_what_lost_its_parent(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        second = cache.lookup(TEXT, SPACE).pieces(unseen=True)[2]
        cache.tiers[0]._path(second.address).unlink()
    shutil.rmtree(path / "index")
    with opened(path, BUDGET) as tier:
        assert loaded(tier) <= CHUNK
    assert_consistent(path, BUDGET)


def test_an_index_that_goes_while_open_is_rebuilt_and_promises_are_kept(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        (tier,) = cache.tiers
        first = cache.lookup(TEXT, SPACE).pieces()[0].address
        owner = tier._owner.id
        with tier.lease([first], 600):
            shutil.rmtree(path / "index")
            assert load(cache, TEXT, SPACE) == 0
            cache._keep_house()
            assert load(cache, TEXT, SPACE) == 100
            assert tier._owner.id == owner
            assert list((path / "owners").glob("*/leases/*"))
        store(cache, text(2, 0, 100), SPACE)
    assert_consistent(path, BUDGET)


def test_a_tier_that_goes_while_open_is_made_anew(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        shutil.rmtree(path)
        assert load(cache, TEXT, SPACE) == 0
        cache._keep_house()
        store(cache, TEXT, SPACE)
        assert load(cache, TEXT, SPACE) == 100
    assert_consistent(path, BUDGET)


def test_a_tier_that_cannot_be_opened_again_waits_for_better_times(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        (path / "kvass.json").write_text(json.dumps({"format": 9}))
        shutil.rmtree(path / "index")
        for _ in range(3):
            cache._keep_house()
            assert load(cache, TEXT, SPACE) == 0
        with pytest.raises(TierUnavailableError, match="at present"):
            cache.tiers[0].usage()
        path.chmod(0o777)
        cache._keep_house()
        path.chmod(0o700)
        (path / "kvass.json").unlink()
        cache._keep_house()
        assert load(cache, TEXT, SPACE) == 100


def test_a_healthy_index_is_not_destroyed_because_of_us(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory, too many files: an error of this process, which the others must not pay for."""
    path = shm / "tier"
    fill(path)
    inode = (path / "index" / "data.mdb").stat().st_ino
    for error in (MemoryError("no"), lmdb.Error("mdb_env_open: Too many open files"), OSError(24, "no")):

        def failing(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(lmdb, "open", failing)
            with pytest.raises(TierUnavailableError):
                DirectoryTier(path, BUDGET, name="host")
    assert (path / "index" / "data.mdb").stat().st_ino == inode
    with opened(path, BUDGET) as tier:
        assert loaded(tier) == 100


@pytest.mark.parametrize("harm", ["garbage", "half", "empty lock", "no meta", "short"])
def test_a_damaged_index_is_rebuilt(shm: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    path = shm / "tier"
    fill(path, 1, 2)
    data = path / "index" / "data.mdb"
    raw = data.read_bytes()
    match harm:
        case "garbage":
            data.write_bytes(b"\x5a" * len(raw))
        case "half":
            data.write_bytes(raw[: len(raw) // 2])
        case "empty lock":
            (path / "index" / "lock.mdb").write_bytes(b"")
        case "no meta":
            data.write_bytes(raw[:4096] + bytes(4096) + raw[8192:])
        case "short":
            data.write_bytes(raw[:50])
    with opened(path, BUDGET) as tier:
        assert loaded(tier) == 100
    assert_consistent(path, BUDGET)


def test_an_index_cut_short_while_open_is_noticed(shm: Path) -> None:
    path = shm / "tier"
    fill(path, 1, 2)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        assert load(cache, TEXT, SPACE) == 100
        data = path / "index" / "data.mdb"
        os.truncate(data, data.stat().st_size // 2)
        assert load(cache, TEXT, SPACE) == 0
        cache._keep_house()
        assert load(cache, TEXT, SPACE) == 100
    assert_consistent(path, BUDGET)


def test_a_lock_file_that_goes_while_open_stops_the_writers(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with opened(path, BUDGET) as tier:
        (path / "index" / "lock.mdb").unlink()
        with pytest.raises(TierUnavailableError):
            tier.write(chain(1))
        tier.maintain()
        assert loaded(tier) == 100
        assert tier.write(chain(1)) == [True]


def test_errors_of_the_index_are_told_apart(shm: Path) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        index = tier._live()
        for raised, seen in [
            (lmdb.MapFullError("full"), TierFullError),
            (lmdb.DiskError("full"), TierFullError),
            (lmdb.ReadersFullError("many"), TierUnavailableError),
            (lmdb.Error("something"), TierUnavailableError),
        ]:
            with pytest.raises(seen), index.read():
                raise raised
        assert not index.broken
        with pytest.raises(environment.IndexDamagedError), index.read():
            raise lmdb.CorruptedError("a page")
        assert index.unsound()
        with pytest.raises(TierUnavailableError), index.read():
            pass
        tier.maintain()
        assert not tier._live().broken


def test_a_row_that_cannot_be_read_is_damage(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        (tier,) = cache.tiers
        index = tier._live()
        with index.write() as txn:
            txn.put(next(tier.scan()).address, b"short", db=index.objects)
        assert list(cache.entries()) == []
        cache._keep_house()
        assert len(list(cache.entries())) > 0
        assert load(cache, TEXT, SPACE) == 100
    assert_consistent(path, BUDGET)


def test_a_value_that_a_row_cannot_hold_is_the_callers_mistake(shm: Path) -> None:
    with pytest.raises(InputError):
        Record(1, 1, -1, 0, 0.0, 0.0, 0.0, b"", bytes(32)).pack()
    with opened(shm / "tier", BUDGET) as tier:
        with pytest.raises(InputError):
            tier.write([chain(1)[0]._replace(position=-1)])
        assert not tier._live().broken


# -- closing --------------------------------------------------------------------------------------


@pytest.mark.alone
def test_closing_leaves_a_tier_that_is_in_use(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_CLOSE_SECONDS", 0.2)
    tier = DirectoryTier(shm / "tier", BUDGET, name="host")
    entered, go_on = threading.Event(), threading.Event()

    def slow(function, items):
        entered.set()
        go_on.wait(30)
        return map(function, items)

    done: list[list[bool]] = []
    writer = threading.Thread(target=lambda: done.append(tier.write(chain(2), slow)))
    writer.start()
    entered.wait()
    began = time.monotonic()
    tier.close()
    assert time.monotonic() - began < 2
    go_on.set()
    writer.join()
    assert done == [[True, True]]  # what had begun was finished, and then the tier closed
    for _ in range(200):
        if not list((shm / "tier" / "owners").iterdir()):
            break
        time.sleep(0.01)
    with opened(shm / "tier", BUDGET) as again:
        assert again.usage().objects == 2


def test_closing_an_index_waits_for_readers(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_CLOSE_SECONDS", 0.1)
    tier = DirectoryTier(shm / "tier", BUDGET, name="host")
    index = tier._live()
    with index.read() as txn:
        tier.close()
        assert txn.get(b"ready", None, index.meta) is not None  # not taken from under it
    index.close()


def test_closing_works_where_no_thread_can_be_started(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the interpreter's end, from Python 3.12 on."""
    tier = DirectoryTier(shm / "tier", BUDGET, name="host")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        tier.close()
    assert list((shm / "tier" / "owners").iterdir()) == []


# -- owners ---------------------------------------------------------------------------------------


def test_what_a_dead_owner_began_is_undone(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    ghost = path / "owners" / ("ab" * 16)
    for name in ("tmp", "leases"):
        (ghost / name).mkdir(parents=True)
    (ghost / "lock").touch()
    with opened(path, BUDGET) as tier:
        first = tier._path(next(tier.scan()).address)
        os.link(first, ghost / "leases" / "a lease")
        (ghost / "tmp" / "half").write_bytes(b"half")
        (item,) = chain(1, 7)
        index = tier._live()
        with index.write() as txn:
            index.intend(txn, item.address, b"\xab" * 16, 12288)
        tier._path(item.address).parent.mkdir(exist_ok=True)
        tier._path(item.address).write_bytes(b"renamed, not committed")
        tier.maintain()
        assert not ghost.exists()
        assert first.stat().st_nlink == 1
        assert not tier._path(item.address).exists()
    assert_consistent(path, BUDGET)


def test_room_that_the_dead_reserved_is_given_back_when_it_is_needed(shm: Path) -> None:
    path = shm / "tier"
    ghost = path / "owners" / ("ab" * 16)
    with opened(path, 1 << 20) as tier:
        tier.maintain()
        ghost.mkdir()
        (ghost / "lock").touch()
        index = tier._live()
        with index.write() as txn:
            index.intend(txn, bytes(35), b"\xab" * 16, 600 << 10)
            index.intend(txn, chain(1, 7)[0].address, b"\xab" * 16, 12288)
        time.sleep(0.15)
        assert tier.write(chain(2, 7)) == [True, True]  # not even the next `maintain` is waited for
        assert not ghost.exists()
        with index.write() as txn:
            index.intend(txn, bytes(35), b"\xcd" * 16, 600 << 10)
        time.sleep(0.15)
        assert all(tier.write(chain(45, 8)))
        tier.delete([chain(1, first)[0].address for first in (7, 8)])
    assert_consistent(path, 1 << 20)


def test_an_owner_whose_folder_is_gone_is_dead(shm: Path) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        index = tier._live()
        with index.write() as txn:
            index.intend(txn, bytes(35), b"\xcd" * 16, 12288)
        tier.maintain()
        with index.read() as txn:
            assert index.writers(txn) == set()


def test_strangers_among_the_owners_are_left_alone_and_the_unborn_removed(shm: Path) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        base = shm / "tier" / "owners"
        (base / "a stranger").mkdir()
        (base / ("ef" * 16)).write_text("a file")
        (base / ".new-empty").mkdir()
        (base / ".new-locked").mkdir()
        with (base / ".new-locked" / "lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            tier.maintain()
            left = {entry.name for entry in base.iterdir()}
            assert left == {"a stranger", "ef" * 16, ".new-locked", tier._owner.folder.name}
        tier._reconciled = 0.0
        tier.maintain()
        assert not (base / ".new-locked").exists()


def test_an_owner_is_made_again_when_somebody_cleaned_up_too_early(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shm / "owners"
    base.mkdir()
    real, count = os.open, [0]

    def racing(path, *rest, **keywords):
        if str(path).endswith("/lock"):
            count[0] += 1
            if count[0] <= 2:
                Path(path).parent.rmdir()
        return real(path, *rest, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", racing)
        owner = Owner(base)
    assert [folder.name for folder in base.iterdir()] == [owner.id.hex()]
    assert owner.intact()
    with dead_owner(owner.folder) as dead:
        assert dead is None
    owner.abandon()
    assert not owner.intact()
    with dead_owner(owner.folder) as dead:
        assert dead == owner.id
    owner.close()

    def always(path, *rest, **keywords):
        Path(path).parent.rmdir()
        return real(path, *rest, **keywords)

    monkeypatch.setattr(os, "open", always)
    with pytest.raises(OSError, match="removed as soon as"):
        Owner(base)


def test_an_owner_that_cannot_be_made_leaves_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = shm / "owners"
    base.mkdir()

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owners.fcntl, "flock", full)
        with pytest.raises(OSError, match="No space"):
            Owner(base)
    assert list(base.iterdir()) == []


def test_a_tier_survives_the_loss_of_its_own_folder(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with opened(path, BUDGET) as tier:
        first = next(tier.scan()).address
        lease = tier.lease([first], 600)
        shutil.rmtree(tier._owner.folder)
        assert tier.write(chain(2, 7)) == [False, False]
        assert tier.lease([first], 600).addresses == ()
        tier.maintain()
        assert tier.write(chain(2, 7)) == [True, True]
        with tier.lease([first], 600) as again:
            assert again.addresses == (first,)
        lease.close()
        tier.delete([chain(1, 7)[0].address])
    assert_consistent(path, BUDGET)


def test_who_was_taken_for_dead_does_not_commit(shm: Path) -> None:
    """Its reservation was given back: what it wrote meanwhile is outside of the budget, and goes."""
    path = shm / "tier"
    with opened(path, BUDGET) as tier, opened(path, BUDGET) as other:
        items = chain(3, size=30000)

        def robbed(function, given):
            placed = [function(item) for item in given]
            index = tier._live()
            with index.write() as txn:
                for item in items[:2]:
                    index.settle(txn, item.address, keep=False)
                index.intend(txn, items[1].address, other._owner.id, 32768)
            return placed

        assert tier.write(items, robbed) == [False, False, False]
        assert not tier._path(items[0].address).exists()
        index = tier._live()
        with index.write() as txn:
            index.settle(txn, items[1].address, keep=False)
        discard(tier._path(items[1].address))
        assert tier.usage().objects == 0
        assert tier.write(items) == [True] * 3
        tier.delete([items[0].address])
    assert_consistent(path, BUDGET)


def test_what_somebody_else_is_writing_is_left_to_him(shm: Path) -> None:
    with opened(shm / "tier", BUDGET) as tier, opened(shm / "tier", BUDGET) as other:
        items = chain(2)

        def while_reserved(function, given):
            assert other.write(items) == [False, False]
            return map(function, given)

        assert tier.write(items, while_reserved) == [True, True]
        assert other.write(items) == [True, True]


def test_a_commit_that_fails_is_undone_later(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shm / "tier"
    with opened(path, BUDGET) as tier:
        index = tier._live()
        real = index.insert

        def full(*_: object) -> list[bytes]:
            raise lmdb.DiskError("No space left on device")

        monkeypatch.setattr(index, "insert", full)
        with pytest.raises(TierFullError):
            tier.write(chain(3))
        monkeypatch.setattr(index, "insert", real)
        assert tier.write(chain(3)) == [False] * 3  # still reserved
        tier.maintain()
        assert tier.write(chain(3)) == [True] * 3
        tier.delete([chain(1)[0].address])
        monkeypatch.setattr(index, "insert", full)
        with pytest.raises(TierFullError):
            tier.write(chain(3))
    assert_consistent(path, BUDGET)


def test_a_lease_that_fails_half_way_holds_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        items = chain(3)
        tier.write(items)
        real, count = os.link, [0]

        def failing(*arguments, **keywords):
            count[0] += 1
            if count[0] == 2:
                raise OSError(errno.EMLINK, "Too many links")
            return real(*arguments, **keywords)

        monkeypatch.setattr(os, "link", failing)
        with pytest.raises(TierError):
            tier.lease([item.address for item in items], 600)
        assert not list((shm / "tier" / "owners").glob("*/leases/*"))


def test_what_is_leased_is_read_after_it_was_deleted_elsewhere(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        match = cache.lookup(TEXT, SPACE)
        pieces = [piece.address for piece in match.pieces(unseen=True)]
        with cache.tiers[0].lease(pieces, 600), opened(path, BUDGET) as other:
            assert other.delete([pieces[0]]) == len(pieces)
            assert cache.lookup(TEXT, SPACE).length == 0
            from kvass.cache import Pool

            assert cache.load(match, Pool(SPACE.spec, 100)).tokens == 100
        assert cache.load(match, Pool(SPACE.spec, 100)).tokens == 0


def test_the_lease_of_one_shard_is_not_that_of_another(shm: Path) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        (item,) = chain(1)
        shards = [
            item._replace(address=address(item.address[:32], 0, shard), blob=blob(bytes([shard]), 9000))
            for shard in (1, 10)
        ]
        tier.write(shards)
        with tier.lease([shards[1].address], 600):
            tier.delete([item.address])
            with pytest.raises(KeyError), tier.open(shards[0].address):
                pass
            with tier.open(shards[1].address) as reader:
                assert reader.size == 9000


# -- room, quarantine, missing files --------------------------------------------------------------


def test_a_lowered_budget_is_kept_to(shm: Path) -> None:
    path = shm / "tier"
    with opened(path, BUDGET) as tier:
        for first in range(60):
            assert tier.write(chain(1, first, size=100_000)) == [True]
    with opened(path, BUDGET // 2) as tier:
        assert tier.usage().bytes > BUDGET // 2
        tier.maintain()
        assert tier.usage().bytes <= BUDGET // 2
        held = [entry.address for entry in tier.scan()]
        assert len(held) > 20
        tier.pin(held, 1e12)
    with opened(path, BUDGET // 4) as tier:
        tier.maintain()  # nothing may go
        assert tier.usage().objects == len(held)


def test_what_is_too_large_for_the_quarantine_is_not_kept(shm: Path) -> None:
    path = shm / "tier"
    with opened(path, 1 << 20) as tier:
        (item,) = chain(1)
        tier.write([item])
        os.truncate(tier._path(item.address), 1 << 40)
        tier.quarantine(item.address)
        assert list((path / "quarantine").iterdir()) == []
        assert tier.usage().bytes <= 1 << 20
        assert tier.write([item]) == [True]
        tier.delete([item.address])
    assert_consistent(path, 1 << 20)


def test_the_quarantine_is_counted_again_after_a_death(shm: Path) -> None:
    path = shm / "tier"
    with opened(path, BUDGET) as tier:
        for first in range(4):
            tier.write(chain(1, first))
            tier.quarantine(chain(1, first)[0].address)
        kept = sorted((path / "quarantine").iterdir())
        assert len(kept) == 4
        kept[0].unlink()
        (path / "quarantine" / "moved, not counted").write_bytes(b"x")
        (path / "quarantine" / "a folder").mkdir()
        tier.maintain()
        assert sorted((path / "quarantine").iterdir()) == kept[1:]
    assert_consistent(path, BUDGET)


def test_a_file_that_cannot_be_set_aside_is_removed(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        (item,) = chain(1)
        tier.write([item])
        path = tier._path(item.address)

        def refuse(*_: object) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", refuse)
            tier.quarantine(item.address)
        assert not path.exists()
        assert tier.contains([item.address]) == [False]


def test_rows_without_files_go_when_they_are_asked_for(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    with KVCache([DirectoryTier(path, BUDGET, name="host")], chunk_tokens=CHUNK) as cache:
        (tier,) = cache.tiers
        pieces = cache.lookup(TEXT, SPACE).pieces(unseen=True)
        tier._path(pieces[4].address).unlink()
        assert load(cache, TEXT, SPACE) < 100
        cache._keep_house()
        assert tier.contains([piece.address for piece in pieces[4:]]) == [False] * (len(pieces) - 4)
        with contextlib.suppress(KeyError), tier.open(bytes(35)):
            pass
        cache._keep_house()
    assert_consistent(path, BUDGET)


def test_an_eviction_that_fails_leaves_rows_that_are_mended(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shm / "tier"
    with opened(path, 1 << 20) as tier:
        for first in range(60):
            tier.write(chain(1, first))
        index = tier._live()
        real = index.remove

        def failing(*_: object) -> None:
            raise lmdb.DiskError("No space left on device")

        monkeypatch.setattr(index, "remove", failing)
        with pytest.raises(TierFullError):
            for first in range(60, 160):
                tier.write(chain(1, first))
        monkeypatch.setattr(index, "remove", real)
        tier.maintain()
        rows = {address_text(entry.address) for entry in tier.scan()}
        assert rows == {file.name.removesuffix(".safetensors") for file in (path / "objects").glob("*/*")}


def test_a_full_file_system_stores_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with tmpfs(1 << 20) as point, opened(point / "tier", 64 << 20) as tier:
        done = []
        for first in range(100):
            with contextlib.suppress(TierError):
                done += tier.write(chain(1, first, size=30000))
        assert True in done
        assert False in done
        assert any("not stored" in record.message or "no room" in record.message for record in caplog.records)
        tier.delete([entry.address for entry in tier.scan()])
        tier.maintain()
        assert tier.write(chain(1, 200)) == [True]


def test_a_tier_is_not_opened_where_there_is_no_room_for_it() -> None:
    with tmpfs(40 << 10) as point:
        with pytest.raises(TierUnavailableError):
            DirectoryTier(point / "tier", 64 << 20, name="host")
        assert not list((point / "tier" / "owners").glob("*"))


def test_one_leaf_that_may_go_is_found_among_many_that_may_not(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        for first in range(100):
            tier.write(chain(1, first))
        everything = [entry.address for entry in tier.scan()]
        for free in everything[:20]:
            tier.pin(everything, 1e12)
            tier.pin([free], 0)
            index = tier._live()
            with index.write() as txn:
                assert tier._remover.evict(index, txn, 1, set()) == 1
            assert tier.contains([free]) == [False]
            everything.remove(free)
        monkeypatch.setattr(removing, "_LOOKS", 8)
        tier.pin(everything, 1e12)
        index = tier._live()
        with index.write() as txn:
            assert tier._remover.evict(index, txn, 1, set()) == 0


# -- what LMDB answers when it is opened ----------------------------------------------------------


class _Ailing:
    """An environment whose transactions fail."""

    def __init__(self, real: object, error: Exception):
        self._real = real
        self._error = error

    def begin(self, **_: object) -> object:
        raise self._error

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


@pytest.mark.parametrize("error", [lmdb.CorruptedError("a page"), lmdb.InvalidError("no LMDB file")])
@pytest.mark.parametrize("when", ["opening", "naming"])
def test_damage_that_shows_on_opening_is_rebuilt(
    shm: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, when: str
) -> None:
    path = shm / "tier"
    fill(path)
    real, count = lmdb.open, [0]

    def once(*arguments: object, **keywords: object) -> object:
        count[0] += 1
        if count[0] > 1:
            return real(*arguments, **keywords)
        if when == "opening":
            raise error
        return _Ailing(real(*arguments, **keywords), error)

    monkeypatch.setattr(lmdb, "open", once)
    with opened(path, BUDGET) as tier:
        assert count[0] == 2
        assert loaded(tier) == 100
    assert_consistent(path, BUDGET)


def test_an_index_that_cannot_name_its_databases_is_left_as_it_is(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shm / "tier"
    fill(path)
    inode = (path / "index" / "data.mdb").stat().st_ino
    real = lmdb.open
    with monkeypatch.context() as patch:
        patch.setattr(
            lmdb,
            "open",
            lambda *arguments, **keywords: _Ailing(real(*arguments, **keywords), lmdb.Error("no")),
        )
        with pytest.raises(TierUnavailableError, match="cannot open"):
            DirectoryTier(path, BUDGET, name="host")
    assert (path / "index" / "data.mdb").stat().st_ino == inode
    with opened(path, BUDGET) as tier:
        assert loaded(tier) == 100


def test_an_empty_or_missing_data_file_is_a_new_index(shm: Path) -> None:
    path = shm / "tier"
    fill(path)
    (path / "index" / "data.mdb").write_bytes(b"")
    with opened(path, BUDGET) as tier:
        assert loaded(tier) == 100
    (path / "index" / "data.mdb").unlink()
    with opened(path, BUDGET) as tier:
        assert loaded(tier) == 100
    assert_consistent(path, BUDGET)


def test_a_damaged_index_that_is_gone_already_needs_no_destroying(shm: Path) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        index = tier._live()
        index.broken = index.damaged = True
        (shm / "tier" / "index" / "data.mdb").unlink()
        assert not index.unsound()
        assert index.bytes_on_disk() == 0
        tier.maintain()
        assert tier.usage().objects == 0


def test_files_that_go_during_a_rebuild_are_passed_over(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shm / "tier"
    fill(path)
    shutil.rmtree(path / "index")
    real, count = rebuild._describe, [0]

    def vanishing(base: Path, file: Path):
        count[0] += 1
        if count[0] in (3, 20):  # once while looking, once while entering
            raise FileNotFoundError(file)
        return real(base, file)

    monkeypatch.setattr(rebuild, "_describe", vanishing)
    with opened(path, BUDGET) as tier:
        assert 0 < tier.usage().objects < 14


def test_a_child_is_only_inserted_below_its_parent(shm: Path) -> None:
    with opened(shm / "tier", BUDGET) as tier:
        index = tier._live()
        record = Record(1, 1, 1, 0, 0.0, 0.0, 0.0, bytes(34) + b"\1", bytes(32))
        with pytest.raises(AssertionError, match="below its parent"), index.write() as txn:
            index.insert(txn, bytes(35), record, None)
        assert tier.usage().objects == 0

"""The comparison with another cache: what it counts, and the figures it refuses to give."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvass.bench import peer_environment
from kvass.bench.peer import refuse_a_cached_read, refuse_a_miss
from kvass.bench.peer_processes import below, memory_bytes, read_bytes
from kvass.bench.report import drop_pages, ratio_interval
from kvass.errors import ConfigError

MEGABYTE = 1 << 20
MAPS = """
import mmap, os, sys
held = [mmap.mmap(-1, int(sys.argv[1]) << 20)]
held[0].write(bytes(len(held[0])))
for path in sys.argv[2:]:
    file = open(path, "r+b")
    held.append(mmap.mmap(file.fileno(), 0))
    assert sum(held[-1][::4096]) >= 0
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def on_tmpfs() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvass-test-{uuid.uuid4().hex}")
    yield path
    path.unlink(missing_ok=True)


class Child:
    """A process that holds memory until it is stopped."""

    def __init__(self, megabytes: int, *files: Path, prefix: tuple[str, ...] = ()):
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", MAPS, str(megabytes), *map(str, files)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None and self.process.stdout.readline() == b"ready\n"
        self.pid = self.process.pid

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def test_a_file_that_two_processes_map_is_counted_once(on_tmpfs: Path) -> None:
    on_tmpfs.write_bytes(b"1" * (64 * MEGABYTE))
    with Child(1, on_tmpfs) as one, Child(1, on_tmpfs) as other:
        with_file = memory_bytes([one.pid, other.pid], [on_tmpfs])
        one_alone = memory_bytes([one.pid], [on_tmpfs])
    assert 64 * MEGABYTE <= with_file < 110 * MEGABYTE
    assert one_alone >= 64 * MEGABYTE  # not the half of it that is this process' share


def test_a_file_on_a_tmpfs_counts_though_nobody_maps_it(on_tmpfs: Path) -> None:
    on_tmpfs.write_bytes(b"1" * (64 * MEGABYTE))
    with Child(1) as one:
        without, with_file = memory_bytes([one.pid], []), memory_bytes([one.pid], [on_tmpfs])
    assert abs(with_file - without - 64 * MEGABYTE) < 2 * MEGABYTE


def test_memory_of_a_process_counts() -> None:
    with Child(4) as small, Child(104) as large:
        assert memory_bytes([large.pid], []) - memory_bytes([small.pid], []) > 90 * MEGABYTE


def test_a_process_started_by_one_of_ours_belongs_to_it() -> None:
    shell = (sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))")
    with Child(1, prefix=shell) as child:
        found = below(child.pid)
        assert len(found) == 2 and found[0] == child.pid
        assert os.getpid() not in found and found[1] in below(os.getpid())


def test_processes_that_ended_count_nothing() -> None:
    with Child(1) as child:
        pass
    assert memory_bytes([child.pid], []) == 0 and read_bytes([child.pid]) == 0


def test_what_is_read_after_its_pages_were_dropped_counts_as_fetched(tmp_path: Path) -> None:
    path = tmp_path / "objects" / "00" / "object"
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(8 * MEGABYTE))
    drop_pages(tmp_path)
    before = read_bytes([os.getpid()])
    path.read_bytes()
    fetched = read_bytes([os.getpid()]) - before
    refuse_a_cached_read("kvass", fetched, 8 * MEGABYTE)
    path.read_bytes()
    again = read_bytes([os.getpid()]) - before - fetched
    with pytest.raises(ConfigError, match="came from memory"):
        refuse_a_cached_read("kvass", again, 8 * MEGABYTE)


def test_a_request_that_did_not_hit_is_refused() -> None:
    refuse_a_miss("lmcache", "dram", 5120)
    for hit in (0, 4864):
        with pytest.raises(ConfigError, match=rf"lmcache \(dram\) hit {hit} of 5120"):
            refuse_a_miss("lmcache", "dram", hit)


def test_what_came_in_part_from_memory_is_no_figure_of_a_disk() -> None:
    refuse_a_cached_read("lmcache", 117_964_800, 117_964_800)
    for fetched, stored in ((94_371_840, 117_964_800), (0, 0)):
        with pytest.raises(ConfigError, match=f"lmcache fetched {fetched} of {stored} stored bytes"):
            refuse_a_cached_read("lmcache", fetched, stored)


def test_the_interval_holds_the_ratio_of_medians_and_shrinks_with_agreement() -> None:
    low, high = ratio_interval([2.0, 2.2, 1.8, 2.1, 1.9], [1.0, 1.1, 0.9, 1.05, 0.95])
    assert low < 2.0 < high
    assert ratio_interval([2.0] * 5, [1.0] * 5) == (2.0, 2.0)


def test_an_unknown_peer_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvass", "bench", "vllm", "--peer", "nobody"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--peer is 'nobody'; it must be lmcache" in done.stderr


def test_a_full_disk_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peer_environment, "_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match="make room, or set XDG_CACHE_HOME"):
        peer_environment.interpreter("lmcache", print)
    assert not list(tmp_path.glob("kvass/peers/*/bin"))


def test_the_code_joins_without_the_packages_beside_it(tmp_path: Path) -> None:
    path = peer_environment.search_path(tmp_path / "code")
    code = "import kvass, sys; print(kvass.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(path) and os.listdir(path) == ["kvass"]

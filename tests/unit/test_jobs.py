"""The queue of jobs: what is asked for, claimed, ended and waited for; and files that somebody damaged."""

import contextlib
import logging
import os
import random
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fixtures.world import SPEC, namespace
from harness.mounts import fill, tmpfs
from kvass import metrics
from kvass.cache import Pace
from kvass.errors import InputError, TierError
from kvass.jobs import Job, Jobs, model_digest
from kvass.jobs.database import Database
from kvass.jobs.job import decode, encode
from kvass.keys import tenant_digest
from kvass.spec import KVSpec
from kvass.testing.clock import ManualClock

SPACE = namespace()
MODEL = model_digest(SPACE)

Open = Callable[..., Jobs]


def job(number: int, length: int = 20, **options) -> Job:
    return Job.of(SPACE, range(number, number + length), **options)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(tmp_path: Path, clock: ManualClock) -> Iterator[Open]:
    """Opens queues over one folder; all are closed in the end."""
    with contextlib.ExitStack() as stack:

        def opened(folder: Path = tmp_path / "jobs", **options) -> Jobs:
            return stack.enter_context(
                contextlib.closing(Jobs(folder, **{"clock": clock, "put_seconds": 30, **options}))
            )

        yield opened


def counted(outcome: str) -> float:
    return metrics.registry.get_sample_value("kvass_jobs_total", {"outcome": outcome}) or 0.0


def troubles() -> float:
    return sum(
        sample.value
        for metric in metrics.errors.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["tier"] == "jobs"
    )


# -- jobs -------------------------------------------------------------------------------------------


def test_a_job_says_whose_it_is_without_a_secret() -> None:
    space = namespace(tenant=tenant_digest("a secret"))
    one = Job.of(space, [1, 2, 3], public=(tenant_digest("another"),), max_fraction=0.15, budget=(0.01, 0.02))
    name, raw = encode(one)
    assert b"secret" not in raw
    assert decode(name, raw) == one
    assert one.tenant == space.tenant
    assert one.prompt().tolist() == [1, 2, 3]


def test_equal_jobs_have_one_id_and_others_have_others() -> None:
    same = [Job.of(SPACE, [1, 2], budget=(1, 0)), Job.of(SPACE, np.array([1, 2]), budget=(1.0, 0.0))]
    others = [
        Job.of(SPACE, [1, 2]), Job.of(SPACE, [2, 1], budget=(1, 0)),
        Job.of(SPACE, [1, 2], budget=(1, 0), max_fraction=0.1),
        Job.of(SPACE, [1, 2], budget=(1, 0), public=("x",)),
        Job.of(namespace(tenant="t"), [1, 2], budget=(1, 0)),
        Job.of(namespace(weights="v" * 64), [1, 2], budget=(1, 0)),
    ]  # fmt: skip
    assert len({encode(one)[0] for one in same}) == 1
    assert len({encode(one)[0] for one in [same[0], *others]}) == 1 + len(others)


def test_workers_of_other_numerics_may_do_it_and_those_of_other_models_may_not() -> None:
    bare = KVSpec(groups=tuple(type(one)(**{**_fields(one), "rope": None}) for one in SPEC.groups))
    alike = [
        namespace(numerics="shared:x"),
        namespace(layout="vllm/cpu"),
        namespace(tenant="t"),
        namespace(bare),
        namespace(model="another name"),
    ]
    assert {model_digest(one) for one in alike} == {MODEL}
    others = [
        namespace(weights="v" * 64),
        namespace(config="d" * 64),
        namespace(adapter="a"),
        namespace(KVSpec(groups=SPEC.groups * 2)),
    ]
    assert len({MODEL, *map(model_digest, others)}) == 1 + len(others)


def _fields(struct) -> dict:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_bytes_that_are_no_job_are_none() -> None:
    name, raw = encode(job(1))
    assert decode(name, raw[:-1] + b"x") is None
    assert decode("0" * 64, raw) is None
    for odd in (b"", b"\xc1", None):
        assert decode(name, odd) is None
    with pytest.raises(InputError, match="int32"):
        Job(model=MODEL, tenant="", public=(), tokens=b"abc", max_fraction=0.0, budget=None).prompt()
    with pytest.raises(InputError):
        Job.of(SPACE, [-1])


# -- asking and working -----------------------------------------------------------------------------


def test_a_job_is_asked_for_taken_and_done(queue: Open, clock: ManualClock) -> None:
    asker, worker = queue(), queue()
    assert worker.take("w", MODEL) is None
    name = asker.put(job(1), 5.0)
    assert asker.wait(name, 0) == "timeout"
    clock.advance(2)
    taken = worker.take("w", MODEL)
    assert taken == (name, job(1), "w", 1, 2.0, True)
    assert worker.take("w", MODEL) is None
    assert asker.wait(name, 0) == "timeout"
    assert worker.done(taken)
    assert asker.wait(name, 5) == "done"
    assert not worker.done(taken)
    assert worker.take("w", MODEL) is None


def test_who_waits_is_told_while_it_waits(queue: Open) -> None:
    asker, worker = queue(), queue()
    worker.take("w", MODEL)
    name = asker.put(job(1), 5.0)

    def work() -> None:
        taken = worker.take("w", MODEL)
        time.sleep(0.2)
        worker.done(taken)

    thread = threading.Thread(target=work)
    began = time.monotonic()
    thread.start()
    assert asker.wait(name, 5) == "done"
    assert 0.2 <= time.monotonic() - began < 3
    thread.join()


def test_who_waits_stops_at_its_deadline(queue: Open) -> None:
    one = queue()
    one.take("w", MODEL)
    name = one.put(job(1), 0.3)
    began = time.monotonic()
    assert one.wait(name, 0.3) == "timeout"
    assert 0.3 <= time.monotonic() - began < 1


def test_without_a_worker_nobody_waits(queue: Open, clock: ManualClock) -> None:
    one = queue()
    name = one.put(job(1), 5)
    one.take("w", "f" * 64)
    began = time.monotonic()
    assert one.wait(name, 5) == "no worker", "the only worker has another model"
    one.take("v", MODEL)
    assert one.wait(name, 0) == "timeout"
    clock.advance(2 * one.lease_seconds + 1)
    assert one.wait(name, 5) == "no worker", "the worker said nothing for long"
    one.take("u", MODEL)
    other = one.put(job(2), 5)
    assert one.wait(other, 0) == "timeout"
    one.leave("u")
    assert one.wait(other, 5) == "no worker", "the worker left"
    assert time.monotonic() - began < 2


def test_the_same_job_is_queued_once(queue: Open, clock: ManualClock) -> None:
    one = queue()
    names = {one.put(job(1), 1.0) for _ in range(3)}
    assert len(names) == 1
    taken = one.take("w", MODEL)
    assert one.put(job(1), 1.0) in names, "under way"
    assert one.take("w", MODEL) is None
    assert one.done(taken)
    assert one.put(job(1), 1.0) in names, "done just now"
    assert one.take("w", MODEL) is None
    clock.advance(61)
    assert one.put(job(1), 1.0) in names
    assert one.take("w", MODEL) is not None, "what was stored may be gone by now"


def test_what_failed_is_not_tried_again_at_once(queue: Open, clock: ManualClock) -> None:
    one = queue()
    name = one.put(job(1), 1.0)
    assert one.failed(one.take("w", MODEL))
    assert one.wait(name, 5) == "failed"
    assert one.put(job(1), 1.0) == name
    assert one.wait(name, 5) == "failed"
    assert one.take("w", MODEL) is None
    clock.advance(61)
    one.put(job(1), 1.0)
    assert one.take("w", MODEL) is not None


def test_asking_again_moves_the_deadline(queue: Open, clock: ManualClock) -> None:
    one = queue()
    one.put(job(1), 1.0)
    clock.advance(5)
    one.put(job(2), 1.0)
    one.put(job(1), 10.0)
    one.put(job(1), 0.1)
    clock.advance(5)
    taken = one.take("w", MODEL)
    assert (taken.job, taken.awaited) == (job(1), True)


def test_who_is_waited_for_comes_first(queue: Open, clock: ManualClock) -> None:
    one = queue()
    for number, deadline in ((1, 1.0), (2, 0.0), (3, 60.0), (4, 60.0)):
        one.put(job(number), deadline)
        clock.advance(0.5)
    clock.advance(5)
    found = [one.take("w", MODEL) for _ in range(4)]
    assert [(taken.job, taken.awaited) for taken in found] == [
        (job(3), True), (job(4), True), (job(1), False), (job(2), False)
    ]  # fmt: skip


def test_what_nobody_came_to_is_dropped_in_the_end(queue: Open, clock: ManualClock) -> None:
    one, before = queue(), counted("dropped")
    name = one.put(job(1), 1.0)
    clock.advance(3500)
    assert one.wait(name, 0) == "no worker"
    clock.advance(200)
    assert one.take("w", MODEL) is None
    assert one.wait(name, 0) == "failed"
    assert counted("dropped") == before + 1


def test_a_full_queue_drops_what_nobody_waits_for_and_then_refuses(queue: Open, clock: ManualClock) -> None:
    one = queue(most=3)
    dropped, refused = counted("dropped"), counted("refused")
    names = [one.put(job(number), deadline) for number, deadline in ((1, 60), (2, 1), (3, 1))]
    clock.advance(2)
    more = one.put(job(4), 60)
    assert more is not None
    assert [one.wait(name, 0) for name in names] == ["no worker", "failed", "no worker"], (
        "the oldest idle one"
    )
    assert one.put(job(5), 60) is not None
    assert (counted("dropped"), counted("refused")) == (dropped + 2, refused)
    assert one.put(job(6), 60) is None
    assert one.wait(None, 5) == "failed"
    assert one.put(job(4), 60) == more, "which is there already"
    assert (counted("dropped"), counted("refused")) == (dropped + 2, refused + 1)
    assert one.take("w", MODEL).job == job(1)
    assert one.put(job(7), 60) is None, "what is under way counts"


def test_bytes_are_bounded_too(queue: Open, clock: ManualClock) -> None:
    one = queue(most_bytes=9000)
    small = [one.put(job(number, 500), 0) for number in range(4)]
    assert None not in small
    assert one.put(job(1, 3000), 60) is None, "larger than the whole queue"
    assert [one.wait(name, 0) for name in small] == ["no worker"] * 4, "nothing was dropped for nothing"
    clock.advance(1)
    assert one.put(job(1, 1500), 60) is not None
    assert [one.wait(name, 0) for name in small] == ["failed"] * 3 + ["no worker"]


# -- workers that die -------------------------------------------------------------------------------


def test_a_lease_that_lapsed_lets_another_take_the_job(queue: Open, clock: ManualClock) -> None:
    one, before = queue(), counted("lost")
    name = one.put(job(1), 60)
    dead = one.take("dead", MODEL)
    clock.advance(one.lease_seconds - 1)
    assert one.take("alive", MODEL) is None
    assert one.renew(dead)
    clock.advance(one.lease_seconds - 1)
    assert one.take("alive", MODEL) is None, "it was renewed"
    clock.advance(2)
    taken = one.take("alive", MODEL)
    assert (taken.id, taken.attempt) == (name, 2)
    assert counted("lost") == before + 1
    assert not one.renew(dead)
    assert not one.done(dead)
    assert not one.failed(dead)
    assert not one.give_back(dead)
    assert one.wait(name, 0) == "timeout", "whatever the dead one says"
    assert one.done(taken)


def test_a_job_that_kills_its_workers_fails(queue: Open, clock: ManualClock) -> None:
    one = queue()
    name = one.put(job(1), 1000)
    for attempt in (1, 2, 3):
        assert one.take(f"w{attempt}", MODEL).attempt == attempt
        clock.advance(one.lease_seconds + 1)
    assert one.take("w4", MODEL) is None
    assert one.wait(name, 0) == "failed"


def test_what_is_given_back_counts_no_attempt(queue: Open) -> None:
    one = queue()
    one.put(job(1), 60)
    for _ in range(5):
        taken = one.take("w", MODEL)
        assert taken.attempt == 1
        assert one.give_back(taken)


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_loses_no_worker_for_good(queue: Open, clock: ManualClock, jump: float) -> None:
    one = queue()
    one.put(job(1), 60)
    one.take("dead", MODEL)
    clock.advance(jump)
    name = one.put(job(2), 60)
    seen = {one.take("w", MODEL), one.take("w", MODEL)}
    assert name in {taken.id for taken in seen if taken is not None}
    assert one.wait(name, 0) == "timeout", "the worker is known to live"


def test_a_clock_set_back_a_little_takes_no_job_from_the_living(queue: Open, clock: ManualClock) -> None:
    """As where two processes look at it before either has the lock."""
    one = queue()
    name = one.put(job(1), 60)
    taken = one.take("w", MODEL)
    clock.advance(-0.5)
    one.put(job(2), 60)
    assert one.take("v", MODEL).job == job(2)
    assert one.done(taken)
    clock.advance(-0.5)
    one.put(job(3), 60)
    assert one.wait(name, 0) == "done", "and that is remembered"


# -- trouble ----------------------------------------------------------------------------------------


def test_files_are_for_their_owner_alone(queue: Open, tmp_path: Path) -> None:
    one = queue()
    one.put(job(1), 60)
    folder = tmp_path / "jobs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {"jobs-1.sqlite", "jobs-1.sqlite-wal"} <= found.keys()
    assert set(found.values()) == {0o600}


def test_the_queue_survives_its_users(queue: Open) -> None:
    first = queue()
    name = first.put(job(1), 60)
    first.close()
    assert first.put(job(2), 60) is None, "closed: a miss"
    assert queue().take("w", MODEL).id == name


def _spoilt(path: Path, kind: str) -> None:
    raw = path.read_bytes()
    if kind == "noise":
        path.write_bytes(random.Random(1).randbytes(len(raw)))
    elif kind == "truncated":
        path.write_bytes(raw[: len(raw) // 2 + 100])
    elif kind == "pages":
        path.write_bytes(raw[:4096] + b"\xff" * (len(raw) - 4096))
    elif kind == "text":
        path.write_text("jobs are here\n")
    elif kind == "other tables":
        path.unlink()
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE jobs (id TEXT PRIMARY KEY)")


@pytest.mark.parametrize("kind", ["noise", "truncated", "pages", "text", "other tables"])
@pytest.mark.parametrize("running", [False, True])
def test_a_damaged_file_is_put_aside_once(
    queue: Open, tmp_path: Path, kind: str, running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jobs" / "jobs-1.sqlite"
    first = queue()
    for number in range(200):
        first.put(job(number), 60)
    first.close()
    users = [queue(), queue()]
    if running:
        for one in users:
            one.wait("x", 0)
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    caplog.set_level(logging.WARNING)
    _spoilt(path, kind)
    for _ in range(3):
        for one in users:
            one.put(job(1), 60)
            one.take("w", MODEL)
            one.wait("x", 0)
    begun = [record for record in caplog.records if "begun anew" in record.message]
    if not running:
        assert len(begun) == 1
        assert path.with_suffix(".damaged").exists()
    assert len(begun) <= 1
    asker, worker = users
    name = asker.put(job(300), 60)
    while (taken := worker.take("w", MODEL)).id != name:
        worker.done(taken)
    assert asker.wait(name, 0) == "timeout"
    assert worker.done(taken)
    assert asker.wait(name, 0) == "done", "both use the new file"


def test_who_finds_the_damage_second_leaves_the_new_file_alone(queue: Open) -> None:
    first, second = queue(), queue()
    first.put(job(1), 60)
    second.wait("x", 0)
    with first._database._alone():
        first._database._put_aside(ValueError("seen by both"))
    name = first.put(job(2), 60)
    with second._database._alone():
        second._database._put_aside(ValueError("seen by both"))
    assert queue().take("w", MODEL).id == name


def test_no_noise_within_a_file_does_harm(queue: Open, tmp_path: Path) -> None:
    """Bytes anywhere in a sound file: whatever SQLite makes of it, jobs are whole, and nothing raises."""
    path = tmp_path / "jobs" / "jobs-1.sqlite"
    first = queue()
    wanted = [job(number, 300) for number in range(8)]
    for one in wanted:
        first.put(one, 60)
    first.close()
    sound = path.read_bytes()
    dice = random.Random(2)
    found = 0
    for _ in range(60):
        raw = bytearray(sound)
        for _ in range(dice.randrange(1, 4)):
            at, size = dice.randrange(len(raw)), dice.randrange(1, 20)
            raw[at : at + size] = dice.randbytes(len(raw[at : at + size]))
        shutil.rmtree(path.parent)
        path.parent.mkdir(mode=0o700)
        path.write_bytes(raw)
        with contextlib.closing(Jobs(path.parent, clock=ManualClock(), put_seconds=30)) as one:
            for number in range(10):
                taken = one.take(f"w{number}", MODEL)
                if taken is not None:
                    found += 1
                    assert taken.job in wanted
                    one.done(taken)
            one.wait(one.put(job(100), 60), 0)
    assert found > 100, "hardly anything was left to look at"


def test_rows_of_nonsense_are_left_out(queue: Open, tmp_path: Path) -> None:
    one = queue()
    name = one.put(job(1), 60)
    raw = encode(job(2))[1]
    odd = [
        ("a", MODEL, "queued", "then", "later", "", "x", "many", "large", raw),
        (None, MODEL, "queued", None, None, None, None, None, None, None),
        (b"\xff", MODEL, "queued", 1.7e9, 1.8e9, "", 0, 0, 0, b"\xff" * 9),
        ("c", MODEL, "taken", 1.7e9, 1.8e9, "gone", float("inf"), 1, 0, raw),
        ("d", MODEL, "other", 1.7e9, 1.8e9, "", 0, 0, 0, raw),
    ]
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs" / "jobs-1.sqlite")) as db:
        db.executemany(f"INSERT INTO jobs VALUES ({', '.join('?' * 10)})", odd)
        db.commit()
    taken = one.take("w", MODEL)
    assert taken.id == name
    assert one.take("w", MODEL) is None
    assert one.done(taken)
    small = queue(most=1)
    assert small.put(job(3), 60) is not None


def test_a_locked_file_is_a_miss_in_time(queue: Open, tmp_path: Path) -> None:
    queue().put(job(1), 60)
    one, before = queue(put_seconds=0.25), troubles()
    name = queue().put(job(1), 60)
    one.wait(name, 0)
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs" / "jobs-1.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        assert one.put(job(2), 60) is None
        assert one.put(job(2), 60) is None
        assert one.wait(name, 0.1) in ("failed", "no worker")
        assert time.monotonic() - began < 1.0
        db.execute("ROLLBACK")
    assert troubles() >= before + 2
    assert queue().put(job(2), 60) is not None


def test_a_disk_that_stands_still_holds_up_nobody(queue: Open) -> None:
    """As where a call into the file does not come back."""
    one = queue(put_seconds=0.25)
    name = queue().put(job(1), 60)
    one.wait(name, 0)
    on = threading.Event()
    still = threading.Thread(target=one._database.ask, args=("wait", lambda db: on.wait(30), None, 0.1))
    still.start()
    still.join()
    began = time.monotonic()
    for _ in range(20):
        assert one.put(job(2), 60) is None
        assert one.wait(name, 60) == "failed"
        assert one.take("w", MODEL) is None
    assert time.monotonic() - began < 1
    on.set()
    end = time.monotonic() + 10
    while one.put(job(2), 60) is None:
        assert time.monotonic() < end, "it came back"


def test_one_who_opens_for_ever_is_a_miss_in_time(queue: Open, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "jobs").mkdir(mode=0o700)
    with (tmp_path / "jobs" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        one = queue(put_seconds=0.25)
        assert one.put(job(1), 60) is None
        assert one.wait("x", 5) == "failed"
        assert time.monotonic() - began < 4.0
        with pytest.raises((OSError, TierError)):
            one.check()
    time.sleep(1.2)
    assert queue().put(job(1), 60) is not None


@pytest.mark.parametrize("kind", ["a file", "open to all", "below a file", "a folder in its place", "a link"])
def test_a_folder_that_cannot_be_used_is_a_miss(
    queue: Open, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "jobs"
    if kind == "a file":
        folder.touch()
    elif kind == "below a file":
        (tmp_path / "plain").touch()
        folder = tmp_path / "plain" / "jobs"
    else:
        folder.mkdir(mode=0o700)
        if kind == "open to all":
            folder.chmod(0o777)
        elif kind == "a link":
            (folder / "jobs-1.sqlite").symlink_to(tmp_path / "elsewhere")
        else:
            (folder / "jobs-1.sqlite").mkdir()
    one, before = queue(folder), troubles()
    for _ in range(3):
        assert one.put(job(1), 60) is None
        assert one.wait("x", 60) == "failed"
        assert one.take("w", MODEL) is None
    assert troubles() == before + 9
    assert len(caplog.records) == 3, "one for each operation"
    with pytest.raises((OSError, TierError)):
        one.check()


def test_a_folder_that_is_removed_is_made_again(queue: Open, tmp_path: Path) -> None:
    asker, worker = queue(), queue()
    asker.put(job(1), 60)
    assert worker.take("w", MODEL) is not None
    shutil.rmtree(tmp_path / "jobs")
    name = asker.put(job(2), 60)
    assert worker.take("v", MODEL).id == name


@pytest.mark.parametrize("leave", [0, 4096, 65536])
def test_a_full_disk_is_a_miss(clock: ManualClock, leave: int) -> None:
    with tmpfs(2 << 20) as point:
        with contextlib.closing(Jobs(point / "jobs", clock=clock, put_seconds=30)) as one:
            first = one.put(job(1, 2000), 60)
            taken = one.take("w", MODEL)
            ballast = fill(point, leave)
            names = [one.put(job(number, 5000), 60) for number in range(2, 12)]
            assert None in names
            one.done(taken)
            one.take("w", MODEL)
            assert one.wait(first, 0) != "failed"
            with contextlib.closing(Jobs(point / "jobs", clock=clock, put_seconds=30)) as other:
                other.put(job(50), 60)
                other.take("v", MODEL)
            ballast.unlink()
            assert one.put(job(99), 60) is not None
        assert not list(point.glob("jobs/*.damaged"))


def test_a_forked_child_has_a_queue_of_its_own_and_harms_not_its_parents(queue: Open, tmp_path: Path) -> None:
    parent = queue()
    name = parent.put(job(1), 60)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            misses = parent.put(job(2), 60) is None and parent.wait(name, 5) == "failed"
            with contextlib.closing(Jobs(tmp_path / "jobs", clock=parent._clock)) as own:
                taken = own.take("child", MODEL)
                code = 0 if misses and taken.id == name and own.done(taken) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert parent.wait(name, 0) == "done"
    assert parent.put(job(3), 60) is not None


def test_a_child_keeps_what_it_asked_for_when_its_parent_closes(queue: Open, tmp_path: Path) -> None:
    """A file that both had open at the fork would be tidied up under the child, its log and all."""
    parent = queue()
    parent.put(job(1), 60)
    (hears, says), (waits, goes) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            with contextlib.closing(Jobs(tmp_path / "jobs", clock=parent._clock, put_seconds=30)) as own:
                put = own.put(job(2), 60) is not None
                os.write(says, b".")
                os.read(waits, 1)
                code = 0 if put and own.put(job(3), 60) is not None else 2
        finally:
            os._exit(code)
    os.read(hears, 1)
    parent.close()
    os.write(goes, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in (hears, says, waits, goes):
        os.close(fd)
    after = queue()
    found = [after.take("w", MODEL) for _ in range(3)]
    assert [taken and taken.job for taken in found] == [job(1), job(2), job(3)]


def test_a_fork_in_mid_call_leaves_the_file_to_the_parent(queue: Open, tmp_path: Path) -> None:
    parent = queue()
    name = parent.put(job(1), 60)
    inside, on = threading.Event(), threading.Event()

    def slow(db: sqlite3.Connection) -> None:
        inside.set()
        on.wait(30)

    database: Database = parent._database
    waiting = threading.Thread(target=database.ask, args=("wait", slow, None, 30))
    waiting.start()
    inside.wait(30)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            with contextlib.closing(Jobs(tmp_path / "jobs", clock=parent._clock)) as own:
                code = 0 if own.put(job(2), 60) is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    on.set()
    waiting.join()
    assert parent.take("w", MODEL).id == name


# -- how long to wait -------------------------------------------------------------------------------


def test_patience_is_a_share_of_what_computing_takes_and_none_where_that_is_not_known() -> None:
    pace = Pace()
    assert pace.patience(10_000, 0.5) == 0
    pace.learn(1000, 2.0)
    assert pace.patience(10_000, 0.5) == pytest.approx(10)
    assert pace.patience(10, 0.5) == pytest.approx(0.01)

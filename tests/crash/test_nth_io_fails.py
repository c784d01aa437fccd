"""The n-th I/O call fails, for every n: a miss or a store given up, never an error, never a wrong answer."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from harness import script
from harness.faults import Faults, failing, nothing
from kvass import metrics
from kvass.errors import KvassError, TierUnavailableError
from kvass.tiers import directory

LEAST_CALLS = 300
SPARSE = 5


@pytest.fixture(autouse=True)
def durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk, so that files are fsynced."""
    monkeypatch.setattr(directory, "on_tmpfs", lambda path: False)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _run(path: Path, faults: Faults) -> None:
    with faults.installed(), script.committing(faults):
        try:
            script.run(path)
        except TierUnavailableError as error:
            assert "as a tier" in str(error) or "index" in str(error)


def _calls_without_a_fault(shm: Path, prepared: Path) -> list[str]:
    path = shm / "tier"
    shutil.copytree(prepared, path)
    faults = Faults(path, nothing)
    _run(path, faults)
    shutil.rmtree(path)
    return faults.calls


def test_without_a_fault(shm: Path, prepared: Path) -> None:
    faults = Faults(prepared, nothing)
    evicted = metrics.evicted_objects.labels("scripted")._value.get()
    quarantined = metrics.corrupt_objects.labels("scripted")._value.get()
    _run(prepared, faults)
    assert metrics.evicted_objects.labels("scripted")._value.get() > evicted
    assert metrics.corrupt_objects.labels("scripted")._value.get() > quarantined
    counted = {call: faults.calls.count(call) for call in set(faults.calls)}
    print(f"{len(faults.calls)} calls: {counted}")
    assert len(faults.calls) >= LEAST_CALLS
    for call in ("open", "pwritev", "preadv", "fsync", "rename", "unlink", "mkdir", "stat", "commit"):
        assert counted[call], f"the script never calls {call}"
    script.assert_all_is_well(prepared)


@pytest.mark.parametrize(
    "code, calls, for_ever",
    [
        (errno.EIO, None, False),
        (errno.EIO, None, True),
        (errno.ENOSPC, ("open", "io.open", "pwritev", "fsync", "mkdir", "rename", "link", "commit"), False),
    ],
    ids=["EIO", "EIO_for_ever", "ENOSPC"],
)
def test_nth_call_fails(
    shm: Path, prepared: Path, code: int, calls: tuple[str, ...] | None, for_ever: bool
) -> None:
    counted = _calls_without_a_fault(shm, prepared)
    n = tried = 0
    while True:
        n += SPARSE if for_ever and n > 40 else 1
        if calls and n <= len(counted) and counted[n - 1] not in calls:
            continue
        tried += 1
        path = shm / "tier"
        shutil.copytree(prepared, path)
        before = _descriptors()
        faults = Faults(path, failing(n, code, for_ever=for_ever))
        _run(path, faults)
        assert _descriptors() <= before, f"call {n} leaves a file open"
        try:
            script.assert_all_is_well(path)
        except (AssertionError, KvassError) as error:
            call = faults.calls[n - 1] if n <= len(faults.calls) else "none"
            raise AssertionError(f"after call {n}, {call}, failed: {error}") from error
        shutil.rmtree(path)
        if len(faults.calls) < n:
            break
    print(f"{tried} runs")

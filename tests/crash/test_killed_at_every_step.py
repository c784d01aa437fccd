"""kill -9 just before the n-th I/O call or commit, for every n: what random instants seldom hit."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import script
from harness.forkserver import ForkServer
from kvass.errors import KvassError

LEAST_CALLS = 300


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


def test_killed_at_every_step(shm: Path, prepared: Path, server: ForkServer) -> None:
    n = 0
    while True:
        n += 1
        path = shm / "tier"
        shutil.copytree(prepared, path)
        code = server.wait(server.start("harness.script:run_and_die", str(path), n))
        assert code in (0, -signal.SIGKILL)
        try:
            script.assert_all_is_well(path)
        except (AssertionError, KvassError) as error:
            raise AssertionError(f"killed before call {n}: {error}") from error
        shutil.rmtree(path)
        if code == 0:
            break
    print(f"{n} runs")
    assert n >= LEAST_CALLS

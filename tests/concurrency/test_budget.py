"""The budget holds at every moment, whoever writes: measured in blocks by the file system itself.

Counted is everything on a tmpfs that holds nothing but the tier: objects, files being written, the index
with its lock file, and the note of the format. A tmpfs takes no blocks for folders.
"""

import random
import time

import pytest

from harness.consistency import assert_consistent
from harness.forkserver import ForkServer
from harness.jobs import BIG, cache_over
from harness.kv import store, text
from harness.mounts import tmpfs, used
from kvass.cache import KVCache

WRITERS = 4
SECONDS = 6.0


@pytest.mark.parametrize("budget", [3 << 20, 12 << 20])
def test_four_writers(server: ForkServer, budget: int) -> None:
    with tmpfs(64 << 20) as point:
        path = point / "tier"
        pids = [
            server.start("harness.jobs:write_for", str(path), budget, seed, SECONDS)
            for seed in range(WRITERS)
        ]
        most = samples = 0
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            most = max(most, used(point))
            samples += 1
            time.sleep(0.0002)
        assert [server.wait(pid) for pid in pids] == [0] * WRITERS
        print(f"at most {most / budget:.3f} of the budget in {samples} samples")
        assert most <= budget
        assert most > 0.75 * budget, "the budget was not even used"
        assert samples > 1000
        assert assert_consistent(path, budget).objects > 20


def test_a_lowered_budget_is_kept_too() -> None:
    with tmpfs(64 << 20) as point:
        path = point / "tier"
        with cache_over(path, 16 << 20) as cache:
            for family in range(40):
                store(cache, text(family, 0, 100), BIG)
        assert used(point) > 4 << 20
        with cache_over(path, 4 << 20) as cache:
            cache._keep_house()
            assert used(point) <= 4 << 20
            _store_some(cache)
            assert used(point) <= 4 << 20
        assert_consistent(path, 4 << 20)


def _store_some(cache: KVCache) -> None:
    dice = random.Random(1)
    for _ in range(30):
        store(cache, text(dice.randrange(100), 0, dice.randrange(20, 200)), BIG)

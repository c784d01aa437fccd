"""Every tier passes the conformance suite."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvass.testing.clock import ManualClock
from kvass.testing.local_tiers import LocalTierConformance
from kvass.tiers.base import Tier
from kvass.tiers.directory import DirectoryTier, on_tmpfs
from kvass.tiers.memory import MemoryTier


class TestMemoryTier(LocalTierConformance):
    budget = 4 << 20

    def make_tier(self, path: Path, budget: int, clock: ManualClock) -> Tier:
        return MemoryTier(budget, clock=clock, seed=1)


class TestDirectoryTierInMemory(LocalTierConformance):
    budget = 8 << 20

    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(prefix="kvass-test-", dir="/dev/shm"))
        yield path
        shutil.rmtree(path)

    def make_tier(self, path: Path, budget: int, clock: ManualClock) -> Tier:
        tier = DirectoryTier(path, budget, name="host", clock=clock, seed=1)
        assert not tier.durable
        return tier


class TestDirectoryTierOnDisk(LocalTierConformance):
    budget = 8 << 20
    payload = 128 << 10  # each write waits for the disk

    def make_tier(self, path: Path, budget: int, clock: ManualClock) -> Tier:
        tier = DirectoryTier(path, budget, name="disk", clock=clock, seed=1)
        assert tier.durable is not on_tmpfs(path)
        return tier

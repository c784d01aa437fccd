"""A directory tier that reads no faster than it is told to: a slower disk, or a network."""

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from kvass.container import Buffer, Reader
from kvass.tiers.directory import DirectoryTier


class ThrottledTier(DirectoryTier):
    """A real one; reading takes `bytes_per_second` (None: as long as it takes), all readers together."""

    def __init__(self, path: Path, budget: int, *, name: str):
        super().__init__(path, budget, name=name)
        self.bytes_per_second: float | None = None
        self._paced = threading.Lock()
        self._free = 0.0

    def open(self, address: bytes) -> AbstractContextManager[Reader]:
        return _Throttled(super().open(address), self)

    def pace(self, size: int) -> None:
        """Wait as long as so many bytes take, behind those that were asked for before."""
        if self.bytes_per_second is None:
            return
        with self._paced:
            now = time.perf_counter()
            self._free = max(now, self._free) + size / self.bytes_per_second
            wait = self._free - now
        time.sleep(wait)


class _Throttled(AbstractContextManager["_Throttled"]):
    def __init__(self, inner: AbstractContextManager[Reader], tier: ThrottledTier):
        self._inner, self._tier = inner, tier
        self._reader: Reader

    def __enter__(self) -> "_Throttled":
        self._reader = self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(None, None, None)

    @property
    def size(self) -> int:
        return self._reader.size

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._tier.pace(sum(len(one) for one in buffers))
        self._reader.read_into(offset, buffers)

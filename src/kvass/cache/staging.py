"""Staging: what slower tiers hold of a prompt is fetched, verified and brought to the fastest one."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from kvass.cache.finding import Failed
from kvass.cache.match import Match
from kvass.cache.moving import FAILURES, promotions
from kvass.container import Buffer, Reader, read_header, verify
from kvass.errors import CorruptObjectError
from kvass.keys import KEY_BYTES
from kvass.tiers.base import Run, Tier, WriteItem

_BATCH_BYTES = 64 << 20
"""Fetched, then written: bounds what a staging holds in memory (but for a single object that is larger)."""


class Turns:
    """One staging at a time for texts that begin alike: the next then finds what the first brought."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[bytes, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def wait(self, key: bytes, until: float) -> Iterator[None]:
        """Wait for those before, until that time (monotonic seconds) at most."""
        with self._guard:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = lock, users + 1
        mine = lock.acquire(timeout=max(0.0, until - time.monotonic()))
        try:
            yield
        finally:
            if mine:
                lock.release()
            with self._guard:
                _, users = self._locks[key]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = lock, users - 1


def stage(tiers: Sequence[Tier], failed: Failed, match: Match, until: float, run: Run) -> None:
    """Bring what `tiers[0]` lacks of a match to it, parents first, until that time (monotonic seconds).

    What cannot be had, fails its digests or comes too late ends the staging of its part. Never raises
    because of a tier.
    """
    sizes = [group.bytes_per_token for group in match.namespace.spec.groups]
    try:
        found = promotions(tiers, match, match.length)
    except FAILURES as error:
        failed(tiers[0], "stage", error)
        return
    cut: set[bytes] = set()
    for tier, items in found:
        for batch in _batches(items, sizes):
            if time.monotonic() >= until:
                return
            wanted = [item for item in batch if item.address[KEY_BYTES:] not in cut]
            cut |= _bring(tier, tiers[0], failed, wanted, run)


def _batches(items: Sequence[WriteItem], sizes: Sequence[int]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    held = 0
    for item in items:
        size = sizes[item.address[KEY_BYTES]] * item.length
        if batch and held + size > _BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def _bring(source: Tier, target: Tier, failed: Failed, items: list[WriteItem], run: Run) -> set[bytes]:
    """Fetch, verify and write a batch. The parts (group, shard) of which an object is missing now."""
    lost: set[bytes] = set()
    with ExitStack() as stack:

        def fetch(item: WriteItem) -> bool:
            try:
                reader = stack.enter_context(source.open(item.address))
                verify(reader, read_header(reader))
            except KeyError:
                return False
            except FAILURES as error:
                failed(source, "stage", error)
                if isinstance(error, CorruptObjectError):
                    _quarantine(source, item.address, failed)
                return False
            blobs[item.address] = _Fetched(reader)
            return True

        blobs: dict[bytes, _Fetched] = {}
        list(run(fetch, items))
        whole: list[WriteItem] = []
        for item in items:
            if item.address in blobs and item.address[KEY_BYTES:] not in lost:
                whole.append(item._replace(blob=blobs[item.address]))
            else:
                lost.add(item.address[KEY_BYTES:])
        try:
            done = target.write(whole, run)
        except FAILURES as error:
            failed(target, "stage", error)
            done = [False] * len(whole)
    return lost | {item.address[KEY_BYTES:] for item, ok in zip(whole, done, strict=True) if not ok}


def _quarantine(tier: Tier, one: bytes, failed: Failed) -> None:
    try:
        tier.quarantine(one)
    except FAILURES as error:
        failed(tier, "quarantine", error)


class _Fetched:
    """An open object as a blob."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self.size = reader.size

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        """From its parts where it lies in memory, else piece by piece."""
        buffer = memoryview(bytearray(min(self.size, 1 << 20)))
        for offset in range(0, self.size, len(buffer)):
            piece = buffer[: min(len(buffer), self.size - offset)]
            self._reader.read_into(offset, [piece])
            yield offset, [piece]

"""Staging: what slower tiers hold of a prompt is fetched, verified and brought to the fastest one."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from blake3 import blake3

from kvass import metrics
from kvass.cache.blobs import ReaderBlob
from kvass.cache.coding import Coding
from kvass.cache.finding import Failed
from kvass.cache.match import Match
from kvass.cache.moving import FAILURES, check_size, promotions, quarantine
from kvass.cache.recoding import recoded
from kvass.container import Blob, Reader, read_header, verify
from kvass.errors import CorruptObjectError, InputError
from kvass.keys import KEY_BYTES, address
from kvass.tiers.base import Run, Tier, WriteItem

_Item = tuple[Tier, WriteItem]
"""What is to be brought, and the tier that has it."""

_BATCH_BYTES = 64 << 20
"""Fetched, then written: bounds what a staging holds in memory (but for a single object that is larger)."""


class Turns:
    """One staging at a time for texts that begin alike: the next then finds what the first brought."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[bytes, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def wait(self, key: bytes, until: float) -> Iterator[bool]:
        """Wait for those before, until that time (monotonic seconds) at most: whether it is our turn."""
        with self._guard:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = lock, users + 1
        mine = lock.acquire(timeout=max(0.0, until - time.monotonic()))
        try:
            yield mine
        finally:
            if mine:
                lock.release()
            with self._guard:
                _, users = self._locks[key]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = lock, users - 1


def stage(
    tiers: Sequence[Tier], failed: Failed, match: Match, until: float, run: Run, going: Callable[[], bool],
    coding: Coding,
) -> None:  # fmt: skip
    """Bring what `tiers[0]` lacks of a match to it, parents first, until that time (monotonic seconds).

    What cannot be had, fails its digests or comes too late ends the staging of its part. Never raises
    because of a tier.
    """
    sizes = [group.bytes_per_token for group in match.namespace.spec.groups]
    recoder = coding.recoder(tiers[0].name, match.namespace)
    if recoder is None:
        return

    def taken(source: Tier, item: WriteItem, reader: Reader) -> Blob:
        if coding.alike(source.name, tiers[0].name, match.namespace):
            return ReaderBlob(reader)
        return recoded(reader, item, item.address, recoder)

    try:
        found = promotions(tiers, failed, match, match.length)
    except FAILURES as error:
        failed(tiers[0], "stage", error)
        return
    cut: set[bytes] = set()
    # Parents first over all tiers: a chunk that only the slowest has may be the parent of the others'.
    items = sorted(((tier, item) for tier, some in found for item in some), key=lambda one: one[1].position)
    for batch in _batches(items, sizes):
        if time.monotonic() >= until or not going():
            return
        wanted = [one for one in batch if one[1].address[KEY_BYTES:] not in cut]
        cut |= _bring(tiers[0], failed, wanted, sizes, run, going, taken)


def _batches(items: Sequence[_Item], sizes: Sequence[int]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    held = 0
    for source, item in items:
        size = sizes[item.address[KEY_BYTES]] * item.length
        if batch and held + size > _BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append((source, item))
        held += size
    if batch:
        yield batch


def _bring(
    target: Tier,
    failed: Failed,
    items: list[_Item],
    sizes: Sequence[int],
    run: Run,
    going: Callable[[], bool],
    taken: Callable[[Tier, WriteItem, Reader], Blob],
) -> set[bytes]:
    """Fetch, verify and write a batch. The parts (group, shard) of which an object is missing now."""
    lost: set[bytes] = set()
    with ExitStack() as stack:

        def fetch(item: WriteItem) -> bool:
            source = sources[item.address]
            if not going():
                return False
            try:
                reader = _fetched(source, failed, item, sizes, stack)
                if reader is not None:
                    blobs[item.address] = taken(source, item, reader)
                    fetched[item.address] = reader.size
            except KeyError:
                return False
            except (*FAILURES, InputError) as error:
                failed(source, "stage", error)
                return False
            return item.address in blobs

        sources = {item.address: source for source, item in items}
        blobs: dict[bytes, Blob] = {}
        fetched: dict[bytes, int] = {}
        list(run(fetch, [item for _, item in items]))
        whole: list[WriteItem] = []
        for _, item in items:
            if item.address in blobs and item.address[KEY_BYTES:] not in lost:
                whole.append(item._replace(blob=blobs[item.address]))
            else:
                lost.add(item.address[KEY_BYTES:])
        try:
            done = target.write(whole, run)
            for item in whole:
                metrics.load_bytes.labels(sources[item.address].name).inc(fetched[item.address])
        except FAILURES as error:
            failed(target, "stage", error)
            done = [False] * len(whole)
    return lost | {item.address[KEY_BYTES:] for item, ok in zip(whole, done, strict=True) if not ok}


def _fetched(
    source: Tier, failed: Failed, item: WriteItem, sizes: Sequence[int], stack: ExitStack
) -> Reader | None:
    """An object that passed every check, open for as long as the stack. Raises KeyError and FAILURES.

    One that fails is read again: where the same bytes come, the object is bad and is deleted; where others
    do, the way to it is, and others may still have a good one.
    """
    seen = b""
    for _ in range(2):
        with ExitStack() as held:
            reader = held.enter_context(source.open(item.address))
            try:
                _check(item, reader, sizes)
            except CorruptObjectError as error:
                failed(source, "stage", error)
                before, seen = seen, _digest(reader)
            else:
                stack.push(held.pop_all())
                return reader
    if seen == before:
        quarantine(source, item.address, failed)
    return None


def _digest(reader: Reader) -> bytes:
    hasher = blake3()
    for _, (piece,) in ReaderBlob(reader).pieces():
        hasher.update(piece)
    return hasher.digest()


def _check(item: WriteItem, reader: Reader, sizes: Sequence[int]) -> None:
    """Raises CorruptObjectError where it is not the object that its address says, or fails its digests."""
    check_size(reader.size, sizes[item.address[KEY_BYTES]], item.length)
    parsed = read_header(reader)
    header = parsed.header
    one = address(bytes.fromhex(header.key), header.group, header.shard)
    if (
        (one, header.position, len(header.tokens)) != (item.address, item.position, item.length)
        or (item.tokens is not None and header.tokens != item.tokens.tolist())
        or header.namespace.root() != item.root
    ):
        raise CorruptObjectError("object is not the one that its address says")
    verify(reader, parsed)

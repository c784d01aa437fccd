"""Taking objects out of a directory tier: by eviction, deletion, quarantine. Files first, then rows."""

import itertools
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

from kvass import metrics
from kvass.clock import Clock
from kvass.keys import KEY_BYTES
from kvass.policy.eviction import EvictionPolicy, Facts
from kvass.tiers import marks, rebuild
from kvass.tiers.environment import Txn
from kvass.tiers.files import charge, discard
from kvass.tiers.index import Index

_SAMPLES = 8
_LOOKS = 1024
"""Leaves looked at before room is given up on, when leases and pins hold them."""
_UNLINKS = 8
"""Files removed inside one write transaction: all other writers wait meanwhile."""
_INDEX_SLACK = 4 << 20
"""What the index may grow by in one transaction: its rows lie scattered, and a changed page is a new one."""


class Remover:
    """What a directory tier removes with, and by what rules."""

    def __init__(
        self, path: Path, name: str, budget: int, policy: EvictionPolicy, clock: Clock, seed: int | None
    ):
        self._path = path
        self._name = name
        self._budget = budget
        self._policy = policy
        self._clock = clock
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._missing: set[bytes] = set()

    def room(self, index: Index, txn: Txn) -> int:
        """Bytes left within the budget; less than nothing when it was exceeded, or lowered."""
        return self.most(index) - index.usage(txn)[0]

    def most(self, index: Index) -> int:
        """Bytes that all objects together may take: what the index takes, and may soon, is not theirs."""
        slack = min(_INDEX_SLACK, self._budget // 8)
        return self._budget - slack - index.bytes_on_disk()

    def note_missing(self, addresses: Sequence[bytes]) -> None:
        """Objects whose file may be gone while their row is there; `mend` looks."""
        with self._guard:
            self._missing.update(addresses)

    def drop_key(self, index: Index, txn: Txn, key: bytes) -> int:
        """Remove all parts of a childless key: files first, then rows. How many went."""
        parts = index.parts(txn, key)
        if any(record.children for _, record in parts):
            return 0
        self.note_missing([one for one, _ in parts])  # should this transaction fail, they have no files
        for one, record in parts:
            discard(rebuild.object_path(self._path, one))
            index.remove(txn, one, record)
            marks.remove(index, txn, one, record.root)
        return len(parts)

    def evict(self, index: Index, txn: Txn, lacking: int, keep: set[bytes]) -> int:
        """Free up to `lacking` bytes in this transaction; how many objects went (0: nothing may go)."""
        before, gone = index.usage(txn)[0], 0
        for name, size in itertools.islice(index.in_quarantine(txn).items(), _UNLINKS):
            discard(self._path / "quarantine" / name)
            index.release_quarantined(txn, name, size)
            gone += 1
        place = self._random.randbytes(KEY_BYTES)
        looks = min(index.leaf_count(txn), _LOOKS)
        while looks > 0 and gone < _UNLINKS and before - index.usage(txn)[0] < lacking:
            sample = index.leaves_from(txn, place, _SAMPLES)
            victim = self._victim(index, txn, sample, keep)
            if victim is not None:
                went = self.drop_key(index, txn, victim)
                metrics.evicted_objects.labels(self._name).inc(went)
                gone += went
            elif not sample:
                break
            else:
                looks -= len(sample)
                place = sample[-1] + b"\0"
        return gone

    def _victim(self, index: Index, txn: Txn, sample: Sequence[bytes], keep: set[bytes]) -> bytes | None:
        """The key with the lowest score among those of a sample that may go."""
        now = self._clock()
        best: tuple[float, bytes] | None = None
        for key in {one[:KEY_BYTES] for one in sample} - keep:
            parts = index.parts(txn, key)
            if any(r.children or r.pinned_until > now or self._leased(part) for part, r in parts):
                continue
            score = max(
                self._policy(Facts(r.size, r.length, r.position, r.created, r.accessed), now)
                for _, r in parts
            )
            if best is None or score < best[0]:
                best = (score, key)
        return None if best is None else best[1]

    def _leased(self, one: bytes) -> bool:
        try:
            return rebuild.object_path(self._path, one).stat(follow_symlinks=False).st_nlink > 1
        except OSError:
            return False

    def delete(self, index: Index, addresses: Sequence[bytes]) -> int:
        """Delete objects with every part and all that is stored behind them; how many went."""
        gone = 0
        for _ in range(3):  # somebody may store behind what is being deleted
            keys = _subtree(index, addresses)
            for start in range(0, len(keys), _UNLINKS):
                with index.write() as txn:
                    gone += sum(self.drop_key(index, txn, key) for key in keys[start : start + _UNLINKS])
            if not any(_there(index, addresses)):
                break
        return gone

    def delete_leaves(self, index: Index, addresses: Sequence[bytes]) -> int:
        """Delete objects with every part, but none that is pinned or has something stored behind it."""
        keys, gone = sorted({one[:KEY_BYTES] for one in addresses}), 0
        for start in range(0, len(keys), _UNLINKS):
            with index.write() as txn:
                for key in keys[start : start + _UNLINKS]:
                    if all(record.pinned_until <= self._clock() for _, record in index.parts(txn, key)):
                        gone += self.drop_key(index, txn, key)
        return gone

    def quarantine(self, index: Index, one: bytes) -> None:
        """Move an object's file out of sight, if there is room for it, and delete what is behind it."""
        self.note_missing([one])
        with index.write() as txn:
            record = index.get(txn, one)
            kept = rebuild.set_aside(self._path, rebuild.object_path(self._path, one))
            if record is None and kept is None:
                return
            metrics.corrupt_objects.labels(self._name).inc()
            if record is not None:  # from here on the charge is that of the file in quarantine
                index.put(txn, one, record._replace(size=0))
                index.add_usage(txn, -record.size, 0)
            if kept is not None:
                size = charge(kept.stat().st_size)
                if size <= self.room(index, txn):
                    index.charge_quarantined(txn, kept.name, size)
                else:
                    discard(kept)
        self.delete(index, [one])

    def mend(self, index: Index) -> None:
        """Rows whose file is gone: somebody died between unlinking and committing."""
        with self._guard:
            noted, self._missing = self._missing, set()
        missing = [one for one in noted if not os.path.lexists(rebuild.object_path(self._path, one))]
        if missing:
            there = _there(index, missing)
            self.delete(index, [one for one, row in zip(missing, there, strict=True) if row])

    def shrink(self, index: Index) -> None:
        """Back to the budget, should it have been lowered; without looking for leaves when within it."""
        over = self._over(index)
        while over > 0:
            with index.write() as txn:
                if not self.evict(index, txn, over, set()):
                    return
                over = -self.room(index, txn)

    def _over(self, index: Index) -> int:
        with index.read() as txn:
            return -self.room(index, txn)


def _there(index: Index, addresses: Sequence[bytes]) -> list[bool]:
    with index.read() as txn:
        return [index.get(txn, one) is not None for one in addresses]


def _subtree(index: Index, addresses: Sequence[bytes]) -> list[bytes]:
    """Keys of the objects and of all stored behind them, last first."""
    keys: dict[bytes, None] = {}
    level = [one[:KEY_BYTES] for one in addresses]
    with index.read() as txn:
        while level:
            following: list[bytes] = []
            for key in level:
                parts = [] if key in keys else index.parts(txn, key)
                if parts:
                    keys[key] = None
                for one, _ in parts:
                    following += [child[:KEY_BYTES] for child in index.children_of(txn, one)]
            level = following
    return list(reversed(keys))

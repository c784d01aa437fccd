"""What the killed processes do until they are killed: everything a cache can be asked for, at random."""

import mmap
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvass.cache import KVCache
from kvass.tiers.directory import DirectoryTier

from .kv import CHUNK, borrow, load, namespace, store, text

HEADS = 24
SLOT = 64
_OWNER_AT = 16


class Board:
    """Memory that a killer and its victims share: for each victim, its owner id and 'an intent is open'."""

    def __init__(self, path: Path, slots: int):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        assert slots * SLOT <= mmap.PAGESIZE

    def clear(self, slot: int) -> None:
        """Before a new process gets the slot."""
        self._memory[slot * SLOT : (slot + 1) * SLOT] = bytes(SLOT)

    def writing(self, slot: int) -> bool:
        """Whether the process says that it is between reserving and committing."""
        return self._memory[slot * SLOT] == 1

    def set_writing(self, slot: int, on: bool) -> None:
        """See `writing`."""
        self._memory[slot * SLOT] = int(on)

    def owner(self, slot: int) -> bytes:
        """The owner id of the process, zeros before it has opened its tier."""
        start = slot * SLOT + _OWNER_AT
        return bytes(self._memory[start : start + 16])

    def set_owner(self, slot: int, owner: bytes) -> None:
        """See `owner`."""
        start = slot * SLOT + _OWNER_AT
        self._memory[start : start + 16] = owner

    def rounds(self, slot: int) -> int:
        """How many things the process has done."""
        return int.from_bytes(self._memory[slot * SLOT + 8 : slot * SLOT + 12], "little")

    def count(self, slot: int) -> None:
        """One more."""
        self._memory[slot * SLOT + 8 : slot * SLOT + 12] = (self.rounds(slot) + 1).to_bytes(4, "little")


def reporting(tier: DirectoryTier, board: Board, slot: int) -> None:
    """Make a tier say on the board when its intents are open."""
    reserve, commit = tier._reserve, tier._commit

    def reserved(*arguments: Any) -> Any:
        answer = reserve(*arguments)
        if answer[1]:
            board.set_writing(slot, True)
        return answer

    def committed(*arguments: Any) -> Any:
        try:
            return commit(*arguments)
        finally:
            board.set_writing(slot, False)

    tier._reserve, tier._commit = reserved, committed  # type: ignore[method-assign]


def run(path: str, budget: int, board_path: str, slot: int, seed: int) -> None:
    """Store, load, forget and keep house for ever. Ends only by an error, or by being killed."""
    board = Board(Path(board_path), slot + 1)
    dice = random.Random(seed)
    space = namespace(HEADS)
    tier = DirectoryTier(Path(path), budget, name="killed", seed=seed)
    board.set_owner(slot, tier._owner.id)
    reporting(tier, board, slot)
    cache = KVCache([tier], chunk_tokens=CHUNK, store_deadline=60)
    while True:
        step(cache, tier, dice, space)
        board.set_owner(slot, tier._owner.id)
        board.count(slot)


def step(cache: KVCache, tier: DirectoryTier, dice: random.Random, space: Any) -> None:
    """One thing out of all that may be done."""
    family, branch = dice.randrange(12), dice.randrange(3)
    length = dice.randrange(20, 180)
    tokens = text(family, branch, length)
    chance = dice.random()
    if chance < 0.55:
        store(cache, tokens, space)
    elif chance < 0.70:  # a tail that grows: each store supersedes the one before
        for more in range(0, 12, 3):
            store(cache, text(family, branch, length + more), space)
    elif chance < 0.84:
        load(cache, tokens, space)
    elif chance < 0.90:
        borrow(cache, np.concatenate([text(99, branch, 10), tokens]), space)
    elif chance < 0.94:
        cache.forget(tokens, space, keep=dice.choice((0, length // 2)))
    elif chance < 0.98:
        tier.maintain()
    else:
        with tier.lease([entry.address for entry in list(tier.scan())[:3]], 0.5):
            time.sleep(dice.random() * 0.002)

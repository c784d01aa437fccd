"""Blocks of memory that Mooncake's transfer engine may read and write."""

import contextlib
import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvass.container import Buffer
from kvass.errors import TierError
from kvass.tiers.mooncake.codes import BrokenOffError

BLOCK_BYTES = 8 << 20
"""What one transfer moves; those of one object go side by side."""

_KEPT = 32
REST_SECONDS = 120.0
"""For what a transfer that broke off may still touch. Longer than any time limit of Mooncake's own."""


class Block:
    """One piece of memory, and its address."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, BLOCK_BYTES)
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Blocks:
    """Registered blocks, of which some are kept for the next transfer: fresh memory is slow.

    More than these are made where all are in use, and given up when they come back: readers wait for no
    one's release. What is out is bounded by who reads, as with any other store.
    """

    def __init__(self, register: Callable[[int, int], int], unregister: Callable[[int], int]):
        """`register`, `unregister`: Mooncake's, of address and bytes; 0 is success."""
        self._register = register
        self._unregister = unregister
        self._guard = threading.Lock()
        self._free: list[Block] = []
        self._resting: deque[tuple[float, Block]] = deque()
        self._lost: list[Block] = []
        self._closed = False

    @contextlib.contextmanager
    def lent(self, count: int) -> Iterator[list[Block]]:
        """So many blocks, until the end. Raises TierError where one cannot be registered."""
        blocks = self._take(count)
        try:
            yield blocks
        except BrokenOffError:
            end = time.monotonic() + REST_SECONDS
            with self._guard:
                self._resting.extend((end, block) for block in blocks)
            raise
        except GeneratorExit:
            self._lost.extend(blocks)  # whoever held them forgot to end it, and may still look at them
            raise
        except BaseException:
            self._give(blocks)
            raise
        self._give(blocks)

    def _take(self, count: int) -> list[Block]:
        with self._guard:
            while self._resting and self._resting[0][0] < time.monotonic():
                self._free.append(self._resting.popleft()[1])
            taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(taken) < count:
            block = Block()
            if self._register(block.address, BLOCK_BYTES):
                self._give(taken)
                raise TierError(f"Mooncake cannot register {BLOCK_BYTES} bytes; is `ulimit -l` too low?")
            taken.append(block)
        return taken

    def _give(self, blocks: Sequence[Block]) -> None:
        with self._guard:  # to the end: Mooncake must not be closed meanwhile
            room = max(0, _KEPT - len(self._free))
            self._free.extend(blocks[:room])
            for block in blocks[room:]:
                if not self._closed:
                    self._unregister(block.address)

    def close(self) -> None:
        """Call Mooncake no more. What is out stays readable."""
        with self._guard:
            self._closed = True


def filled(blocks: Sequence[Block], parts: Sequence[Buffer]) -> Iterator[list[int]]:
    """Copies the parts' bytes, in order, into the blocks; yields how many each has, whenever all are full
    and at the end. The blocks are filled anew after each."""
    sizes = [0]
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            if sizes[-1] == BLOCK_BYTES:
                if len(sizes) == len(blocks):
                    yield sizes
                    sizes = []
                sizes.append(0)
            step = min(len(view), BLOCK_BYTES - sizes[-1])
            blocks[len(sizes) - 1].view[sizes[-1] : sizes[-1] + step] = view[:step]
            sizes[-1] += step
            view = view[step:]
    if sizes[-1]:
        yield sizes

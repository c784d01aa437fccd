"""The tiers of a cache, its threads and its life; what fails in a tier is counted and logged once."""

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from kvass import metrics
from kvass.cache.coding import Coding, check_order
from kvass.cache.executor import Executor
from kvass.cache.moving import FAILURES
from kvass.cache.staging import Turns
from kvass.clock import Clock, system_clock
from kvass.keys import Namespace
from kvass.quality import Budget, Gate
from kvass.tiers.base import Tier

log = logging.getLogger("kvass.cache")

_EXIT_PATIENCE = 10.0
"""Seconds without progress after which an interpreter that ends leaves a cache as it is."""

_open: "weakref.WeakSet[Tiered]" = weakref.WeakSet()


class Tiered:
    """An ordered list of tiers, fastest first, and the threads that work on them."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        chunk_tokens: int = 256,
        io_threads: int = 2,
        store_deadline: float = 5.0,
        shards: tuple[int, ...] = (0,),
        exists_seconds: float = 0.2,
        lane_objects: int = 4096,
        clock: Clock = system_clock,
        codecs: Mapping[str, str] | None = None,
        gate: Gate | None = None,
        budget: Budget | None = None,
    ):
        """`tiers`: fastest first, remote ones last; closed with the cache. `shards`: the parts of each group
        (tensor-parallel ranks) that lookups must find and stores write. `exists_seconds`: what a lookup
        waits for remote tiers, all together. `lane_objects`: how many objects may wait for a lower tier.
        `codecs`: what tiers store by, by their names; raw where nothing is said. `gate`: says what lossy
        state may be used, within `budget` where a request sets none; without a gate none is. Raises
        ConfigError for codecs that there are not, or that cannot be had of what the fastest tier stores."""
        self.tiers = list(tiers)
        self._warned: set[tuple[str, str]] = set()
        self._guard = threading.Lock()
        self._coding = Coding(codecs or {}, gate, budget, self._say_once)
        check_order(self._coding, [tier.name for tier in self.tiers])
        self.chunk_tokens = chunk_tokens
        self.shards = shards
        self.unavailable: dict[str, str] = {}
        self._store_deadline = store_deadline
        self._clock = clock
        self._exists_seconds = exists_seconds
        self._local = [tier for tier in self.tiers if not tier.remote]
        self._executor = Executor(
            io_threads,
            self._keep_house,
            lanes=[tier.name for tier in self.tiers[1:]],
            lane_objects=lane_objects,
            far=self.remote,
        )
        self._turns = Turns()
        self._pid = os.getpid()
        self._closed = False
        _open.add(self)

    @property
    def remote(self) -> bool:
        """Whether there are tiers on other machines."""
        return len(self._local) < len(self.tiers)

    def _usable(self) -> list[Tier]:
        """The tiers, fastest first; none once the cache is closed, nor in a forked child, where its threads
        do not live and locks may be held for ever."""
        return [] if self._closed or self._pid != os.getpid() else self.tiers

    def _here(self) -> list[Tier]:
        """Those of this machine."""
        return self._local if self._usable() else []

    def _within(self, namespace: Namespace, until: float | None = None) -> list[Tier]:
        """The tiers, for objects of one namespace, until that time (monotonic seconds)."""
        if not self.remote:
            return self._usable()
        root = namespace.root()
        return [tier.within(root, until) for tier in self._usable()]

    # -- life -----------------------------------------------------------------------------------------

    def flush(self, seconds: float | None = None) -> None:
        """Wait until everything stored so far is visible in every tier that takes it. Raises TimeoutError
        after `seconds`."""
        self._executor.flush(seconds)

    def close(self, patience: float = 30.0) -> None:
        """Finish what is pending and close the tiers. More than once is fine.

        Where nothing moves on for `patience` seconds, as when a process that stands still holds a tier's
        lock, the rest is given up; the tiers stay open then until this process ends.
        """
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        if not self._executor.close(patience):
            log.warning("kvass: a tier stands still; what was not stored yet is given up")
            return
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep_house(self) -> None:
        for tier in self.tiers:
            try:
                tier.maintain()
            except FAILURES as error:
                self._failed(tier, "maintain", error)

    def _failed(self, tier: Tier, operation: str, error: BaseException) -> None:
        metrics.errors.labels(tier.name, operation).inc()
        self._warn_once(tier.name, operation, f"{operation} failed in the {tier.name} tier: {error}")

    def _warn_once(self, where: str, operation: str, message: str) -> None:
        text = f"{message}; treated as a miss, counted in kvass_errors_total from now on"
        self._say_once(where, operation, text)

    def _say_once(self, where: str, operation: str, text: str) -> None:
        with self._guard:
            if (where, operation) in self._warned:
                return
            self._warned.add((where, operation))
        log.warning("kvass: %s", text)


def _close_all() -> None:
    for cache in list(_open):
        cache.close(_EXIT_PATIENCE)


atexit.register(_close_all)

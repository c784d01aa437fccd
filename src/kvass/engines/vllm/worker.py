"""The worker's half of the connector: loads into vLLM's blocks before a step, stores out of them after it."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from kvass.cache.kvcache import KVCache
from kvass.cache.pace import Pace
from kvass.cache.pool import KVView
from kvass.engines.vllm.blocks import Copied, InPlace, LoadView, Memory, Staged
from kvass.engines.vllm.canonical import check_packing
from kvass.engines.vllm.doubts import Doubts
from kvass.engines.vllm.meta import Load, Report, Store, Work
from kvass.engines.vllm.plan import Plan
from kvass.engines.vllm.stats import KvassStats
from kvass.engines.vllm.translated import Canonical
from kvass.errors import InputError, KvassError


class WorkerHalf:
    """Lives in one of vLLM's workers, one a tensor-parallel rank; all is called from its one thread."""

    def __init__(self, plan: Plan, cache: KVCache, *, patient: bool):
        """`patient`: a load may take as long as it wants, since one that fails would fail its request."""
        self._plan = plan
        self._cache = cache
        self._memory: Memory | None = None
        self._patient = patient
        self._pace = Pace()
        self._began = 0.0
        self._report = Report()
        self._bad_blocks: set[int] = set()
        self._arrived: set[str] = set()
        self._failed: set[str] = set()
        self._doubtful = False
        self._doubts = Doubts()
        self.stats = KvassStats()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take vLLM's KV tensors by layer name. Raises UnsupportedModelError for a layout we do not know."""
        if self._plan.canonical:
            for group in self._plan.spec.groups:
                check_packing(self._plan.isa, group, self._plan.block_tokens)
        self._memory = Memory(self._plan, kv_caches)

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    # -- loads ----------------------------------------------------------------------------------------

    def load(self, work: Work) -> None:
        """Do a step's loads, one after the other: threads of ours would starve beside vLLM's."""
        began = time.perf_counter()
        for one in work.loads:
            try:
                self._report.loaded[one.request] = max(one.match.start, self._load(one))
            except (KvassError, OSError, RuntimeError) as error:
                self._complain("load", error)
        self._began += time.perf_counter() - began

    def settle(self, work: Work) -> None:
        """Make sure that every load of a step is reported: what `load` says nothing of has failed."""
        for one in work.loads:
            tokens = self._report.loaded.setdefault(one.request, one.match.start)
            if one.waits:
                self._arrived.add(one.request)
            if tokens >= one.match.length:
                continue
            self.stats.add("kvass_failed_loads")
            if one.waits:
                self._failed.add(one.request)
            else:
                self._doubtful = True
                ids = one.blocks[0]
                size = self._plan.block_tokens
                self._bad_blocks.update(ids[tokens // size : one.match.length // size])

    def _load(self, one: Load) -> int:
        memory = self._memory
        if memory is None:
            raise InputError("vLLM asks for a load before it gave its KV tensors")
        match = replace(one.match, shards=self._cache.shards)
        view: LoadView
        if memory.in_place:
            view = InPlace(memory, one.blocks)
        elif self._plan.canonical:
            view = Canonical(memory, one.blocks, (match.start, match.length))
        else:
            view = Staged(memory, one.blocks, match.start, match.length)
        seconds = None if self._patient else self._pace.seconds(match.length - match.start)
        result = self._cache.load(match, view, seconds=seconds)
        tokens = min(match.length, result.tokens)
        view.finish(tokens)
        self.stats.add("kvass_loads")
        self.stats.add("kvass_load_bytes", result.bytes)
        self.stats.add("kvass_load_seconds", result.seconds)
        return tokens

    # -- stores ---------------------------------------------------------------------------------------

    def store(self, work: Work) -> None:
        """Copy a step's new chunks out. Nothing where a load of the step failed: what was computed upon
        missing KV is wrong, and vLLM will compute it again."""
        if self._memory is not None and self._memory.on_host:  # elsewhere, a step is only begun by now
            self._pace.learn(work.tokens, time.perf_counter() - self._began)
        for one in work.stores:
            if self._doubtful:
                self._report.skipped[one.request] = one.start
                continue
            try:
                self._store(one)
            except (KvassError, OSError, RuntimeError) as error:
                self._complain("store", error)
        self._doubtful = False

    def _store(self, one: Store) -> None:
        memory = self._memory
        if memory is None:
            return
        began = time.perf_counter()
        view: KVView
        if memory.in_place:
            view = InPlace(memory, one.blocks)
        elif self._plan.canonical:
            view = Canonical(memory, one.blocks)
        else:
            view = Copied(memory, one.blocks, one.start, one.tokens.size)
        ticket = self._cache.store(one.tokens, one.namespace, view)
        self.stats.add("kvass_stores")
        self.stats.add("kvass_store_bytes", ticket.bytes)
        self.stats.add("kvass_store_seconds", time.perf_counter() - began)

    def _complain(self, operation: str, error: Exception) -> None:
        self.stats.add("kvass_errors")
        self._doubts.note(operation, error)

    # -- reports --------------------------------------------------------------------------------------

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose waiting load ended, and those of them for which it failed."""
        found = self._arrived, self._failed
        self._arrived, self._failed = set(), set()
        return found

    def take_bad_blocks(self) -> set[int]:
        """Blocks that vLLM counts as computed and that hold nothing."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> Report | None:
        """What came of the step; None where there is nothing to tell."""
        if not self._report.loaded and not self._report.skipped:
            return None
        report, self._report = self._report, Report()
        return report

    def close(self) -> None:
        """Finish what is being stored and give the tiers back."""
        self._cache.close()

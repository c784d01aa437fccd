"""`kvass bench overhead`: what keeping costs when nothing is ever reused.

Prompts that share nothing, four tokens decoded, everything stored; the same engine path without a cache,
with the host tier, and with host and SSD tier, in turn; the store's queue is drained inside the clock.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvass.bench.report import interleaved, interval, machine, ratios
from kvass.bench.scratch import scratch
from kvass.cache import KVCache
from kvass.engines.transformers import Engine, Sampling, Usage, load_model
from kvass.tiers.directory import DirectoryTier

LENGTHS = (512, 2048, 7168)
_DECODED = 4
_BUDGET = 3 << 30


def run(
    disk: Path,
    models_path: Path,
    *,
    model: str,
    lengths: tuple[int, ...],
    pairs: int,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """`no_reuse_host`, `no_reuse_ssd`: seconds with kvass over without, summed over all lengths and pairs;
    medians of pairs, intervals and CPU seconds by length beside them."""
    loaded = load_model(model, dtype="bfloat16", models_path=models_path)
    with scratch(disk) as (host_path, disk_path):
        one = [DirectoryTier(host_path / "alone", _BUDGET, name="host")]
        two = [
            DirectoryTier(host_path / "both", _BUDGET, name="host"),
            DirectoryTier(disk_path / "both", _BUDGET, name="disk"),
        ]
        with KVCache(one) as host_cache, KVCache(two) as ssd_cache:
            caches = {"plain": None, "host": host_cache, "ssd": ssd_cache}
            sides = {name: _Side(Engine(loaded.model, cache)) for name, cache in caches.items()}
            for side in sides.values():
                side.run(max(lengths))  # warm: memory of the pools, kernels
                side.clear()
            by_length = {}
            for length in lengths:
                runs = {name: partial(side.run, length) for name, side in sides.items()}
                seconds = interleaved(runs, pairs, progress)
                by_length[length] = (seconds, {name: side.clear() for name, side in sides.items()})
    return {
        "bench": "overhead", "machine": machine(), "torch_threads": torch.get_num_threads(),
        "model": model, "dtype": "bfloat16", "pairs": pairs, "decoded_tokens": _DECODED,
        "no_reuse_host": _total(by_length, "host"), "no_reuse_ssd": _total(by_length, "ssd"),
        "by_length": {str(length): _sum_up(*found) for length, found in by_length.items()},
    }  # fmt: skip


class _Side:
    """One engine, and what its runs stored and cost."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._random = np.random.default_rng()
        self._cpu: list[float] = []
        self._stored: list[int] = []

    def run(self, length: int) -> float:
        """Seconds for one prompt that was never seen: prefill, decode, and all of it stored."""
        cache, usage = self._engine.cache, Usage()
        prompt = self._random.integers(3, self._engine.vocabulary, length)
        cpu, began = time.process_time(), time.perf_counter()
        sampling = Sampling(max_tokens=_DECODED)
        written = sum(1 for _ in self._engine.generate(prompt, sampling, usage=usage))
        if cache is not None:
            cache.flush()
        took = time.perf_counter() - began
        self._cpu.append(time.process_time() - cpu)
        assert usage.cached_tokens == 0 and written
        if cache is not None:
            assert usage.ticket is not None
            self._stored.append(usage.ticket.bytes)
            assert cache.lookup(prompt, self._engine.namespace).length == length
            cache.forget(prompt, self._engine.namespace)
        return took

    def clear(self) -> dict[str, Any]:
        """CPU seconds and bytes since the last call."""
        found = {"cpu_seconds": round(statistics.median(self._cpu), 4), "bytes_stored": sum(self._stored)}
        self._cpu, self._stored = [], []
        return found


def _total(by_length: dict[int, Any], side: str) -> float:
    with_kvass = sum(sum(seconds[side]) for seconds, _ in by_length.values())
    without = sum(sum(seconds["plain"]) for seconds, _ in by_length.values())
    return round(with_kvass / without, 4)


def _sum_up(seconds: dict[str, list[float]], costs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"plain_seconds": round(statistics.median(seconds["plain"]), 4)}
    for side in ("host", "ssd"):
        pairs = ratios(seconds[side], seconds["plain"])
        low, high = interval(pairs)
        found[side] = {
            "ratio": round(statistics.median(pairs), 4),
            "interval95": [round(low, 4), round(high, 4)],
        }
    return found | {"costs": costs}

"""`kvass bench ttft`: time to first token by context length, and from where on loading beats recomputing."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvass.bench.plain import answer
from kvass.bench.report import drop_pages, interleaved, machine
from kvass.bench.scratch import scratch
from kvass.cache import KVCache
from kvass.engines.transformers import Engine, Sampling, Usage, load_model
from kvass.tiers.directory import DirectoryTier

LENGTHS = (512, 1024, 2048, 4096, 7168)
_SHORTEST = (16, 32, 64, 128, 256)
_QUESTION = 24
_BUDGET = 3 << 30


def run(
    disk: Path,
    models_path: Path,
    *,
    model: str,
    lengths: tuple[int, ...],
    rounds: int,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """Medians of interleaved runs: the plain engine, kvass cold, host tier, SSD tier with pages dropped."""
    loaded = load_model(model, dtype="bfloat16", models_path=models_path)
    with scratch(disk) as (host_path, disk_path):
        host = DirectoryTier(host_path / "tier", _BUDGET, name="host")
        slow = DirectoryTier(disk_path / "tier", _BUDGET, name="disk")
        with KVCache([host]) as host_cache, KVCache([slow]) as disk_cache:
            engines = {"host": Engine(loaded.model, host_cache), "disk": Engine(loaded.model, disk_cache)}
            random = np.random.default_rng(0)
            rows = []
            for length in (*_SHORTEST, *lengths):
                rows.append(_row(loaded.model, engines, slow.path, random, length, rounds))
                progress()
    faster = {
        side: next((row["context_tokens"] for row in rows if row[side] < row["plain"]), None)
        for side in ("host", "disk")
    }
    return {
        "bench": "ttft", "machine": machine() | {"torch_threads": torch.get_num_threads()}, "model": model,
        "dtype": "bfloat16", "question_tokens": _QUESTION, "rounds": rounds, "seconds": rows,
        "loading_wins_from_tokens": faster,
    }  # fmt: skip


def _row(
    model: Any, engines: dict[str, Engine], path: Path, random: np.random.Generator, length: int, rounds: int
) -> dict[str, Any]:
    def fresh(count: int) -> Any:
        return random.integers(3, engines["host"].vocabulary, count)

    context = fresh(length)
    for engine in engines.values():
        _first_token(engine, context)

    def question() -> Any:
        return np.concatenate([context, fresh(_QUESTION)])

    def hit(side: str) -> float:
        engines[side].overwrite_pool(length + _QUESTION + 1)
        if side == "disk":
            drop_pages(path)
        return _first_token(engines[side], question(), cached=length)

    sides = {
        "plain": lambda: answer(model, question().tolist(), 1).first_token_seconds,
        "cold": lambda: _first_token(engines["host"], fresh(length + _QUESTION), forget=True),
        "host": lambda: hit("host"),
        "disk": lambda: hit("disk"),
    }
    seconds = interleaved(sides, rounds)
    for engine in engines.values():
        assert engine.cache is not None
        engine.cache.forget(context, engine.namespace)
    medians = {name: round(statistics.median(took), 5) for name, took in seconds.items()}
    return {"context_tokens": length, **medians}


def _first_token(engine: Engine, prompt: Any, *, cached: int = 0, forget: bool = False) -> float:
    cache, usage = engine.cache, Usage()
    assert cache is not None
    began = time.perf_counter()
    steps = engine.generate(prompt, Sampling(max_tokens=1), usage=usage)
    next(steps)
    took = time.perf_counter() - began
    steps.close()  # type: ignore[attr-defined]
    cache.flush()
    assert usage.cached_tokens >= cached
    if forget:
        cache.forget(prompt, engine.namespace)
    return took

"""Time to first token over segments on the SSD tier, loaded, put together and repaired, against prefill."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvass.bench.plain import forward
from kvass.bench.report import drop_pages, interleaved, ratio_interval, ratios
from kvass.bench.scratch import scratch
from kvass.cache import KVCache, Pool
from kvass.chunks import as_tokens
from kvass.engines.transformers import Engine, load_model
from kvass.engines.transformers.pool_cache import TorchPool
from kvass.engines.transformers.workspace import TransformersWorkspace
from kvass.reuse.assembly import Segment, put
from kvass.reuse.prompt import Prompt
from kvass.reuse.repair import repair
from kvass.reuse.selectors import DEFAULT, selector
from kvass.reuse.stored import segments as stored_segments
from kvass.tiers.directory import DirectoryTier

SEGMENTS, TOKENS, QUESTION, BEFORE = 6, 512, 32, 32
_FRACTION = 0.15
_BUDGET = 3 << 30


def run(
    disk: Path, models_path: Path, model: str, rounds: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """`ttft_speedup`: seconds of the plain engine's prefill over those of finding segments, loading them
    (pages dropped), putting them in place and repairing them, both in bfloat16."""
    loaded = load_model(model, dtype="bfloat16", models_path=models_path)
    random = np.random.default_rng(0)

    def fresh(count: int) -> Any:
        return as_tokens(random.integers(10, loaded.model.config.vocab_size, count))

    before, question = fresh(BEFORE), fresh(QUESTION)
    segments = [fresh(TOKENS) for _ in range(SEGMENTS)]
    places = [(BEFORE + n * TOKENS, BEFORE + (n + 1) * TOKENS) for n in range(SEGMENTS)]
    prompt = Prompt(np.concatenate([before, *segments, question]).tolist(), BEFORE, places)
    with scratch(disk) as (_, folder):
        tier = DirectoryTier(folder / "tier", _BUDGET, name="disk")
        with KVCache([tier]) as cache:
            engine = Engine(loaded.model, cache)
            for one in segments:
                engine.read([*before.tolist(), *one.tolist()])
            cache.flush()
            namespace = engine.namespace
            workspace = TransformersWorkspace(loaded.model, TorchPool(namespace.spec, len(prompt.tokens)))
            parts: dict[str, list[float]] = {"load": [], "repair": []}

            def blended() -> float:
                drop_pages(tier.path)
                began = time.perf_counter()
                exact = Pool(namespace.spec, BEFORE)
                assert cache.load(cache.lookup(before, namespace), exact).tokens == BEFORE
                groups = range(len(namespace.spec.groups))
                first = Segment(0, 0, [exact.arrays(group, 0, BEFORE) for group in groups])
                read = stored_segments(cache, namespace, prompt.tokens, BEFORE)
                put(workspace, [first, *read])
                loaded_at = time.perf_counter()
                assert len(repair(prompt, workspace, selector(DEFAULT), _FRACTION).positions)
                ended = time.perf_counter()
                parts["load"].append(loaded_at - began)
                parts["repair"].append(ended - loaded_at)
                assert [(one.start, one.stop) for one in read] == places
                return ended - began

            def plain() -> float:
                began = time.perf_counter()
                forward(loaded.model, prompt.tokens, DynamicCache(config=loaded.model.config))
                return time.perf_counter() - began

            done = 0

            def step() -> None:
                nonlocal done
                done += 1
                progress(done // 2)

            blended()
            seconds = interleaved({"blended": blended, "plain": plain}, rounds, step)
    return {
        "ttft_speedup": round(statistics.median(ratios(seconds["plain"], seconds["blended"])), 3),
        "ttft_setting": {
            "segments": SEGMENTS, "segment_tokens": TOKENS, "question_tokens": QUESTION, "dtype": "bfloat16",
            "fraction": _FRACTION, "rounds": rounds, "threads": torch.get_num_threads(),
            "interval95": [round(e, 3) for e in ratio_interval(seconds["plain"], seconds["blended"])],
            "seconds": {
                **{name: round(statistics.median(took), 4) for name, took in seconds.items()},
                **{name: round(statistics.median(took), 4) for name, took in parts.items()},
            },
        },
    }  # fmt: skip

"""Time to first token over segments on the SSD tier, repaired while they arrive, against prefill; and what
loading and repairing take together, of what the longer takes alone."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvass.bench.plain import forward
from kvass.bench.report import drop_pages, interleaved, ratio_interval, ratios
from kvass.bench.scratch import scratch
from kvass.bench.throttled import ThrottledTier
from kvass.cache import KVCache, Pool
from kvass.chunks import as_tokens
from kvass.engines.transformers import Engine, load_model
from kvass.engines.transformers.pool_cache import TorchPool
from kvass.engines.transformers.workspace import TransformersWorkspace
from kvass.reuse.arriving import Arrival, blend
from kvass.reuse.assembly import Segment, put
from kvass.reuse.prompt import Prompt
from kvass.reuse.repair import repair
from kvass.reuse.selectors import DEFAULT, selector
from kvass.reuse.stored import Stored, segments

SEGMENTS, TOKENS, QUESTION, BEFORE = 6, 512, 32, 32
_FRACTION = 0.15
_BUDGET = 3 << 30


class _Bench:
    """A prompt whose segments lie in a tier, each read behind the same beginning."""

    def __init__(self, model: Any, cache: KVCache, tier: ThrottledTier):
        random = np.random.default_rng(0)

        def fresh(count: int) -> Any:
            return as_tokens(random.integers(10, model.config.vocab_size, count))

        self._cache, self._tier = cache, tier
        self._before, question = fresh(BEFORE), fresh(QUESTION)
        self._segments = [fresh(TOKENS) for _ in range(SEGMENTS)]
        places = [(BEFORE + n * TOKENS, BEFORE + (n + 1) * TOKENS) for n in range(SEGMENTS)]
        tokens = np.concatenate([self._before, *self._segments, question]).tolist()
        self.prompt = Prompt(tokens, BEFORE, places)
        engine = Engine(model, cache)
        for one in self._segments:
            engine.read([*self._before.tolist(), *one.tolist()])
        cache.flush()
        self._namespace = engine.namespace
        self._model = model
        self._pool = TorchPool(engine.namespace.spec, len(tokens))

    @property
    def bytes(self) -> int:
        """What is read of the segments."""
        return self._namespace.spec.bytes_per_token * SEGMENTS * (BEFORE + TOKENS)

    @contextmanager
    def _arriving(self) -> Iterator[tuple[TransformersWorkspace, list[Stored]]]:
        """Look everything up, load the beginning, open the segments; nothing of it is in memory before."""
        workspace = TransformersWorkspace(self._model, self._pool)
        first = Pool(self._namespace.spec, BEFORE)
        match = self._cache.lookup(self._before, self._namespace)
        assert self._cache.load(match, first).tokens == BEFORE
        groups = range(len(self._namespace.spec.groups))
        put(workspace, [Segment(0, 0, [first.arrays(group, 0, BEFORE) for group in groups])])
        with segments(self._cache, self._namespace, self.prompt.tokens, BEFORE) as found:
            assert [(one.start, one.stop) for one in found] == self.prompt.segments
            yield workspace, found

    def blended(self) -> float:
        """Seconds to the first token."""
        drop_pages(self._tier.path)
        began = time.perf_counter()
        with self._arriving() as (workspace, found):
            done = blend(self.prompt, workspace, found, selector(DEFAULT), _FRACTION)
            took = time.perf_counter() - began
        assert done is not None and len(done.positions)
        return took

    def loaded(self) -> float:
        """Seconds that loading and putting in place take by themselves."""
        drop_pages(self._tier.path)
        began = time.perf_counter()
        with self._arriving() as (workspace, found):
            arrival = Arrival(workspace, found)
            for layer in workspace.spec.places:
                arrival.wait(layer, ("k", "v"))
            took = time.perf_counter() - began
            arrival.close()
        return took

    def repaired(self) -> float:
        """Seconds that repairing takes by itself, of segments that are in place."""
        workspace = TransformersWorkspace(self._model, self._pool)
        for group in range(len(workspace.spec.groups)):
            workspace.arrays(group, 0, self.prompt.segments[-1][1])
        began = time.perf_counter()
        repair(self.prompt, workspace, selector(DEFAULT), _FRACTION)
        return time.perf_counter() - began

    def plain(self) -> float:
        """Seconds of the plain engine's prefill."""
        began = time.perf_counter()
        forward(self._model, self.prompt.tokens, DynamicCache(config=self._model.config))
        return time.perf_counter() - began


def run(
    disk: Path, models_path: Path, model: str, rounds: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """`ttft_speedup`: seconds of the plain engine's prefill over those of looking segments up, loading them
    (pages dropped), putting them in place and repairing them, both in bfloat16. `overlap_ratio`: the same
    seconds, with the tier slowed down so that loading takes as long as repairing, over those of the longer of
    both alone. Medians over pairs of one round."""
    loaded = load_model(model, dtype="bfloat16", models_path=models_path)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done // 5)

    with scratch(disk) as (_, folder):
        tier = ThrottledTier(folder / "tier", _BUDGET, name="disk")
        with KVCache([tier]) as cache:
            bench = _Bench(loaded.model, cache, tier)
            bench.blended()
            fast = interleaved({"blended": bench.blended, "plain": bench.plain}, rounds, step)
            alone = [bench.repaired() for _ in range(3)]
            tier.bytes_per_second = bench.bytes / statistics.median(alone)
            slow = interleaved(
                {"load": bench.loaded, "repair": bench.repaired, "both": bench.blended}, rounds, step
            )
    longer = [max(pair) for pair in zip(slow["load"], slow["repair"], strict=True)]
    return {
        "ttft_speedup": round(statistics.median(ratios(fast["plain"], fast["blended"])), 3),
        "overlap_ratio": round(statistics.median(ratios(slow["both"], longer)), 3),
        "ttft_setting": {
            "segments": SEGMENTS, "segment_tokens": TOKENS, "question_tokens": QUESTION, "dtype": "bfloat16",
            "fraction": _FRACTION, "selector": DEFAULT, "rounds": rounds, "threads": torch.get_num_threads(),
            "ttft_interval95": [round(e, 3) for e in ratio_interval(fast["plain"], fast["blended"])],
            "overlap_interval95": [round(e, 3) for e in ratio_interval(slow["both"], longer)],
            "slow_bytes_per_second": round(bench.bytes / statistics.median(alone)),
            "seconds": {
                name: round(statistics.median(took), 4) for name, took in {**fast, **slow}.items()
            },
        },
    }  # fmt: skip

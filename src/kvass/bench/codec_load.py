"""Loading lossy state from the SSD tier into engine-ready arrays, against the plain engine's prefill."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from kvass.bench.plain import forward
from kvass.bench.report import drop_pages, interleaved, ratio_interval, ratios
from kvass.bench.scratch import scratch
from kvass.cache import KVCache, Pool
from kvass.engines.transformers.load import LoadedModel, load_model
from kvass.keys import Namespace, lossy_namespace
from kvass.quality import Gate
from kvass.runner import KV, ModelRunner
from kvass.tiers.directory import DirectoryTier

_BUDGET_BYTES = 1 << 30
_STORE_SECONDS = 300.0
"""Storing is not measured, and encodes all chunks before it returns."""


def load_vs_recompute(
    codec: str, loaded: LoadedModel, runner: ModelRunner, tokens: Sequence[int], namespace: Namespace,
    disk: Path, models_path: Path, rounds: int, progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """`<codec>_load_vs_recompute`: seconds of the plain engine's prefill over those of lookup and load, with
    the pages of the SSD tier dropped before each; None, with a reason, where no certificate covers the codec
    within the default budget.

    The plain engine runs in float32 and in bfloat16, and the one that is faster here counts.
    """
    key, gate = f"{codec}_load_vs_recompute", Gate(models_path)
    verdict = gate.verdict(namespace, codec)
    if not verdict.allowed:
        return {key: None, f"{key}_missing": verdict.reason}
    source, target = Pool(namespace.spec, len(tokens)), Pool(namespace.spec, len(tokens))
    _fill(source, runner.prefill(tokens))
    target.fill(1)
    plain = {
        "float32": loaded.model,
        "bfloat16": load_model(str(loaded.directory), dtype="bfloat16", models_path=models_path).model,
    }
    with scratch(disk) as (_, folder):
        tier = DirectoryTier(folder / "tier", _BUDGET_BYTES, name="disk")
        with KVCache([tier], codecs={"disk": codec}, gate=gate, store_deadline=_STORE_SECONDS) as cache:
            ticket = cache.store(tokens, namespace, source).wait()
            cache.flush()
            spaces = [lossy_namespace(namespace, codec)]

            def load() -> float:
                drop_pages(tier.path)
                began = time.perf_counter()
                match = cache.lookup(tokens, namespace, approximate=spaces)
                result = cache.load(match, target)
                took = time.perf_counter() - began
                assert (result.tokens, result.exact_tokens) == (len(tokens), 0)
                return took

            def prefill(model: Any) -> float:
                began = time.perf_counter()
                forward(model, tokens, DynamicCache(config=model.config))
                return time.perf_counter() - began

            load()
            sides = {"load": load, **{name: lambda m=model: prefill(m) for name, model in plain.items()}}  # type: ignore[misc]
            done = 0

            def step() -> None:
                nonlocal done
                done += 1
                progress(done, rounds * len(sides))

            seconds = interleaved(sides, rounds, step)
    medians = {name: statistics.median(took) for name, took in seconds.items()}
    faster = min(plain, key=lambda name: medians[name])
    return {
        key: round(statistics.median(ratios(seconds[faster], seconds["load"])), 3),
        f"{key}_setting": {
            "tokens": len(tokens), "rounds": rounds, "recomputed_in": faster, "stored_bytes": ticket.bytes,
            "interval95": [round(end, 3) for end in ratio_interval(seconds[faster], seconds["load"])],
            "seconds": {name: round(one, 4) for name, one in medians.items()},
        },
    }  # fmt: skip


def _fill(pool: Pool, kv: KV) -> None:
    for number, arrays in enumerate(kv):
        for name, array in pool.arrays(number, 0, pool.capacity).items():
            array[:] = arrays[name]

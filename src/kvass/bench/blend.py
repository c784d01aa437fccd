"""`kvass bench blend`: prompts of segments that were read elsewhere, repaired by each selector, against full
prefill; what it costs in time; and how much of what moved is found again."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvass.bench import blend_time, blend_vllm, moved
from kvass.bench.report import machine
from kvass.calibrate.blending import items
from kvass.calibrate.repairing import ALL, DEFAULTS, NONE, Compared, Way, compare
from kvass.calibrate.statistics import mean_interval
from kvass.calibrate.texts import held_texts
from kvass.engines.transformers.load import load_model
from kvass.engines.transformers.runner import TransformersRunner
from kvass.reuse.selectors import DEFAULT

FRACTION: Final = 0.15
"""What selectors are compared at."""

_OTHERS: Final = [Way(name, FRACTION) for name in ("view", "boundary", "deviation", "random")]
_ASKED: Final = [NONE, Way(DEFAULT, FRACTION)]
_CHECKED: Final = 8
"""Prompts that `all` is computed of: it is full prefill again."""

Progress = Callable[[int, int], None]


def run(
    disk: Path, models_path: Path, *, model: str, prompts: int, rounds: int, vllm_rounds: int,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Quality over `prompts` prompts, then time to first token in `rounds` interleaved rounds (0: not), and
    in a real vLLM in `vllm_rounds` (0: not)."""
    loaded = load_model(model, dtype="float32", models_path=models_path)
    runner = TransformersRunner(loaded)
    asked = items(held_texts(), runner, prompts)
    total = len(asked) + rounds + vllm_rounds + 1
    found: list[Compared] = []
    for number, item in enumerate(asked):
        ways = [NONE, *DEFAULTS, *_OTHERS, *([ALL] if number < _CHECKED else [])]
        found.append(compare(item, runner, ways, _ASKED))
        progress(number + 1, total)
    report = {
        "bench": "blend", "machine": machine(), "model": loaded.name, "prompts": len(asked),
        "segments": {
            "each": len(asked[0].segments), "tokens": _spread([len(s) for one in asked for s in one.segments])
        },
        **summed_up(found),
    }  # fmt: skip
    report |= moved.run(disk, runner)
    progress(len(asked) + 1, total)
    if rounds:
        report |= blend_time.run(
            disk, models_path, model, rounds, lambda done: progress(len(asked) + 1 + done, total)
        )
    if vllm_rounds:
        report |= blend_vllm.run(
            disk, models_path, model=model, rounds=vllm_rounds,
            progress=lambda done: progress(len(asked) + 1 + rounds + done, total),
        )  # fmt: skip
    return report


def summed_up(found: Sequence[Compared]) -> dict[str, Any]:
    """The figures over all prompts; intervals by a bootstrap over them, differences in pairs."""

    def kl(way: Way) -> npt.NDArray[np.float64]:
        return np.array([one.kl[way] for one in found if way in one.kl])

    main = Way(DEFAULT, FRACTION)
    ways = list(dict.fromkeys(way for one in found for way in one.kl))
    rows = {}
    for way in ways:
        charged = statistics.fmean(one.fraction[way] for one in found if way in one.fraction)
        rows[str(way)] = {
            "kl": [round(one, 6) for one in mean_interval(kl(way).tolist())], "charged": round(charged, 4)
        }  # fmt: skip
    alone = mean_interval([one.no_context for one in found])
    rows["no context"] = {"kl": [round(one, 6) for one in alone], "charged": 0.0}
    against = {way.method: mean_interval((kl(main) - kl(way)).tolist()) for way in _OTHERS}
    kept = {
        "full": [one.full for one in found],
        **{str(way): [one.kept[way] for one in found] for way in _ASKED},
    }
    recall = {
        name: round(statistics.fmean(one for each in facts for one in each), 4)
        for name, facts in kept.items()
    }
    return {
        "fraction": FRACTION,
        "kl_query_vs_none": round(float(kl(main).mean() / kl(NONE).mean()), 4),
        **{f"query_vs_{name}_ci_high": round(interval[2], 6) for name, interval in against.items()},
        "kl_all_fp32": float(kl(ALL).mean()),
        "recall": recall,
        "recall_loss": round(recall["full"] - recall[str(main)], 4),
        "selectors": rows,
    }


def _spread(sizes: Sequence[int]) -> dict[str, float]:
    return {"least": min(sizes), "mean": round(statistics.fmean(sizes), 1), "most": max(sizes)}

"""`kvass bench blend`: prompts of segments that were read elsewhere, repaired by each selector, against full
prefill; what it costs in time; and how much of what moved is found again."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvass.bench import blend_time, moved
from kvass.bench.report import machine
from kvass.calibrate.blending import Item, assembled, completed, followed, items, read_segments
from kvass.calibrate.statistics import mean_interval
from kvass.calibrate.texts import held_texts
from kvass.engines.transformers.load import load_model
from kvass.engines.transformers.runner import TransformersRunner
from kvass.reuse.selectors import DEFAULT, selector
from kvass.runner import KV, ModelRunner

FRACTION: Final = 0.15
"""What selectors are compared at."""

FRACTIONS: Final = (0.05, FRACTION, 0.3)
OTHERS: Final = ("view", "boundary", "deviation", "random")
_CHECKED: Final = 8
"""Prompts that `all` is computed of: it is full prefill again."""

Progress = Callable[[int, int], None]


def run(
    disk: Path, models_path: Path, *, model: str, prompts: int, rounds: int, progress: Progress
) -> dict[str, Any]:
    """Quality over `prompts` prompts, then time to first token in `rounds` interleaved rounds (0: not)."""
    loaded = load_model(model, dtype="float32", models_path=models_path)
    runner = TransformersRunner(loaded)
    asked = items(held_texts(), runner, prompts)
    total = len(asked) + rounds + 1
    found: list[dict[str, Any]] = []
    for number, item in enumerate(asked):
        found.append(measured(item, runner, everything=number < _CHECKED))
        progress(number + 1, total)
    report = {
        "bench": "blend", "machine": machine(), "model": loaded.name, "prompts": len(asked),
        "segments": {
            "each": len(asked[0].segments), "tokens": _spread([len(s) for one in asked for s in one.segments])
        },
        **summed_up(found),
    }  # fmt: skip
    report |= moved.run(runner)
    progress(len(asked) + 1, total)
    if rounds:
        report |= blend_time.run(
            disk, models_path, model, rounds, lambda done: progress(len(asked) + 1 + done, total)
        )
    return report


def measured(item: Item, runner: ModelRunner, *, everything: bool) -> dict[str, Any]:
    """Of one prompt: mean KL of the continuation to full prefill, and the charged fraction, by selector and
    fraction; and which planted facts full prefill and each of them complete."""
    read, before = read_segments(item, runner), runner.prefill(item.system)
    prompt, follow = item.prompt(item.question), item.continued[:-1]
    exact = runner.prefill(prompt.tokens[:-1])
    reference = runner.continue_over(exact, [prompt.tokens[-1], *follow])
    probabilities = np.exp(reference)
    kl: dict[str, float] = {}
    charged: dict[str, float] = {}

    def note(key: str, log: npt.NDArray[np.float32]) -> None:
        kl[key] = float(np.einsum("nv,nv->n", probabilities, reference - log).mean())

    def ask(name: str, fraction: float) -> None:
        workspace = assembled(item, before, read, runner, len(item.question) + len(follow))
        done, log = followed(prompt, workspace, selector(name), fraction, follow)
        key = f"{name} {fraction:g}"
        note(key, log)
        charged[key] = done.fraction

    ask("none", 0)
    for fraction in FRACTIONS:
        ask(DEFAULT, fraction)
    for name in OTHERS:
        ask(name, FRACTION)
    if everything:
        ask("all", 1)
    note("no context", runner.continue_over(before, [*item.question, *follow])[-len(follow) - 1 :])
    facts: dict[str, list[bool]] = {"full": [], "none": [], DEFAULT: []}
    context = _cut(exact, len(prompt.tokens) - len(item.question))
    for branch in item.facts:
        (chosen,) = runner.choose_over(context, [branch])
        facts["full"].append(bool(np.array_equal(chosen, branch.answer)))
        asking, rest = item.prompt(branch.prompt), branch.answer[:-1]
        for name, fraction in (("none", 0.0), (DEFAULT, FRACTION)):
            workspace = assembled(item, before, read, runner, len(branch.prompt) + len(rest))
            _, log = followed(asking, workspace, selector(name), fraction, rest)
            facts[name].append(completed(log, branch.answer))
    return {"kl": kl, "charged": charged, "facts": facts}


def summed_up(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over all prompts; intervals by a bootstrap over them, differences in pairs."""

    def kl(key: str) -> npt.NDArray[np.float64]:
        return np.array([one["kl"][key] for one in found if key in one["kl"]])

    main = f"{DEFAULT} {FRACTION:g}"
    keys = list(dict.fromkeys(key for one in found for key in one["kl"]))
    rows = {
        key: {
            "kl": [round(one, 6) for one in mean_interval(kl(key).tolist())],
            "charged": round(
                statistics.fmean(one["charged"][key] for one in found if key in one["charged"]), 4
            )
            if any(key in one["charged"] for one in found)
            else 0.0,
        }
        for key in keys
    }
    against = {name: mean_interval((kl(main) - kl(f"{name} {FRACTION:g}")).tolist()) for name in OTHERS}
    recall = {name: _share(found, name) for name in found[0]["facts"]}
    return {
        "fraction": FRACTION,
        "kl_query_vs_none": round(float(kl(main).mean() / kl("none 0").mean()), 4),
        **{f"query_vs_{name}_ci_high": round(interval[2], 6) for name, interval in against.items()},
        "kl_all_fp32": float(kl("all 1").mean()),
        "recall": recall,
        "recall_loss": round(recall["full"] - recall[DEFAULT], 4),
        "selectors": rows,
    }


def _share(found: Sequence[Mapping[str, Any]], name: str) -> float:
    kept = [one for each in found for one in each["facts"][name]]
    return round(statistics.fmean(kept), 4)


def _cut(kv: KV, tokens: int) -> KV:
    return [{name: array[:, :tokens] for name, array in arrays.items()} for arrays in kv]


def _spread(sizes: Sequence[int]) -> dict[str, float]:
    return {"least": min(sizes), "mean": round(statistics.fmean(sizes), 1), "most": max(sizes)}

"""A model's codec tables: learnt from calibration texts, with steps for levels by what they cost on these."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from kvass.calibrate.certify import as_stored
from kvass.calibrate.evaluate import evaluate
from kvass.calibrate.fit import Fitted, Reading, fit, importance
from kvass.calibrate.symbols import (
    count,
    group_arrays,
    level_arrays,
    no_counts,
    symbol_arrays,
)
from kvass.calibrate.texts import Sequenced
from kvass.codecs.tables import Tables, rope_arrays, write_tables
from kvass.codecs.transform import Transform
from kvass.container import Array
from kvass.engines.transformers.probing import Probing
from kvass.keys import Namespace
from kvass.ropes import frequencies
from kvass.runner import KV, ModelRunner

LEVELS: Final[Mapping[str, float]] = {"q1": 0.00008, "q2": 0.00034, "q3": 0.0015, "q4": 0.0035}
"""The mean KL per token that each level has on calibration texts. Held ones cost about three times as much,
which is to stay well below 0.0005, 0.002 and 0.01; `q4` is bound by the facts that it may lose, not by KL."""

_MOST_POSITIONS = 131_072

_PASSES = 3
LEARNT_TOKENS: Final = 1536
"""Of a calibration text, what is learnt from."""

_CONTINUED = 256
_TUNED_ON = 3

Say = Callable[[str], None]


def make_tables(
    runner: ModelRunner, probing: Probing, namespace: Namespace, texts: Sequence[Sequenced],
    repeating: Sequence[Sequenced], say: Say,
) -> bytes:  # fmt: skip
    """The bytes of a tables file for `runner`'s model. `texts`: one at least, for calibration; `repeating`:
    such whose continuations ask for what stands in them, which no step is chosen by."""
    ropes = _rope_arrays(runner)
    turning = Tables.parse(write_tables(ropes))
    groups = range(len(runner.spec.groups))
    readings: list[list[Reading]] = [[] for _ in groups]
    read: list[KV] = []
    learnt = [
        Sequenced(
            t.name, t.domain, t.read[:LEARNT_TOKENS], (t.read[LEARNT_TOKENS:] + t.continued)[:_CONTINUED]
        )
        for t in (*texts, *repeating)
    ]
    for number, one in enumerate(learnt):
        say(f"reading {one.name} ({number + 1} of {len(learnt)})")
        kv = runner.prefill(one.read)
        read.append(kv)
        queries = probing.queries(kv, one.continued)
        passes = list(probing.gradients(kv, one.continued, _PASSES, seed=number))
        for group in groups:
            k, v = (kv[group][name].astype(np.float32) for name in ("k", "v"))
            gradients = [each[group] for each in passes]
            readings[group].append(
                Reading(k, v, [g.k for g in gradients], [g.v for g in gradients], queries[group])
            )
    say("fitting")
    spec = runner.spec.groups
    sizes = [importance(text) for text in zip(*readings, strict=True)]
    fitted = [fit(spec[group], turning.rope(group), readings[group], sizes) for group in groups]
    readings.clear()
    guess = _guess(fitted)
    tried = [guess * 2.0**exponent for exponent in range(-4, 3)]
    counts = no_counts()
    for group in groups:
        for kv in read:
            k, v = (kv[group][name].astype(np.float32) for name in ("k", "v"))
            count(counts, spec[group], fitted[group], turning.rope(group), k, v, tried)
    arrays: dict[str, Array] = {**ropes, **symbol_arrays(counts)}
    for group in groups:
        arrays |= group_arrays(group, fitted[group])
    steps = _steps(
        runner, namespace, arrays, tried, learnt[: len(texts) : max(1, len(texts) // _TUNED_ON)], say
    )
    for name, step in steps.items():
        arrays |= level_arrays(name, step)
    return write_tables(arrays, {"model": runner.name})


def _rope_arrays(runner: ModelRunner) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for number, group in enumerate(runner.spec.groups):
        if group.rope is not None:
            found |= rope_arrays(number, frequencies(group.rope), _MOST_POSITIONS)
    return found


def _guess(fitted: Sequence[Fitted]) -> float:
    """A step of about two bits an element: somewhat under the deviations' geometric mean."""
    logs = [np.log2(side.deviations).ravel() for one in fitted for side in (one.k, one.v)]
    return float(2 ** (np.concatenate(logs).mean() - 1))


def _steps(
    runner: ModelRunner, namespace: Namespace, arrays: Mapping[str, Array], tried: Sequence[float],
    texts: Sequence[Sequenced], say: Say,
) -> dict[str, float]:  # fmt: skip
    """A step for each level, by what those `tried` cost on some of the texts, between which KL is a power."""
    named = dict(arrays)
    for number, step in enumerate(tried):
        named |= level_arrays(f"try{number}", step)
    tables = Tables.parse(write_tables(named))
    coders = {f"try{n}": as_stored(Transform(tables, f"try{n}"), namespace) for n in range(len(tried))}
    say("choosing the levels' steps")
    found = evaluate(runner, coders, texts, [])
    kl = [max(1e-9, float(np.mean([one.mean() for one in found[name].kl]))) for name in coders]
    logs = np.maximum.accumulate(np.log(kl)) + np.arange(len(kl)) * 1e-6
    chosen = {}
    for name, aim in LEVELS.items():
        place = float(np.interp(math.log(aim), logs, np.log(tried)))
        chosen[name] = math.exp(place)
    return chosen

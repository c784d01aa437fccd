"""`kvass bench codec`: what codecs store and cost beside published schemes, and how fast they are."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvass.bench import codec_load, codec_speed
from kvass.bench.codec_coders import baseline_coders, our_codecs, our_coders
from kvass.bench.codec_pareto import Point, compared
from kvass.bench.report import installed, machine
from kvass.calibrate.certify import guarded, measure
from kvass.calibrate.tasks import fact_contexts
from kvass.calibrate.texts import calibration_texts, held_texts, sequenced
from kvass.engines.transformers.load import certified_namespace, load_model
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import ModelFilesError
from kvass.quality import Gate, Measured
from kvass.runner import ModelRunner
from kvass.spec import numpy_dtype

LEVELS = ("q1", "q2", "q3", "q4")
"""The codecs that are held against the baselines' line."""

LOADED_TOKENS = 4096
_FAST_BYTES = 96 << 20
"""Of raw KV, what a pass of the speeds goes over at least; and three times the last-level cache."""

Progress = Callable[[int, int], None]


class Found(NamedTuple):
    """The report, and what was measured of kvass' codecs and of the baselines."""

    report: dict[str, Any]
    ours: list[Measured]
    baselines: list[Measured]


def run(
    disk: Path, models_path: Path, *, model: str, texts: int, contexts: int, codecs: Sequence[str],
    rounds: int, progress: Progress,
) -> Found:  # fmt: skip
    """Measure codecs and baselines on the first `texts` held texts, codecs also on `contexts` contexts of
    planted facts, then speeds and loading in `rounds` interleaved rounds (0: not at all).

    Raises ModelFilesError where the model is not calibrated, InputError for an unknown codec.
    """
    loaded = load_model(model, dtype="float32", models_path=models_path)
    runner = TransformersRunner(loaded)
    namespace = certified_namespace(model, models_path)
    tables = Gate(models_path).tables(namespace)
    if tables is None:
        raise ModelFilesError(f"{model} has no codec tables; run `kvass calibrate {model}` first")
    made, missing = our_codecs(codecs, tables)
    held = sequenced(held_texts(), runner)
    chosen = held[:texts]
    facts = fact_contexts(held_texts(), runner, contexts=contexts) if contexts else []
    known = [runner.prefill(one.read) for one in sequenced(calibration_texts(), runner)]
    others, left_out = baseline_coders(runner.spec, tables, known)
    del known
    ours = measure(runner, our_coders(made, namespace), chosen, facts, progress, guarded(made))
    theirs = measure(runner, others, chosen, [], progress)  # for the line through them, facts do not matter
    figures = flat(ours, theirs, 8 * numpy_dtype(runner.spec.groups[0].dtype).itemsize)
    if rounds:
        sample = _sample(runner, [one.read for one in held])
        figures |= codec_speed.speeds(made, tables, sample, rounds, progress)
        del sample
        tokens = [token for one in held for token in one.read][:LOADED_TOKENS]
        figures |= codec_load.load_vs_recompute(
            "q2", loaded, runner, tokens, namespace, disk, models_path, rounds, progress
        )
    prefix = "gemma_" if str(loaded.model.config.model_type).startswith("gemma") else ""
    report = {
        "bench": "codec", "machine": _machine(), "model": loaded.name, "tables": tables.digest,
        "texts": {one.name: len(one.read) for one in chosen}, "contexts": len(facts),
        "missing": missing | left_out,
        **{f"{prefix}{name}": value for name, value in figures.items()},
        "codecs": {one.codec: row(one) for one in ours},
        "baselines": {one.codec: row(one, ours=False) for one in theirs},
    }  # fmt: skip
    return Found(report, ours, theirs)


def flat(ours: Sequence[Measured], baselines: Sequence[Measured], raw_bits: int) -> dict[str, Any]:
    """The figures that stand at the top of a report: `<codec>_bits`, `<codec>_kl`,
    `<codec>_facts_lost_high` of each codec, `lossless_ratio`, and how the levels stand to the baselines."""
    found: dict[str, Any] = {}
    for one in ours:
        found |= {
            f"{one.codec}_bits": round(one.bits, 4),
            f"{one.codec}_kl": one.kl_mean,
            f"{one.codec}_facts_lost_high": one.facts_lost_high if one.facts_tried else None,
        }
        if one.codec == "lossless":
            found["lossless_ratio"] = round(raw_bits / one.bits, 4)
    levels: Mapping[str, Point] = {
        one.codec: Point(one.bits, one.kl_mean) for one in ours if one.codec in LEVELS
    }
    return found | compared(levels, [Point(one.bits, one.kl_mean) for one in baselines])


def row(one: Measured, *, ours: bool = True) -> dict[str, Any]:
    """What a report says of one codec; of `ours`, also what only they were asked."""
    more = {
        "kl_early": one.kl_early, "facts_tried": one.facts_tried, "facts_lost": one.facts_lost,
        "facts_lost_high": one.facts_lost_high if one.facts_tried else None,
    }  # fmt: skip
    return {
        "bits": round(one.bits, 4), "kl": one.kl_mean, "kl_interval95": [one.kl_low, one.kl_high],
        "kl_p99": one.kl_p99, "top1": one.top1, "ppl_ratio": one.ppl_ratio, **(more if ours else {}),
    }  # fmt: skip


def _sample(runner: ModelRunner, sequences: Sequence[Sequence[int]]) -> list[codec_speed.Piece]:
    """Chunks of real KV, more than the last-level cache holds where there are so many."""
    wanted = max(_FAST_BYTES, 3 * codec_speed.last_level_cache())
    found: list[codec_speed.Piece] = []
    for tokens in sequences:
        if sum(piece.nbytes for piece in found) >= wanted:
            break
        found += codec_speed.pieces(runner.prefill(tokens), runner.spec)
    return found


def _machine() -> dict[str, Any]:
    found = machine()
    found["packages"] |= {name: installed(name) for name in ("numba", "zstandard", "lz4")}
    return found

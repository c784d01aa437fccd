"""Calibrating one model: tables from calibration texts, then a certificate on held ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvass.calibrate.certify import as_stored, guarded, measure
from kvass.calibrate.lessons import lessons
from kvass.calibrate.repairing import PROMPTS, measure_repair
from kvass.calibrate.tables import LEARNT_TOKENS, make_tables
from kvass.calibrate.tasks import fact_contexts
from kvass.calibrate.texts import calibration_texts, held_texts, sequenced
from kvass.codecs import registry
from kvass.codecs.tables import Tables
from kvass.engines.transformers.load import LoadedModel
from kvass.engines.transformers.probing import Probing
from kvass.engines.transformers.runner import TransformersRunner
from kvass.keys import Namespace
from kvass.quality import (
    BlendCertificate,
    Certificate,
    certify,
    certify_blends,
    keep_blends,
    keep_calibrated,
)

CERTIFIED: Final = ("lossless", "int8", "kivi4", "kivi2", "q1", "q2", "q3", "q4")
"""Codecs that a certificate tells of."""


def calibrate_repair(
    loaded: LoadedModel, namespace: Namespace, models_path: Path, *, texts: Path | None,
    progress: Callable[[int, int], None], prompts: int = PROMPTS,
) -> tuple[Path, BlendCertificate]:  # fmt: skip
    """Measure repair of so many prompts of moved segments on held texts, and keep the certificate; its
    folder, and it.

    `loaded` and `namespace` as in `calibrate`. Raises UnsupportedModelError where KV cannot be moved.
    """
    runner = TransformersRunner(loaded)
    alone, measured = measure_repair(held_texts(texts), runner, progress, prompts)
    certificate = certify_blends(namespace, prompts, alone, measured)
    return keep_blends(models_path, namespace, certificate), certificate


def calibrate(
    loaded: LoadedModel, namespace: Namespace, models_path: Path, *, texts: Path | None,
    say: Callable[[str], None], progress: Callable[[int, int], None],
) -> tuple[Path, Certificate]:  # fmt: skip
    """Learn, measure, and keep both files; their folder, and the certificate.

    `loaded`: in float32; `namespace`: the model's, as certificates are bound to it. The tables are kept as
    soon as they are there, the certificate once all is measured: stopped between, nothing is certified.
    """
    runner = TransformersRunner(loaded)
    learnt = calibration_texts(texts)
    repeating = lessons(learnt, runner, LEARNT_TOKENS)
    probing = Probing(loaded, runner.spec)
    raw = make_tables(runner, probing, namespace, sequenced(learnt, runner), repeating, say)
    keep_calibrated(models_path, namespace, raw, None)
    tables = Tables.parse(raw)
    say("reading held texts, and measuring each codec on them")
    held = held_texts(texts)
    codecs = {name: registry.codec(name, tables) for name in CERTIFIED}
    coders = {name: as_stored(one, namespace) for name, one in codecs.items()}
    facts = fact_contexts(held, runner)
    measured = measure(runner, coders, sequenced(held, runner), facts, progress, guarded(codecs))
    certificate = certify(namespace, tables.digest, measured)
    return keep_calibrated(models_path, namespace, raw, certificate), certificate

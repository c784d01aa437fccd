"""The gate that every use of approximate state passes: it asks the certificates, within a budget."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from kvass.codecs.tables import Tables
from kvass.errors import ModelFilesError
from kvass.keys import Namespace
from kvass.quality.blends import BLENDS_FILE, BlendCertificate, read_blends
from kvass.quality.budget import DEFAULT_BUDGET, Budget, Verdict, judged
from kvass.quality.certificates import Certificate, binding, bound_to, calibrated_folder, read_certificate

_FILES: Final = ("tables.safetensors", "certificate.json", BLENDS_FILE)
_LOOK_SECONDS: Final = 2.0
"""How often the files of a model are looked at again."""


class _Known(NamedTuple):
    """What is known of one model, from which files, looked at when."""

    looked: float
    stamps: tuple[object, ...]
    tables: Tables | None
    certificate: Certificate | None
    refusal: Verdict | None
    blends: BlendCertificate | Verdict


class Gate:
    """Says which lossy codecs and which repair may be used for which model, from the files that `kvass
    calibrate` wrote.

    Cheap to ask: a model's files are read once, and looked at again every few seconds at most.
    """

    def __init__(self, models_path: Path, *, clock: Callable[[], float] = time.monotonic):
        self._models_path = models_path
        self._clock = clock
        self._guard = threading.Lock()
        self._known: dict[tuple[Path, str], _Known] = {}

    def verdict(self, namespace: Namespace, codec: str, budget: Budget = DEFAULT_BUDGET) -> Verdict:
        """Whether `codec` may be used for that namespace's model within the budget."""
        known = self._of(namespace)
        if known.refusal is not None or known.certificate is None:
            return known.refusal or _no_certificate(namespace)
        return _judge(known.certificate, codec, budget)

    def allowed(self, namespace: Namespace, budget: Budget = DEFAULT_BUDGET) -> list[str]:
        """The codecs that may be used for that namespace's model, the most faithful first."""
        known = self._of(namespace)
        if known.refusal is not None or known.certificate is None:
            return []
        ranked = sorted(known.certificate.measured, key=lambda one: one.kl_mean)
        return [one.codec for one in ranked if _judge(known.certificate, one.codec, budget).allowed]

    def blend(self, namespace: Namespace, method: str, chosen: float, budget: Budget) -> Verdict:
        """Whether prompts of that namespace's model may be answered from segments that were moved and
        repaired, `chosen` of their tokens being computed anew as `method` says."""
        known = self._of(namespace).blends
        return known if isinstance(known, Verdict) else known.verdict(method, chosen, budget)

    def blends(self, namespace: Namespace) -> BlendCertificate | None:
        """What repair was measured to cost that namespace's model."""
        known = self._of(namespace).blends
        return None if isinstance(known, Verdict) else known

    def tables(self, namespace: Namespace, *, fresh: bool = False) -> Tables | None:
        """The tables of that namespace's model, None where there are none that can be read. `fresh`: look at
        the file now."""
        return self._of(namespace, fresh=fresh).tables

    def certificate(self, namespace: Namespace) -> Certificate | None:
        """The certificate of that namespace's model, where there is one that holds."""
        known = self._of(namespace)
        return None if known.refusal else known.certificate

    def _of(self, namespace: Namespace, *, fresh: bool = False) -> _Known:
        # not by root: tenants, and the prompts of blended state, each have one of their own
        folder, now = calibrated_folder(self._models_path, namespace), self._clock()
        key = folder, namespace.numerics
        known = self._known.get(key)
        if known is not None and not fresh and now - known.looked < _LOOK_SECONDS:
            return known
        stamps = tuple(map(_stamp, (folder / name for name in _FILES)))
        if known is not None and known.stamps == stamps:
            known = known._replace(looked=now)
        else:
            known = _Known(now, stamps, *_read(folder, namespace), _read_blends(folder, namespace))
        with self._guard:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = known
        return known


_MOST: Final = 256
"""Models that are remembered at once."""


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(folder: Path, namespace: Namespace) -> tuple[Tables | None, Certificate | None, Verdict | None]:
    tables: Tables | None = None
    try:
        if (folder / "tables.safetensors").exists():
            tables = Tables.load(folder / "tables.safetensors")
        if not (folder / "certificate.json").exists():
            return tables, None, _no_certificate(namespace)
        certificate = read_certificate(folder / "certificate.json")
    except (ModelFilesError, OSError) as error:
        return tables, None, Verdict(False, str(error), "unreadable")
    if bound_to(certificate) != binding(namespace):
        reason = f"the certificate in {folder} is of another model; calibrate {namespace.model}"
        return tables, certificate, Verdict(False, reason, "other model")
    if tables is None:
        reason = f"there is no tables.safetensors in {folder}; put it back, or calibrate {namespace.model}"
        return tables, certificate, Verdict(False, reason, "no tables")
    if certificate.tables != tables.digest:
        reason = f"the certificate in {folder} was measured with other tables; calibrate the model anew"
        return tables, certificate, Verdict(False, reason, "other tables")
    return tables, certificate, None


def _read_blends(folder: Path, namespace: Namespace) -> BlendCertificate | Verdict:
    try:
        if not (folder / BLENDS_FILE).exists():
            return _no_certificate(namespace, " --blends")
        found = read_blends(folder / BLENDS_FILE)
    except (ModelFilesError, OSError) as error:
        return Verdict(False, str(error), "unreadable")
    if bound_to(found) != binding(namespace):
        reason = f"the certificate in {folder} is of another model; calibrate {namespace.model}"
        return Verdict(False, reason, "other model")
    return found


def _no_certificate(namespace: Namespace, option: str = "") -> Verdict:
    numerics = "" if namespace.numerics.startswith("shared:") or not namespace.numerics else (
        " and keep KV under the name of the model's files: allow_lossy, a lossy codec or shared_numerics"
    )  # fmt: skip
    command = f"run `kvass calibrate{option}` with the model{numerics}"
    reason = f"no certificate for this KV of {namespace.model}; {command}"
    return Verdict(False, reason, "no certificate")


def _judge(certificate: Certificate, codec: str, budget: Budget) -> Verdict:
    found = next((one for one in certificate.measured if one.codec == codec), None)
    if found is None:
        return Verdict(
            False, f"the certificate of {certificate.model} does not cover {codec!r}", "not measured"
        )
    early = not found.kl_early <= budget.kl
    most, where = (found.kl_early, " where a text is left early") if early else (found.kl_mean, "")
    return judged(codec, certificate.model, most, found.facts_lost_high, budget, where)

"""Certificates, which say what an approximation costs in quality, and the gate that asks them."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from kvass.codecs.tables import Tables
from kvass.errors import InputError, ModelFilesError
from kvass.keys import Namespace, lossy_namespace
from kvass.models import build_once

CERTIFICATE_FORMAT: Final = 1
_MAX_CERTIFICATE_BYTES: Final = 1 << 20
_LOOK_SECONDS: Final = 2.0
"""How often the files of a model are looked at again."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One codec on texts that it was not calibrated on, against the exact model.

    `bits`: stored per element of K and V, headers included. `kl_*`: KL divergence per token in nats, its mean
    with a 95% interval, and the 99th percentile; `kl_early`: the mean where a prompt leaves a stored text
    halfway, as the cache then loads it. `top1`: share of tokens with the same most likely next one.
    `ppl_ratio`: perplexity over the exact model's. `facts_tried`: planted facts that the exact model
    retrieves; `facts_lost`: of those, not retrieved; `facts_lost_high`: 95% upper bound of the share lost.
    """

    codec: str
    bits: float
    kl_mean: float
    kl_low: float
    kl_high: float
    kl_early: float
    kl_p99: float
    top1: float
    ppl_ratio: float
    facts_tried: int
    facts_lost: int
    facts_lost_high: float


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured for one model, and which model, adapter, spec and tables that holds for.

    `model` is a name for people. `weights`, `config` and `adapter` as in a namespace; `spec`: digest of the
    spec without RoPE; `tables`: digest of the codecs' tables; `digest`: of all the rest (see `sealed`).
    """

    format: int
    model: str
    weights: str
    config: str
    adapter: str
    spec: str
    tables: str
    measured: list[Measured]
    digest: str = ""

    def sealed(self) -> "Certificate":
        """The same with its digest: BLAKE3, in hex, of the canonical JSON with `digest` empty."""
        bare = msgspec.structs.replace(self, digest="")
        raw = msgspec.json.encode(bare, order="sorted")
        return msgspec.structs.replace(bare, digest=blake3(raw).hexdigest())


class Budget(NamedTuple):
    """What an approximation may cost: mean KL per token in nats, also where a prompt leaves a stored text
    early, and the upper bound of facts lost."""

    kl: float = 0.01
    facts_lost: float = 0.025


DEFAULT_BUDGET: Final = Budget()


class Verdict(NamedTuple):
    """Whether an approximation may be used, and why, for people; `kind` is the reason in a word or two."""

    allowed: bool
    reason: str
    kind: str = "allowed"


class _Known(NamedTuple):
    """What is known of one model, from which files, looked at when."""

    looked: float
    stamps: tuple[object, ...]
    tables: Tables | None
    certificate: Certificate | None
    refusal: Verdict | None


def binding(namespace: Namespace) -> tuple[str, str, str, str]:
    """What a certificate is bound to: digests of weights, config, adapter and spec without RoPE."""
    plain = lossy_namespace(namespace, "any")
    return plain.weights, plain.config, plain.adapter, plain.spec.digest()


def calibrated_folder(models_path: Path, namespace: Namespace) -> Path:
    """Where the tables and the certificate of that namespace's model are, or belong."""
    hasher = blake3(derive_key_context="kvass calibrated v1")
    for field in binding(namespace):
        hasher.update(len(field).to_bytes(4, "little") + field.encode())
    return models_path / "calibrated" / hasher.hexdigest()


def certify(namespace: Namespace, tables: str, measured: list[Measured]) -> Certificate:
    """A sealed certificate for that namespace's model and the tables of that digest."""
    weights, config, adapter, spec = binding(namespace)
    return Certificate(
        format=CERTIFICATE_FORMAT, model=namespace.model, weights=weights, config=config, adapter=adapter,
        spec=spec, tables=tables, measured=measured,
    ).sealed()  # fmt: skip


def read_certificate(path: Path) -> Certificate:
    """Read and check a certificate. Raises ModelFilesError where it is missing, damaged or altered."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_CERTIFICATE_BYTES + 1)
        found = msgspec.json.decode(raw, type=Certificate)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelFilesError(
            f"cannot read the certificate {path}: {error}; calibrate the model anew"
        ) from error
    if len(raw) > _MAX_CERTIFICATE_BYTES or found.format != CERTIFICATE_FORMAT:
        raise ModelFilesError(f"the certificate {path} is of another format; calibrate the model anew")
    if not _sound(found.measured):
        raise ModelFilesError(f"the certificate {path} contradicts itself; calibrate the model anew")
    if found.sealed() != found:
        raise ModelFilesError(f"the certificate {path} was altered or damaged; calibrate the model anew")
    return found


def _sound(measured: list[Measured]) -> bool:
    """Whether figures can be such: also where somebody sealed others, nothing is allowed by them."""
    for one in measured:
        costs = (one.bits, one.kl_mean, one.kl_early)
        if not (
            all(0 <= cost < math.inf for cost in costs)
            and 0 <= one.facts_lost <= one.facts_tried
            and one.facts_lost <= one.facts_tried * one.facts_lost_high
            and (one.facts_tried or one.facts_lost_high >= 1)
        ):
            return False
    return len({one.codec for one in measured}) == len(measured)


def keep_calibrated(
    models_path: Path, namespace: Namespace, tables: bytes, certificate: Certificate | None
) -> Path:
    """Put tables, and the certificate that was measured with them, in place; the folder.

    Each file appears whole. An older certificate goes first: nothing is certified by halves. Raises
    ModelFilesError where the folder cannot be written, InputError where the two do not belong together.
    """
    folder = calibrated_folder(models_path, namespace)
    if certificate is not None and (
        certificate.tables != blake3(tables).hexdigest() or _bound_to(certificate) != binding(namespace)
    ):
        raise InputError("the certificate is of other tables or of another model; measure with these")
    try:
        (folder / "certificate.json").unlink(missing_ok=True)
    except OSError as error:
        raise ModelFilesError(
            f"cannot write {folder}: {error}; the setting models_path says where models are kept"
        ) from error
    _replace(folder / "tables.safetensors", tables)
    if certificate is not None:
        raw = msgspec.json.format(msgspec.json.encode(certificate.sealed()), indent=1)
        _replace(folder / "certificate.json", raw)
    return folder


def _bound_to(certificate: Certificate) -> tuple[str, str, str, str]:
    return certificate.weights, certificate.config, certificate.adapter, certificate.spec


def _replace(path: Path, raw: bytes) -> None:
    build_once(path, lambda draft: draft.write_bytes(raw), ready=lambda _: False)


class Gate:
    """Says which lossy codecs may be used for which model, from the files that `kvass calibrate` wrote.

    Cheap to ask: a model's files are read once, and looked at again every few seconds at most.
    """

    def __init__(self, models_path: Path, *, clock: Callable[[], float] = time.monotonic):
        self._models_path = models_path
        self._clock = clock
        self._guard = threading.Lock()
        self._known: dict[bytes, _Known] = {}

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

    def tables(self, namespace: Namespace, *, fresh: bool = False) -> Tables | None:
        """The tables of that namespace's model, None where there are none that can be read. `fresh`: look at
        the file now."""
        return self._of(namespace, fresh=fresh).tables

    def certificate(self, namespace: Namespace) -> Certificate | None:
        """The certificate of that namespace's model, where there is one that holds."""
        known = self._of(namespace)
        return None if known.refusal else known.certificate

    def _of(self, namespace: Namespace, *, fresh: bool = False) -> _Known:
        root, now = namespace.root(), self._clock()
        known = self._known.get(root)
        if known is not None and not fresh and now - known.looked < _LOOK_SECONDS:
            return known
        folder = calibrated_folder(self._models_path, namespace)
        stamps = tuple(map(_stamp, (folder / "tables.safetensors", folder / "certificate.json")))
        if known is not None and known.stamps == stamps:
            known = known._replace(looked=now)
        else:
            known = _Known(now, stamps, *_read(folder, namespace))
        with self._guard:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[root] = known
        return known


_MOST: Final = 4096
"""Namespaces, of which each tenant has its own, that are remembered at once."""


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
    if _bound_to(certificate) != binding(namespace):
        reason = f"the certificate in {folder} is of another model; calibrate {namespace.model}"
        return tables, certificate, Verdict(False, reason, "other model")
    if tables is None:
        reason = f"there is no tables.safetensors in {folder}; put it back, or calibrate {namespace.model}"
        return tables, certificate, Verdict(False, reason, "no tables")
    if certificate.tables != tables.digest:
        reason = f"the certificate in {folder} was measured with other tables; calibrate the model anew"
        return tables, certificate, Verdict(False, reason, "other tables")
    return tables, certificate, None


def _no_certificate(namespace: Namespace) -> Verdict:
    numerics = "" if namespace.numerics.startswith("shared:") or not namespace.numerics else (
        " and keep KV under the name of the model's files: allow_lossy, a lossy codec or shared_numerics"
    )  # fmt: skip
    reason = (
        f"no certificate for this KV of {namespace.model}; run `kvass calibrate` with the model{numerics}"
    )
    return Verdict(False, reason, "no certificate")


def _judge(certificate: Certificate, codec: str, budget: Budget) -> Verdict:
    found = next((one for one in certificate.measured if one.codec == codec), None)
    if found is None:
        return Verdict(
            False, f"the certificate of {certificate.model} does not cover {codec!r}", "not measured"
        )
    # written so that what is no number is over every budget
    if not (found.kl_mean <= budget.kl and found.kl_early <= budget.kl):
        early = not found.kl_early <= budget.kl
        most, where = (found.kl_early, " where a text is left early") if early else (found.kl_mean, "")
        cost = f"{codec} costs {certificate.model} a KL of {most:.4g} a token{where}"
        reason = f"{cost}, over the {budget.kl:g}"
        return Verdict(False, f"{reason} that lossy_max_kl or the request allows", "kl")
    if not found.facts_lost_high <= budget.facts_lost:
        reason = f"{codec} may lose {certificate.model} {found.facts_lost_high:.2%} of facts"
        return Verdict(
            False,
            f"{reason}, over the {budget.facts_lost:.2%} that lossy_max_facts_lost or the request allows",
            "facts",
        )
    return Verdict(True, f"certified: KL {found.kl_mean:.4g}, facts lost at most {found.facts_lost_high:.2%}")

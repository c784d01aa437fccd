"""Certificates, which say what an approximation costs a model in quality, and their files."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec
from blake3 import blake3

from kvass.errors import InputError, ModelFilesError
from kvass.keys import Namespace, lossy_namespace
from kvass.models import build_once

CERTIFICATE_FORMAT: Final = 1
_MAX_CERTIFICATE_BYTES: Final = 1 << 20


class Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file that says a digest of all else in it."""

    format: int
    digest: str = ""

    def sealed(self) -> Self:
        """The same with its digest: BLAKE3, in hex, of the canonical JSON with `digest` empty."""
        bare = msgspec.structs.replace(self, digest="")
        raw = msgspec.json.encode(bare, order="sorted")
        return msgspec.structs.replace(bare, digest=blake3(raw).hexdigest())


Seal = TypeVar("Seal", bound=Sealed)


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


class Certificate(Sealed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured for one model, and which model, adapter, spec and tables that holds for.

    `model` is a name for people. `weights`, `config` and `adapter` as in a namespace; `spec`: digest of the
    spec without RoPE; `tables`: digest of the codecs' tables; `digest`: of all the rest (see `sealed`).
    """

    model: str
    weights: str
    config: str
    adapter: str
    spec: str
    tables: str
    measured: list[Measured]


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
    return read_sealed(path, Certificate, CERTIFICATE_FORMAT, lambda found: _sound(found.measured))


def read_sealed(path: Path, kind: type[Seal], version: int, sound: Callable[[Seal], bool]) -> Seal:
    """Read a sealed file of that format. Raises ModelFilesError where it is missing, damaged or altered."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_CERTIFICATE_BYTES + 1)
        found = msgspec.json.decode(raw, type=kind)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelFilesError(
            f"cannot read the certificate {path}: {error}; calibrate the model anew"
        ) from error
    if len(raw) > _MAX_CERTIFICATE_BYTES or found.format != version:
        raise ModelFilesError(f"the certificate {path} is of another format; calibrate the model anew")
    if not sound(found):
        raise ModelFilesError(f"the certificate {path} contradicts itself; calibrate the model anew")
    if found.sealed() != found:
        raise ModelFilesError(f"the certificate {path} was altered or damaged; calibrate the model anew")
    return found


def write_sealed(path: Path, certificate: Sealed) -> None:
    """Put a certificate in place, whole. Raises ModelFilesError where that cannot be written."""
    _replace(path, msgspec.json.format(msgspec.json.encode(certificate.sealed()), indent=1))


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
        certificate.tables != blake3(tables).hexdigest() or bound_to(certificate) != binding(namespace)
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
        write_sealed(folder / "certificate.json", certificate)
    return folder


def bound_to(certificate: Any) -> tuple[str, str, str, str]:
    """What a certificate says it is bound to."""
    return certificate.weights, certificate.config, certificate.adapter, certificate.spec


def _replace(path: Path, raw: bytes) -> None:
    build_once(path, lambda draft: draft.write_bytes(raw), ready=lambda _: False)

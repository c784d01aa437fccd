"""Certificates of repair: what it costs a model to reuse segments that were read elsewhere."""

import math
from pathlib import Path
from typing import Final

import msgspec

from kvass.errors import ModelFilesError
from kvass.keys import Namespace
from kvass.quality.budget import Budget, Verdict, judged
from kvass.quality.certificates import Sealed, binding, bound_to, calibrated_folder, read_sealed, write_sealed

BLENDS_FORMAT: Final = 1
BLENDS_FILE: Final = "blends.json"
_BOUNDS: Final = ("none", "all")
"""Methods that are measured for comparison, and never used."""

SHARE_ROUNDING: Final = 0.005
"""By so much a share may stay below the one that was certified: tokens are whole, and segments differ."""


class BlendMeasured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way to repair prompts of segments that were read elsewhere, against full prefill of the same.

    `method`: the selector; of the reused tokens, means over the prompts: `chosen`, the share that was
    computed anew, `fraction`, of their layers the share that was computed, choosing included. `kl_*`: KL
    divergence in nats per token of what follows, a mean with a 95% interval; `top1`: share of these with the
    same most likely next token. `facts_*` as in `Measured`, of facts planted inside segments.
    """

    method: str
    chosen: float
    fraction: float
    kl_mean: float
    kl_low: float
    kl_high: float
    top1: float
    facts_tried: int
    facts_lost: int
    facts_lost_high: float


class BlendCertificate(Sealed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What repair was measured to cost one model, over `prompts` prompts; bound to it as a `Certificate`.

    `no_context`: KL per token where the model sees nothing of the segments.
    """

    model: str
    weights: str
    config: str
    adapter: str
    spec: str
    prompts: int
    no_context: float
    measured: list[BlendMeasured]

    def methods(self, name: str) -> list[BlendMeasured]:
        """What was measured of one selector, the least computed anew first."""
        return sorted((one for one in self.measured if one.method == name), key=lambda one: one.chosen)

    def verdict(self, method: str, chosen: float, budget: Budget) -> Verdict:
        """Whether that is within the budget: by the figures of the largest share of the tokens that was
        measured and is no larger than `chosen`."""
        found = [one for one in self.methods(method) if one.chosen <= chosen + SHARE_ROUNDING]
        if method in _BOUNDS or not found:
            reason = f"the certificate of {self.model} does not cover {method!r} at a share of {chosen:.3f}"
            return Verdict(False, reason, "not measured")
        one = found[-1]
        what = f"repair by {method} of {one.chosen:.1%} of the tokens"
        return judged(what, self.model, one.kl_mean, one.facts_lost_high, budget)


def certify_blends(
    namespace: Namespace, prompts: int, no_context: float, measured: list[BlendMeasured]
) -> BlendCertificate:
    """A sealed certificate for that namespace's model."""
    weights, config, adapter, spec = binding(namespace)
    return BlendCertificate(
        format=BLENDS_FORMAT, model=namespace.model, weights=weights, config=config, adapter=adapter,
        spec=spec, prompts=prompts, no_context=no_context, measured=measured,
    ).sealed()  # fmt: skip


def read_blends(path: Path) -> BlendCertificate:
    """Read and check a certificate. Raises ModelFilesError where it is missing, damaged or altered."""
    return read_sealed(path, BlendCertificate, BLENDS_FORMAT, lambda found: _sound(found.measured))


def _sound(measured: list[BlendMeasured]) -> bool:
    for one in measured:
        costs = (one.kl_mean, one.fraction)
        if not (
            all(0 <= cost < math.inf for cost in costs)
            and 0 <= one.chosen <= 1
            and 0 <= one.facts_lost <= one.facts_tried
            and one.facts_lost <= one.facts_tried * one.facts_lost_high
            and (one.facts_tried or one.facts_lost_high >= 1)
        ):
            return False
    return True


def keep_blends(models_path: Path, namespace: Namespace, certificate: BlendCertificate) -> Path:
    """Put a certificate in place, whole; its folder. Raises ModelFilesError where that cannot be written."""
    folder = calibrated_folder(models_path, namespace)
    if bound_to(certificate) != binding(namespace):
        raise ModelFilesError("the certificate is of another model; measure with this one")
    write_sealed(folder / BLENDS_FILE, certificate)
    return folder

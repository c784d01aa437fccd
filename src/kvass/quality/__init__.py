"""Certificates, which say what an approximation costs in quality, and the gate that asks them."""

from kvass.quality.blends import (
    BLENDS_FILE,
    SHARE_ROUNDING,
    BlendCertificate,
    BlendMeasured,
    certify_blends,
    keep_blends,
)
from kvass.quality.budget import DEFAULT_BUDGET, Budget, Verdict
from kvass.quality.certificates import (
    Certificate,
    Measured,
    binding,
    calibrated_folder,
    certify,
    keep_calibrated,
    read_certificate,
)
from kvass.quality.gate import Gate

__all__ = [
    "BLENDS_FILE",
    "DEFAULT_BUDGET",
    "SHARE_ROUNDING",
    "BlendCertificate",
    "BlendMeasured",
    "Budget",
    "Certificate",
    "Gate",
    "Measured",
    "Verdict",
    "binding",
    "calibrated_folder",
    "certify",
    "certify_blends",
    "keep_blends",
    "keep_calibrated",
    "read_certificate",
]

"""How fast a model's keys turn, from what its spec says of their RoPE."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvass.errors import UnsupportedModelError
from kvass.spec import RopeSpec


def frequencies(rope: RopeSpec) -> npt.NDArray[np.float64]:
    """Radians a token, `[rotary_dim / 2]`, as transformers' `modeling_rope_utils` defines the kinds.

    Raises UnsupportedModelError for a kind whose keys are not simply turned.
    """
    rates = rope.theta ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    parameters: dict[str, Any] = dict(rope.parameters)
    if rope.kind == "default":
        return rates
    if rope.kind == "linear":
        return rates / float(parameters["factor"])
    if rope.kind == "llama3":
        return _llama3(rates, parameters)
    raise UnsupportedModelError(f"codecs do not know how to turn keys back from RoPE {rope.kind!r}: not yet")


def _llama3(rates: npt.NDArray[np.float64], parameters: dict[str, Any]) -> npt.NDArray[np.float64]:
    factor, low, high = (float(parameters[n]) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(parameters["original_max_position_embeddings"]) * rates / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * rates / factor + share * rates

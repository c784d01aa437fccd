"""How fast a model's keys turn, from what its spec says of their RoPE; and moving keys to other positions."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvass.errors import UnsupportedModelError
from kvass.spec import RopeSpec

Float64 = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]


def frequencies(rope: RopeSpec) -> Float64:
    """Radians a token, `[rotary_dim / 2]`, as transformers' `modeling_rope_utils` defines the kinds.

    Raises UnsupportedModelError for a kind whose keys are not simply turned, by name: of `dynamic` and
    `longrope` they depend on the length of the call.
    """
    parameters: dict[str, Any] = dict(rope.parameters)
    rates = rope.theta ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    try:
        if rope.kind == "default":
            return rates
        if rope.kind == "linear":
            return rates / float(parameters["factor"])
        if rope.kind == "llama3":
            return _llama3(rates, parameters)
        if rope.kind == "yarn":
            return _yarn(rates, rope.theta, parameters)
    except (KeyError, TypeError) as error:
        raise UnsupportedModelError(f"RoPE {rope.kind!r} comes without a number for {error}") from error
    raise UnsupportedModelError(f"kvass does not know how to turn keys back from RoPE {rope.kind!r}: not yet")


def moved(keys: Float32, rates: Float64, distance: int) -> Float32:
    """Keys after RoPE `[..., head_dim]`, `distance` positions further on (or, below 0, back).

    Pairs are half-split, as in Llama and Gemma: dimension i turns with i + rotary_dim / 2; what lies behind
    stays. Keys that RoPE also scales (YaRN) keep their length. Angles are taken in float64.
    """
    half = len(rates)
    angles = np.remainder(distance * rates, 2 * math.pi)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = keys[..., :half], keys[..., half : 2 * half]
    found = np.empty(keys.shape, np.float32)
    found[..., :half] = low * cos - high * sin
    found[..., half : 2 * half] = high * cos + low * sin
    found[..., 2 * half :] = keys[..., 2 * half :]
    return found


def _llama3(rates: Float64, parameters: dict[str, Any]) -> Float64:
    factor, low, high = (float(parameters[n]) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(parameters["original_max_position_embeddings"]) * rates / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * rates / factor + share * rates


def _yarn(rates: Float64, theta: float, parameters: dict[str, Any]) -> Float64:
    dim, factor = 2 * len(rates), float(parameters["factor"])
    known = float(parameters["original_max_position_embeddings"])

    def turning(turns: float) -> float:
        """The dimension that turns so often over the positions that were trained on."""
        return dim * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = turning(float(parameters.get("beta_fast") or 32))
    last = turning(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    stretched = np.clip((np.arange(len(rates)) - first) / ((last - first) or 0.001), 0, 1)
    return (1 - stretched) * rates + stretched * rates / factor

"""Hadamard rotation and a Lloyd-Max codebook, as TurboQuant (ICLR 2026) without its residual stage."""

import math
from functools import cache

import numpy as np

from kvass.bench.baselines.base import SCALE_BITS, Coded, Float32, Float64, halves
from kvass.errors import InputError
from kvass.spec import LayerGroup

_SEED = 20260
_PRECISION = 1e-12


class Hadamard:
    """Each token's vector of a head: signs flipped at random (the same for all), rotated, divided by its norm
    (stored, 16 bits), every coordinate rounded to the nearest of `2 ** bits` numbers that suit a normal
    variable best."""

    rotated = True

    def __init__(self, bits: int):
        self.bits = bits
        self._centroids = lloyd_max(2**bits).astype(np.float32)
        self._thresholds = (self._centroids[1:] + self._centroids[:-1]) / 2

    def __call__(self, keys: Float32, values: Float32, group: LayerGroup) -> Coded:
        """Both alike. Raises InputError where a head's dimension is not a power of two."""
        return Coded(self._code(keys), self._code(values), self._bits(keys) + self._bits(values))

    def _bits(self, array: Float32) -> int:
        return self.bits * array.size + SCALE_BITS * array[..., 0].size

    def _code(self, array: Float32) -> Float32:
        dim = array.shape[-1]
        signs = np.random.default_rng(_SEED).choice(np.array([-1, 1], np.float32), dim)
        rotation = hadamard(dim).astype(np.float32) * signs
        root = np.float32(math.sqrt(dim))
        kept = np.empty_like(array)
        for source, target in zip(array, kept, strict=True):
            norm = halves(np.linalg.norm(source, axis=-1, keepdims=True))
            unit = (source @ rotation.T) * (root / np.where(norm > 0, norm, np.float32(1)))
            symbols = np.zeros(unit.shape, np.uint8)
            for threshold in self._thresholds:  # several times faster than a binary search
                symbols += unit > threshold
            target[...] = self._centroids[symbols] @ rotation * (norm / root)
        return kept


def hadamard(dim: int) -> Float64:
    """The orthonormal Hadamard matrix `[dim, dim]` of Sylvester. Raises InputError unless `dim` is a power of
    two."""
    if dim < 1 or dim & (dim - 1):
        raise InputError(f"a Hadamard rotation needs a dimension that is a power of two, not {dim}")
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(dim)


@cache
def lloyd_max(levels: int) -> Float64:
    """The `levels` (even) numbers, ascending, to which a standard normal variable is rounded with the least
    mean square error."""
    half = levels // 2
    centroids = (np.arange(half) + 0.5) * (6 / levels)
    while True:
        edges = [0.0, *((centroids[1:] + centroids[:-1]) / 2), math.inf]
        density = np.array([math.exp(-edge * edge / 2) for edge in edges]) / math.sqrt(2 * math.pi)
        below = np.array([math.erf(edge / math.sqrt(2)) / 2 for edge in edges])
        moved = (density[:-1] - density[1:]) / np.diff(below)
        if np.abs(moved - centroids).max() < _PRECISION:
            return np.concatenate([-moved[::-1], moved])
        centroids = moved

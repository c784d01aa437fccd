"""What was calibrated of one layer group for one level of the transform codec."""

import numpy as np
import numpy.typing as npt

from kvass.codecs import rans
from kvass.codecs.rans import UInt16
from kvass.codecs.tables import Float32, Tables
from kvass.codecs.transform_kernels import Int16
from kvass.container import Array
from kvass.errors import CorruptObjectError

_LINE = 64


class Side:
    """Keys or values: mean `[layers, n]`, matrices `[layers, blocks, m, m]`, contexts' base `[layers, n]`."""

    def __init__(self, tables: Tables, name: str, offset: int):
        """Raises CorruptObjectError where arrays are missing or do not fit each other."""
        self.mean = float32(tables, f"{name}.mean", 2)
        self.forward, self.inverse = (float32(tables, f"{name}.{part}", 4) for part in ("forward", "inverse"))
        layers, self.width = self.mean.shape
        blocks, size = self.forward.shape[1:3]
        scale = integers(tables, f"{name}.scale", 2)
        if (
            self.forward.shape != self.inverse.shape
            or self.forward.shape != (layers, blocks, size, size)
            or blocks * size != self.width
            or scale.shape != (layers, self.width)
        ):
            raise CorruptObjectError(f"the tables' arrays {name!r} do not fit each other")
        self.base = int16(scale - offset)


class Calibrated:
    """The arrays that the kernels take; checked, so that no stream can make them read elsewhere.

    `probes` `[layers, heads, dim, probes]`, `offsets` `[layers, heads, probes]`, `thresholds`
    `[layers, heads, classes - 1]`; `steps` `[classes]`; contexts: those of levels, then that of classes, then
    the idle one.
    """

    def __init__(self, tables: Tables, level: str, number: int):
        """Raises CorruptObjectError where arrays are missing or do not fit each other."""
        name = f"transform.{number}"
        offsets = integers(tables, f"transform.{level}.offset")
        if offsets.size != 1:
            raise CorruptObjectError(f"the tables' array 'transform.{level}.offset' is not one number")
        offset = int(offsets.reshape(-1)[0])
        self.k, self.v = Side(tables, f"{name}.k", offset), Side(tables, f"{name}.v", offset)
        self.probes = float32(tables, f"{name}.probes", 4)
        self.offsets, self.thresholds = (
            float32(tables, f"{name}.{one}", 3) for one in ("offsets", "thresholds")
        )
        self.steps, self.inverse_steps = (
            float32(tables, f"transform.{level}.{one}", 1) for one in ("steps", "inverse_steps")
        )
        self.rounding = float32(tables, "transform.rounding", 1)
        self.shifts = int16(integers(tables, "transform.shifts", 1))
        centres = float32(tables, "transform.centres", 2)
        self.layers, self.heads, dim, probes = self.probes.shape
        contexts, classes = len(self.rounding), len(self.steps)
        if not (
            centres.shape == (contexts, 256)
            and len(frequencies(tables)) == contexts + 2
            and 1 <= classes <= 256
            and contexts
            and self.inverse_steps.shape == self.shifts.shape == (classes,)
            and min(self.steps.min(), self.inverse_steps.min()) > 0
        ):
            raise CorruptObjectError(f"the tables' arrays of level {level} do not fit each other")
        if not (
            self.layers * self.heads * dim * probes
            and self.offsets.shape == (self.layers, self.heads, probes)
            and self.thresholds.shape == (self.layers, self.heads, classes - 1)
            and dim * self.heads == self.k.width
            and self.v.width
            and self.v.width % self.heads == 0
            and len(self.k.mean) == len(self.v.mean) == self.layers
        ):
            raise CorruptObjectError(f"the tables' arrays of group {number} do not fit each other")
        self.base: Int16 = np.concatenate([self.k.base, self.v.base], axis=1)
        self.split, self.width = self.k.width, self.k.width + self.v.width
        self.centres = centres.reshape(-1)
        self.class_context, self.idle = np.uint8(contexts), np.uint8(contexts + 1)


def frequencies(tables: Tables) -> UInt16:
    """How often each symbol of each context is expected, `[contexts + 2, 256]`, of `rans.TOTAL`.

    Raises CorruptObjectError where they are missing or not such.
    """
    found = integers(tables, "transform.symbols", 2)
    if (
        found.shape[1] != 256
        or len(found) > 256
        or found.size == 0
        or found.min() < 1
        or (found.sum(axis=1) != rans.TOTAL).any()
    ):
        raise CorruptObjectError("the tables' array 'transform.symbols' holds no frequencies of 256 symbols")
    return found.astype(np.uint16)


def float32(tables: Tables, name: str, axes: int) -> Float32:
    """An array of the tables that must be float32, finite, and have so many axes; a copy, so that kernels are
    compiled for no read-only or unaligned arrays. Raises CorruptObjectError where it is not."""
    array = tables.array(name)
    if array.dtype != np.float32 or array.ndim != axes:
        raise CorruptObjectError(f"the tables' array {name!r} is {array.dtype} {array.shape}")
    found = _aligned(array)
    if not np.isfinite(found).all():
        raise CorruptObjectError(f"the tables' array {name!r} has values that are not finite")
    return found


def _aligned(array: Array) -> Float32:
    """A copy that begins with a cache line, which is faster to read by vectors that fill one."""
    raw = np.empty(array.nbytes + _LINE, np.uint8)
    begin = -raw.ctypes.data % _LINE
    found = raw[begin : begin + array.nbytes].view(np.float32).reshape(array.shape)
    found[...] = array
    return found


def integers(tables: Tables, name: str, axes: int | None = None) -> npt.NDArray[np.int64]:
    """An array of the tables that must hold integers below 2**31. Raises CorruptObjectError where it does
    not."""
    array = tables.array(name)
    if array.dtype.kind not in "iu" or (axes is not None and array.ndim != axes):
        raise CorruptObjectError(f"the tables' array {name!r} is {array.dtype} {array.shape}")
    found = array.astype(np.int64)
    if found.size and not -(1 << 31) <= found.min() <= found.max() < 1 << 31:
        raise CorruptObjectError(f"the tables' array {name!r} has numbers that are too large")
    return found


def int16(array: npt.NDArray[np.int64]) -> Int16:
    """Numbers as 16 bits, bounded: contexts are bounded more tightly anyway."""
    return np.clip(array, -(1 << 15), (1 << 15) - 1).astype(np.int16)

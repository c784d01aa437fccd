"""What was calibrated for one model: named arrays in one safetensors file, known by its digest."""

import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvass.container import Array
from kvass.errors import CorruptObjectError, InputError, ModelFilesError

Float32 = npt.NDArray[np.float32]

MAX_TABLES_BYTES = 1 << 30
FINE = 256
"""Positions are `FINE * coarse + fine`."""

_LENGTH = struct.Struct("<Q")
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"), "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_UNIT = np.float32(1.0001)
"""What no cosine is beyond, however it was rounded."""

_Extent = Annotated[int, msgspec.Meta(ge=0, le=MAX_TABLES_BYTES)]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Extent], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Extent, _Extent]


class Rope:
    """The rotation of one group's keys, from stored cosines and sines.

    Angles are put together from a coarse and a fine one by float32 products and sums alone: the same bits
    on every machine. Pairs are half-split, as in Llama and Gemma: dimension i turns with i + rotary_dim / 2;
    dimensions behind `rotary_dim` stay.
    """

    def __init__(self, fine: tuple[Float32, Float32], coarse: tuple[Float32, Float32]):
        """`fine`: cosines and sines of positions 0..255, `[256, rotary_dim / 2]`; `coarse`: of multiples of
        256, `[n, rotary_dim / 2]`. Raises CorruptObjectError where they do not fit each other."""
        if any(part.ndim != 2 or part.dtype != np.float32 for part in (*fine, *coarse)) or not (
            fine[0].shape == fine[1].shape == (FINE, coarse[0].shape[1])
            and coarse[0].shape == coarse[1].shape
        ):
            raise CorruptObjectError("the tables' cosines and sines do not fit each other")
        # written so that what is no number is beyond it too
        if not all((np.abs(part) <= _UNIT).all() for part in (*fine, *coarse)):
            raise CorruptObjectError("the tables' cosines and sines are none")
        self._fine, self._coarse = fine, coarse
        self.rotary_dim = 2 * fine[0].shape[1]
        self.positions = FINE * len(coarse[0])

    def rows(self, start: int, tokens: int) -> tuple[Float32, Float32]:
        """Cosines and sines of positions from `start` on, each `[tokens, rotary_dim / 2]`.

        Raises InputError for positions that the tables do not have.
        """
        if not 0 <= start <= start + tokens <= self.positions:
            raise InputError(
                f"positions {start}..{start + tokens} are outside of the {self.positions} of the tables"
            )
        place = np.arange(start, start + tokens)
        high, low = place // FINE, place % FINE
        (fine_cos, fine_sin), (coarse_cos, coarse_sin) = self._fine, self._coarse
        cos = coarse_cos[high] * fine_cos[low] - coarse_sin[high] * fine_sin[low]
        sin = coarse_sin[high] * fine_cos[low] + coarse_cos[high] * fine_sin[low]
        return cos, sin

    def rotate(self, keys: Float32, start: int) -> Float32:
        """Keys `[layers, tokens, heads, dim]` before RoPE to those after it."""
        return self._turn(keys, start, 1)

    def unrotate(self, keys: Float32, start: int) -> Float32:
        """Keys `[layers, tokens, heads, dim]` after RoPE to those before it."""
        return self._turn(keys, start, -1)

    def _turn(self, keys: Float32, start: int, direction: int) -> Float32:
        cos, sin = (rows[None, :, None] for rows in self.rows(start, keys.shape[1]))
        half = self.rotary_dim // 2
        if keys.dtype != np.float32 or keys.shape[3] < self.rotary_dim:
            raise InputError(f"keys of {keys.dtype} {keys.shape} cannot be turned by these tables")
        low, high = keys[..., :half], keys[..., half : 2 * half]
        turned = keys.copy()
        if direction > 0:
            turned[..., :half] = low * cos - high * sin
            turned[..., half : 2 * half] = high * cos + low * sin
        else:
            turned[..., :half] = low * cos + high * sin
            turned[..., half : 2 * half] = high * cos - low * sin
        return turned


class Tables:
    """The arrays of one file; read-only. `digest`: BLAKE3 of the file, in hex, which headers name it by."""

    def __init__(self, arrays: Mapping[str, Array], digest: str):
        self._arrays = dict(arrays)
        self.digest = digest
        self._ropes: dict[int, Rope | None] = {}

    @classmethod
    def load(cls, path: Path) -> "Tables":
        """Read a file of `write_tables`. Raises ModelFilesError where it is not there or not sound."""
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_TABLES_BYTES:
                raise ModelFilesError(
                    f"{path} is no file, or larger than any tables are; calibrate the model anew"
                )
            raw = path.read_bytes()
        except OSError as error:
            raise ModelFilesError(f"cannot read the tables {path}: {error}; calibrate the model") from error
        try:
            return cls.parse(raw)
        except ModelFilesError as error:
            raise ModelFilesError(f"{path}: {error}; calibrate the model anew") from error

    @classmethod
    def parse(cls, raw: bytes) -> "Tables":
        """Tables from a file's bytes. Raises ModelFilesError where they are not a sound safetensors file."""
        try:
            end = _LENGTH.size + _LENGTH.unpack_from(raw)[0]
            if end > len(raw):
                raise ModelFilesError("the header is cut short")
            header = msgspec.json.decode(raw[_LENGTH.size : end], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            tensors = {name: msgspec.json.decode(one, type=_Tensor) for name, one in header.items()}
            return cls(_arrays(raw, end, tensors), blake3(raw).hexdigest())
        except (struct.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ModelFilesError(f"the header cannot be read: {error}") from error

    def array(self, name: str) -> Array:
        """The array of that name. Raises CorruptObjectError where there is none: an object then cannot be
        decoded with these tables."""
        try:
            return self._arrays[name]
        except KeyError:
            raise CorruptObjectError(f"the tables hold no array {name!r}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def rope(self, number: int) -> Rope | None:
        """The rotation of group `number`'s keys; None where its keys are not rotated."""
        if number not in self._ropes:
            self._ropes[number] = self._rope(number)
        return self._ropes[number]

    def _rope(self, number: int) -> Rope | None:
        names = [f"rope.{number}.{part}.{kind}" for part in ("fine", "coarse") for kind in ("cos", "sin")]
        if not any(name in self._arrays for name in names):
            return None
        fine_cos, fine_sin, coarse_cos, coarse_sin = (_float32(self.array(name)) for name in names)
        return Rope((fine_cos, fine_sin), (coarse_cos, coarse_sin))


def _float32(array: Array) -> Float32:
    if array.dtype != np.float32:
        raise CorruptObjectError(f"the tables' cosines and sines must be float32, not {array.dtype}")
    return np.asarray(array, np.float32)


def _arrays(raw: bytes, start: int, tensors: Mapping[str, _Tensor]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, tensor in tensors.items():
        dtype, (first, last) = _DTYPES.get(tensor.dtype), tensor.data_offsets
        count = 1
        for extent in tensor.shape:
            count *= extent
        if dtype is None or last - first != count * dtype.itemsize or start + last > len(raw):
            raise ModelFilesError(f"array {name!r} does not fit its bytes, or is of a foreign type")
        found[name] = np.frombuffer(raw, dtype, count, start + first).reshape(tensor.shape)
    return found


def write_tables(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a tables file: valid safetensors, the same for the same arrays.

    `metadata`: notes for people. Raises InputError for a dtype that tables do not hold.
    """
    outer: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    pieces, offset = [], 0
    # as safetensors does it: the widest first, so that every array is aligned
    for name in sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name)):
        array = np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape)
        short = _NAMES.get(array.dtype.newbyteorder("<"))
        if short is None:
            raise InputError(f"array {name!r} is {array.dtype}, which tables do not hold")
        outer[name] = _Tensor(short, list(array.shape), (offset, offset + array.nbytes))
        pieces.append(array.tobytes())
        offset += array.nbytes
    header = msgspec.json.encode(outer)
    header += b" " * (-(_LENGTH.size + len(header)) % 64)
    return b"".join((_LENGTH.pack(len(header)), header, *pieces))


def rope_arrays(number: int, frequencies: npt.ArrayLike, positions: int) -> dict[str, Array]:
    """The arrays that `Tables.rope(number)` needs, for at least so many positions.

    `frequencies`: radians a token, `[rotary_dim / 2]`, as the model's RoPE has them (scaled ones too). This
    is where cosines and sines are computed, once, in float64; a model that rounds its own in float32
    differs in the last bits at high positions, for which no codec minds.
    """
    rates = np.asarray(frequencies, np.float64)
    fine = np.arange(FINE)[:, None] * rates
    coarse = FINE * np.arange(-(-positions // FINE))[:, None] * rates
    return {
        f"rope.{number}.{part}.{kind}": function(angles).astype(np.float32)
        for part, angles in (("fine", fine), ("coarse", coarse))
        for kind, function in (("cos", np.cos), ("sin", np.sin))
    }

"""The object on disk and on the wire: a valid `.safetensors` file with digests; see docs/format.md.

Layout: 8 bytes little-endian header length, the header in canonical JSON padded with spaces to a
multiple of 4,096 bytes (length field included), then the arrays, layer-major, without holes.
The header's digest stands at a fixed offset and covers the whole header with that field zeroed.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvass.chunks import MAX_TOKEN_ID
from kvass.errors import CorruptObjectError, InputError
from kvass.keys import FORMAT_VERSION, Namespace
from kvass.provenance import Provenance
from kvass.spec import numpy_dtype

Array = npt.NDArray[np.generic]
Buffer = memoryview

ALIGNMENT = 4096
MAX_HEADER_BYTES = 1 << 18
"""A chunk of 4,096 tokens and 512 layers needs 100 kB; what claims more is hostile."""

_MAX_DIMENSIONS = 8
_MAX_POSITION = (1 << 31) - 1

_BATCH_BYTES = 1536 << 10
"""Read or written, then hashed: small enough for the cache, large enough that threads seldom meet."""

_LENGTH = struct.Struct("<Q")
_NO_DIGEST = "0" * 32
_OPENING = b'{"__metadata__":{"kvass":"{\\"digest\\":\\"'
_DIGEST_AT = len(_OPENING)

_SAFETENSORS_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
}
_DTYPE_NAMES = {short: name for name, short in _SAFETENSORS_DTYPES.items()}


_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Token = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class CodecStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a codec chain as the header records it."""

    name: str
    parameters: dict[str, int | float | str | bool] = {}


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an object says of itself.

    `parent` is the address text of the chunk before it, empty for a sequence's first. `position` is the
    index of its first token. `digests` holds, for each array, one xxh3-128 in hex per row: of its first axis,
    which is the layers, or one for a stream over all.
    `condensed` is reserved for state with lengths and positions of its own; version 1 wants null.
    """

    digest: str
    format: int
    key: _Hex
    group: Annotated[int, msgspec.Meta(ge=0, le=0xFF)]
    shard: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    parent: str
    content_key: _Hex
    namespace: Namespace
    position: Annotated[int, msgspec.Meta(ge=0, le=_MAX_POSITION)]
    tokens: Annotated[list[_Token], msgspec.Meta(min_length=1)]
    codec: Annotated[list[CodecStep], msgspec.Meta(min_length=1)]
    provenance: Provenance
    digests: dict[str, list[str]]
    condensed: None = None


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_outer_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata_decoder = msgspec.json.Decoder(dict[str, str])
_header_decoder = msgspec.json.Decoder(Header)
_tensor_decoder = msgspec.json.Decoder(_Tensor)
_encoder = msgspec.json.Encoder()


class Stored(NamedTuple):
    """One array inside an object: byte range in the file, numpy dtype and shape (first axis: layers)."""

    offset: int
    size: int
    dtype: np.dtype
    shape: tuple[int, ...]


class Parsed(NamedTuple):
    """A header that passed every check, and where the arrays stand."""

    header: Header
    arrays: dict[str, Stored]
    size: int


class Reader(Protocol):
    """An open object in some tier."""

    @property
    def size(self) -> int:
        """Bytes of the whole object."""

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill all buffers from `offset` on. Raises CorruptObjectError when the object ends before."""


class Blob(Protocol):
    """An object about to be written."""

    @property
    def size(self) -> int:
        """Bytes of the whole object."""

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        """(offset, buffers) until every byte was handed out once; a buffer is valid until the next."""


def _rows(array: Array) -> list[Buffer]:
    """Each layer as one flat row of bytes, the same memory.

    Raises InputError where a layer is not C-contiguous: a copy would be filled in its stead.
    """
    layers = array if array.ndim > 1 else array[:, None]
    if not layers[0].flags.c_contiguous:
        raise InputError(f"each layer must be C-contiguous; strides {array.strides} of {array.shape} are not")
    # numpy's rows are buffers as well, at a tenth of what making memoryviews of them costs
    return cast(list[Buffer], list(layers.view(np.uint8).reshape(len(layers), -1)))


class Encoded:
    """A chunk's arrays on their way into an object. Views are read when `pieces` is consumed."""

    def __init__(self, header: Header, arrays: Mapping[str, Array]):
        """`arrays`: `[layers, ...]`, each layer C-contiguous; `header.digests` is filled in here.

        Raises InputError for a header or an array that no reader would accept.
        """
        self._arrays = {name: arrays[name] for name in sorted(arrays)}
        if not all(0 < array.ndim <= _MAX_DIMENSIONS and array.size for array in self._arrays.values()):
            raise InputError("such a chunk cannot be stored: an array is empty or a scalar")
        if not header.tokens or header.group >= len(header.namespace.spec.groups):
            raise InputError(
                "such a chunk cannot be stored: no tokens, or a group that its spec does not have"
            )
        blank = {name: [_NO_DIGEST] * len(array) for name, array in self._arrays.items()}
        self._header = msgspec.structs.replace(header, digest=_NO_DIGEST, digests=blank)
        self._tensors = _describe(self._arrays)
        raw = _encode_header(self._header, self._tensors)
        _check_readable(self._header)
        self._data_start = len(raw)
        self.size = self._data_start + sum(array.nbytes for array in self._arrays.values())
        if len(raw) > MAX_HEADER_BYTES:
            raise InputError(f"a header of {len(raw)} bytes is over the {MAX_HEADER_BYTES} that are read")

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        """Arrays first, each layer hashed as it is handed out, then the header with the digests."""
        digests: dict[str, list[str]] = {name: [] for name in self._arrays}
        offset = self._data_start
        for name, array in self._arrays.items():
            rows = _rows(array)
            for batch in _batches(rows):
                digests[name] += [xxhash.xxh3_128_hexdigest(row) for row in batch]
                yield offset, batch
                offset += sum(map(len, batch))
        header = msgspec.structs.replace(self._header, digests=digests)
        yield 0, [memoryview(_seal(_encode_header(header, self._tensors)))]


def _check_readable(header: Header) -> None:
    """Raises InputError where a header would be read as another one: an int in place of a float, None."""
    wanted = _encoder.encode(header)
    try:
        same = _encoder.encode(_header_decoder.decode(wanted)) == wanted
    except msgspec.MsgspecError as error:
        raise InputError(f"such a chunk cannot be stored: {error}") from error
    if not same:
        raise InputError("such a chunk cannot be stored: a value in its namespace is not of its field's type")


def _batches(rows: list[Buffer]) -> Iterator[list[Buffer]]:
    step = max(1, _BATCH_BYTES // max(1, len(rows[0])))
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def _describe(arrays: Mapping[str, Array]) -> dict[str, _Tensor]:
    tensors, offset = {}, 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        short = _SAFETENSORS_DTYPES.get(array.dtype.name)
        if short is None:
            raise InputError(f"array {name!r} is {array.dtype}, which cannot be stored")
        tensors[name] = _Tensor(short, list(array.shape), (offset, end))
        offset = end
    return tensors


def _encode_header(header: Header, tensors: Mapping[str, _Tensor]) -> bytes:
    inner = _encoder.encode(header).decode()
    outer = _encoder.encode({"__metadata__": {"kvass": inner}, **tensors})
    padding = -(_LENGTH.size + len(outer)) % ALIGNMENT
    return _LENGTH.pack(len(outer) + padding) + outer + b" " * padding


def _seal(raw: bytes) -> bytes:
    start = _LENGTH.size + _DIGEST_AT
    digest = xxhash.xxh3_128_hexdigest(raw).encode()
    return raw[:start] + digest + raw[start + len(digest) :]


def read_header(reader: Reader) -> Parsed:
    """Read and check an object's header: canonical bytes, digest, offsets without holes, file size.

    Reads no more than the object's own size, nor more than MAX_HEADER_BYTES: a hostile header costs little.
    Raises CorruptObjectError for anything but a header that this module wrote.
    """
    size = reader.size
    if size < ALIGNMENT:
        raise CorruptObjectError(f"object of {size} bytes is too short for a header")
    raw = bytearray(ALIGNMENT * 2 if size >= ALIGNMENT * 2 else ALIGNMENT)
    reader.read_into(0, [memoryview(raw)])
    length = _LENGTH.size + _LENGTH.unpack_from(raw)[0]
    if length > min(size, MAX_HEADER_BYTES) or length % ALIGNMENT:
        raise CorruptObjectError(f"object claims a header of {length} bytes")
    if length > len(raw):
        have = len(raw)
        raw.extend(bytes(length - have))
        reader.read_into(have, [memoryview(raw)[have:]])
    return _parse(bytes(raw[:length]), size)


def _parse(raw: bytes, size: int) -> Parsed:
    body = raw[_LENGTH.size :]
    if not body.startswith(_OPENING):
        raise CorruptObjectError("object is no kvass chunk")
    end = _DIGEST_AT + len(_NO_DIGEST)
    claimed = body[_DIGEST_AT:end]
    blank = b"".join((raw[: _LENGTH.size], body[:_DIGEST_AT], _NO_DIGEST.encode(), body[end:]))
    if xxhash.xxh3_128_hexdigest(blank).encode() != claimed:
        raise CorruptObjectError("header digest does not match")
    try:
        outer = _outer_decoder.decode(body)
        header = _header_decoder.decode(_metadata_decoder.decode(outer.pop("__metadata__"))["kvass"])
        tensors = {name: _tensor_decoder.decode(value) for name, value in outer.items()}
    except (msgspec.MsgspecError, KeyError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptObjectError(f"header cannot be read: {error}") from error
    if header.format != FORMAT_VERSION:
        raise CorruptObjectError(f"object is of format {header.format}, not {FORMAT_VERSION}")
    if header.group >= len(header.namespace.spec.groups):
        raise CorruptObjectError(f"object belongs to group {header.group}, which its spec does not have")
    arrays, offset = {}, len(raw)
    for name, tensor in tensors.items():
        stored = _place(name, tensor, offset, offset - len(raw), header)
        arrays[name] = stored
        offset += stored.size
    if header.digests.keys() != arrays.keys():
        raise CorruptObjectError("header has digests of arrays that are not there")
    if offset != size:
        raise CorruptObjectError(f"object has {size} bytes where its header accounts for {offset}")
    if _encode_header(msgspec.structs.replace(header, digest=_NO_DIGEST), tensors) != blank:
        raise CorruptObjectError("header is not in canonical form")
    return Parsed(header, arrays, size)


def _place(name: str, tensor: _Tensor, offset: int, wanted: int, header: Header) -> Stored:
    try:
        dtype_name = _DTYPE_NAMES[tensor.dtype]
    except KeyError:
        raise CorruptObjectError(f"array {name!r} has unknown dtype {tensor.dtype!r}") from None
    dtype = np.dtype(np.uint8) if dtype_name == "uint8" else numpy_dtype(dtype_name)
    count = dtype.itemsize
    if not 0 < len(tensor.shape) <= _MAX_DIMENSIONS or min(tensor.shape) <= 0:
        raise CorruptObjectError(f"array {name!r} has an impossible shape")
    for extent in tensor.shape:
        count *= extent
    layers = len(header.digests.get(name, ()))
    if tensor.data_offsets != (wanted, wanted + count) or tensor.shape[0] != layers:
        raise CorruptObjectError(f"array {name!r} does not fit its offsets or digests")
    return Stored(offset, count, dtype, tuple(tensor.shape))


def read_arrays(reader: Reader, parsed: Parsed, targets: Mapping[str, Array]) -> int:
    """Read every array into `targets[name]` (same shape, each layer C-contiguous) and verify each layer.

    Returns the bytes read, all of them verified. Raises CorruptObjectError at the first layer that fails:
    what the targets hold then must not be used. Raises InputError for targets that do not fit.
    """
    for name, stored in parsed.arrays.items():
        target = targets.get(name)
        if target is None or target.shape != stored.shape or target.dtype != stored.dtype:
            raise InputError(f"there is no place for array {name!r}, which is {stored.dtype} {stored.shape}")
    total = 0
    for name, stored in parsed.arrays.items():
        digests, offset = iter(parsed.header.digests[name]), stored.offset
        for batch in _batches(_rows(targets[name])):
            reader.read_into(offset, batch)
            for row in batch:
                if xxhash.xxh3_128_hexdigest(row) != next(digests):
                    raise CorruptObjectError(f"array {name!r} fails its digest")
            offset += sum(map(len, batch))
        total += stored.size
    return total


def read_row(reader: Reader, parsed: Parsed, name: str, number: int) -> Array:
    """One layer of an array, verified, `[...]` of its other axes. Raises CorruptObjectError."""
    stored, digests = parsed.arrays[name], parsed.header.digests[name]
    size = stored.size // len(digests)
    row = bytearray(size)
    reader.read_into(stored.offset + number * size, [memoryview(row)])
    if xxhash.xxh3_128_hexdigest(row) != digests[number]:
        raise CorruptObjectError(f"array {name!r} fails its digest")
    return np.frombuffer(row, stored.dtype).reshape(stored.shape[1:])


def verify(reader: Reader, parsed: Parsed) -> None:
    """Read an object and check every digest, keeping nothing. Raises CorruptObjectError."""
    buffer = bytearray(0)
    for name, stored in parsed.arrays.items():
        rows = parsed.header.digests[name]
        size = stored.size // len(rows)
        buffer = buffer if len(buffer) >= size else bytearray(size)
        row = memoryview(buffer)[:size]
        for number, digest in enumerate(rows):
            reader.read_into(stored.offset + number * size, [row])
            if xxhash.xxh3_128_hexdigest(row) != digest:
                raise CorruptObjectError(f"array {name!r} fails its digest")


def empty_arrays(parsed: Parsed) -> dict[str, Array]:
    """New arrays of the shapes and dtypes that an object holds."""
    return {name: np.empty(stored.shape, stored.dtype) for name, stored in parsed.arrays.items()}

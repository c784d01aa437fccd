"""The identity: arrays are stored as the engine has them, bit for bit."""

from collections.abc import Mapping

from kvass.codecs.base import Chunk
from kvass.container import Array, CodecStep
from kvass.errors import CorruptObjectError
from kvass.spec import numpy_dtype


class Raw:
    """Stores the arrays themselves, an engine's opaque ones too; the fastest codec, without parameters."""

    name = "raw"
    lossless = True
    in_place = True
    end_aware = False

    def step(self) -> CodecStep:
        """`raw`, without parameters."""
        return CodecStep(self.name)

    def encode(self, arrays: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """The same arrays, not copied."""
        return dict(arrays)

    def decode(self, stored: Mapping[str, Array], chunk: Chunk) -> dict[str, Array]:
        """The same arrays, checked against the spec."""
        group = chunk.group
        for name in ("kv",) if "kv" in stored else ("k", "v"):
            array = stored.get(name)
            if array is None or array.shape != group.shape(name, chunk.tokens):
                raise CorruptObjectError(f"array {name!r} does not have the shape that its spec says")
            if array.dtype != numpy_dtype(group.dtype):
                raise CorruptObjectError(f"array {name!r} is {array.dtype}, not {group.dtype}")
        return dict(stored)

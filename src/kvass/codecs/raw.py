"""The identity: arrays are stored as the engine has them, bit for bit."""

from collections.abc import Mapping

from kvass.container import Array, CodecStep
from kvass.errors import CorruptObjectError
from kvass.spec import LayerGroup, numpy_dtype


class Raw:
    """Stores the arrays themselves, an engine's opaque ones too; the fastest codec, without parameters."""

    name = "raw"
    lossless = True
    in_place = True

    def step(self) -> CodecStep:
        """`raw`, without parameters."""
        return CodecStep(self.name)

    def encode(self, arrays: Mapping[str, Array], spec: LayerGroup) -> dict[str, Array]:
        """The same arrays, not copied."""
        return dict(arrays)

    def decode(self, stored: Mapping[str, Array], spec: LayerGroup, tokens: int) -> dict[str, Array]:
        """The same arrays, checked against the spec."""
        for name in ("kv",) if "kv" in stored else ("k", "v"):
            array = stored.get(name)
            if array is None or array.shape != spec.shape(name, tokens):
                raise CorruptObjectError(f"array {name!r} does not have the shape that its spec says")
            if array.dtype != numpy_dtype(spec.dtype):
                raise CorruptObjectError(f"array {name!r} is {array.dtype}, not {spec.dtype}")
        return dict(stored)

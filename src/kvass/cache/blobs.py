"""Objects on their way into a tier: a chunk of a live sequence, or an object of another tier."""

from collections.abc import Iterator, Sequence

from kvass.cache.pool import KVView
from kvass.chunks import Tokens
from kvass.codecs.base import Codec
from kvass.container import Blob, Buffer, Encoded, Header
from kvass.errors import CorruptObjectError, TierError
from kvass.keys import FORMAT_VERSION, Namespace, address_text, content_key
from kvass.provenance import EXACT
from kvass.tiers.base import Tier

_COPY_BYTES = 1 << 20


class ChunkBlob:
    """A chunk of the source, encoded when it is written: the source is not touched before."""

    def __init__(
        self, coder: Codec, namespace: Namespace, key: bytes, parent: bytes | None, root: bytes, group: int,
        position: int, tokens: Tokens, source: KVView,
    ):  # fmt: skip
        arrays = source.arrays(group, position, position + tokens.size)
        header = Header(
            digest="", format=FORMAT_VERSION, key=key.hex(), group=group, shard=0,
            parent=address_text(parent) if parent else "",
            content_key=content_key(root, tokens.tobytes()).hex(), namespace=namespace,
            position=position, tokens=tokens.tolist(), codec=[coder.step()], provenance=EXACT, digests={},
        )  # fmt: skip
        self._encoded = Encoded(header, coder.encode(arrays, namespace.spec.groups[group]))
        self.size = self._encoded.size

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        return self._encoded.pieces()


class TierBlob:
    """An object of one tier on its way into another."""

    def __init__(self, tier: Tier, one: bytes):
        self._tier = tier
        self._address = one
        try:
            with tier.open(one) as reader:
                self.size = reader.size
        except (KeyError, TierError, CorruptObjectError, OSError):
            self.size = 0

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        buffer = memoryview(bytearray(min(_COPY_BYTES, self.size)))
        try:
            with self._tier.open(self._address) as reader:
                for offset in range(0, self.size, len(buffer)):
                    piece = buffer[: min(len(buffer), self.size - offset)]
                    reader.read_into(offset, [piece])
                    yield offset, [piece]
        except KeyError:
            raise TierError("the object was evicted before it was copied") from None


class _Nothing:
    size = 0

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        return iter(())


NO_BLOB: Blob = _Nothing()

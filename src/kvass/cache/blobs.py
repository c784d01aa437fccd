"""Objects on their way into a tier: a chunk of a live sequence, or an object of another tier."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from kvass.cache.coding import Target
from kvass.cache.pool import KVView, check_fit
from kvass.chunks import Tokens
from kvass.codecs.base import Chunk
from kvass.container import Blob, Buffer, Encoded, Header, Reader
from kvass.errors import CorruptObjectError, TierError
from kvass.keys import FORMAT_VERSION, address_text, content_key, split_address
from kvass.tiers.base import Tier

_COPY_BYTES = 1 << 20


class ChunkBlob:
    """A chunk of the source. Its header is made when the size is asked for, its bytes are read when written.

    Both then raise InputError where the source's arrays are not what the spec says.
    """

    def __init__(
        self, target: Target, one: bytes, parent: bytes | None, root: bytes, position: int, tokens: Tokens,
        source: KVView, end: int,
    ):  # fmt: skip
        """`end`: tokens of the whole sequence."""
        self._target, self._parent, self._root = target, parent, root
        self._key, self._group, self._shard = split_address(one)
        self._position, self._tokens, self._source = position, tokens, source
        group = target.namespace.spec.groups[self._group]
        self._behind = target.behind(group, end, position + tokens.size)

    @cached_property
    def _encoded(self) -> Encoded:
        return self.encoded()

    def encoded(self) -> Encoded:
        """The object, its arrays encoded now."""
        tokens, namespace, coder = self._tokens, self._target.namespace, self._target.coder
        group = namespace.spec.groups[self._group]
        arrays = self._source.arrays(self._group, self._position, self._position + tokens.size)
        check_fit(arrays, namespace.arrays, group, tokens.size)
        header = Header(
            digest="", format=FORMAT_VERSION, key=self._key.hex(), group=self._group, shard=self._shard,
            parent=address_text(self._parent) if self._parent else "",
            content_key=content_key(self._root, tokens.tobytes()).hex(), namespace=namespace,
            position=self._position, tokens=tokens.tolist(), codec=[coder.step()],
            provenance=self._target.coded(self._behind), digests={},
        )  # fmt: skip
        chunk = Chunk(group, self._group, self._position, tokens.size, self._behind)
        return Encoded(header, coder.encode(arrays, chunk))

    @property
    def size(self) -> int:
        return self._encoded.size

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        return self._encoded.pieces()


class ReaderBlob:
    """An open object on its way into a tier, piece by piece."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self.size = reader.size

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        """In order; each is overwritten by the next."""
        buffer = memoryview(bytearray(min(_COPY_BYTES, self.size)))
        for offset in range(0, self.size, len(buffer)):
            piece = buffer[: min(len(buffer), self.size - offset)]
            self._reader.read_into(offset, [piece])
            yield offset, [piece]


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
        try:
            with self._tier.open(self._address) as reader:
                if reader.size != self.size:
                    raise TierError("the object was replaced before it was copied")
                yield from ReaderBlob(reader).pieces()
        except KeyError:
            raise TierError("the object was evicted before it was copied") from None


class _Nothing:
    size = 0

    def pieces(self) -> Iterator[tuple[int, Sequence[Buffer]]]:
        return iter(())


NO_BLOB: Blob = _Nothing()

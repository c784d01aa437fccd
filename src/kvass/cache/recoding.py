"""Objects between tiers that store by different codecs: verified, decoded, encoded, and then written."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from kvass import metrics
from kvass.cache.coding import Recoder
from kvass.cache.finding import Failed
from kvass.cache.moving import FAILURES, check_size, quarantine
from kvass.chunks import as_tokens
from kvass.codecs.base import Chunk, Codec
from kvass.codecs.registry import NotDecodableError
from kvass.container import Array, Blob, Encoded, Reader, empty_arrays, read_arrays, read_header
from kvass.errors import CorruptObjectError, InputError, UnsupportedModelError
from kvass.keys import KEY_BYTES, address, address_text, content_key, next_key
from kvass.provenance import EXACT, Lossy
from kvass.spec import numpy_dtype
from kvass.tiers.base import Run, Tier, WriteItem

BATCH_BYTES = 64 << 20
"""Of KV encoded, then written: bounds what is in memory at once (but for a single object that is larger)."""
_MAX_RATIO = 256
"""What claims to be more times smaller than its KV is hostile: it would take memory for nothing."""


def decoded(
    arrays: Mapping[str, Array], coder: Codec, chunk: Chunk, names: Sequence[str]
) -> dict[str, Array]:
    """Stored arrays decoded, and checked to be the canonical ones. Raises CorruptObjectError."""
    if chunk.group.bytes_per_token * chunk.tokens > _MAX_RATIO * sum(one.nbytes for one in arrays.values()):
        raise CorruptObjectError("object is smaller than any codec makes so much KV")
    try:
        found = coder.decode(arrays, chunk)
    except InputError as error:  # a position that its tables do not have, say
        raise CorruptObjectError(f"object cannot be decoded: {error}") from error
    dtype = numpy_dtype(chunk.group.dtype)
    wanted = {name: (chunk.group.shape(name, chunk.tokens), dtype) for name in names}
    if {name: (array.shape, array.dtype) for name, array in found.items()} != wanted:
        raise CorruptObjectError("object's arrays are not what the spec says")
    return found


def recoded(reader: Reader, item: WriteItem, source: bytes, recoder: Recoder) -> Encoded:
    """The object at address `source`, as `item` is to be: with the target's namespace, codec and provenance.

    Everything is read and verified: digests, and that its text is the one that both addresses stand for. What
    has the target's codec already is not encoded again. Exact state is coded for the recoder's end; lossy
    state stays coded for what it was, however it is stored. Raises CorruptObjectError, and InputError where
    the target's codec does not take it.
    """
    parsed = read_header(reader)
    (target, decoder, end), header = recoder, parsed.header
    namespace, number = target.namespace, header.group
    if number >= len(namespace.spec.groups):
        raise CorruptObjectError("object is of a group that its spec does not have")
    group, tokens = namespace.spec.groups[number], as_tokens(header.tokens)
    check_size(parsed.size, group.bytes_per_token, item.length)
    before = item.parent[:KEY_BYTES] if item.parent else item.root
    key = item.address[:KEY_BYTES]
    same_root = header.namespace.root() == item.root
    if (
        address(bytes.fromhex(header.key), number, header.shard) != source
        or source[KEY_BYTES:] != item.address[KEY_BYTES:]
        or (header.position, tokens.size) != (item.position, item.length)
        or next_key(before, tokens.tobytes(), tokens.size) != key
        or (item.tokens is not None and tokens.tobytes() != item.tokens.tobytes())
        or not (same_root or header.provenance == EXACT)
    ):
        raise CorruptObjectError("object is not the one that its address says")
    coder = decoder(header)
    stored = empty_arrays(parsed)
    read_arrays(reader, parsed, stored)
    if same_root and header.codec == [target.coder.step()]:
        return Encoded(header, stored)
    chunk = Chunk(group, number, item.position, item.length)
    arrays = decoded(stored, coder, chunk, namespace.arrays)
    held = header.provenance
    if same_root:
        behind = held.behind if isinstance(held, Lossy) else 0
    else:
        behind = target.behind(group, end, item.position + item.length)
    changed = msgspec.structs.replace(
        header, digest="", key=key.hex(), parent=address_text(item.parent) if item.parent else "",
        content_key=content_key(item.root, tokens.tobytes()).hex(),
        namespace=header.namespace if same_root else namespace,
        codec=[target.coder.step()], provenance=held if same_root else target.coded(behind),
        digests={},
    )  # fmt: skip
    try:
        return Encoded(changed, target.coder.encode(arrays, chunk._replace(behind=behind)))
    except CorruptObjectError as error:  # not what was read: the tables do not fit
        raise InputError(f"{target.coder.name} cannot code this object: {error}") from error


def recoded_of(source: Tier, item: WriteItem, one: bytes, recoder: Recoder, failed: Failed) -> Encoded | None:
    """`recoded` of what a tier has at address `one`; None where that failed, which is noted. What fails its
    digests goes from a tier on this machine. Raises KeyError where there is nothing."""
    try:
        with source.open(one) as reader:
            return recoded(reader, item, one, recoder)
    except NotDecodableError as error:
        failed(source, "recode", error)
    except CorruptObjectError as error:
        failed(source, "recode", error)
        if not source.remote:
            quarantine(source, one, failed)
    except (*FAILURES, InputError, UnsupportedModelError) as error:
        failed(source, "recode", error)
    return None


def write_encoded(
    tier: Tier, items: Sequence[WriteItem], make: Callable[[WriteItem], Blob | None], sizes: Sequence[int],
    run: Run,
) -> list[bool]:  # fmt: skip
    """Write objects that have to be encoded: batch by batch, on the caller's threads, before the tier is
    asked for room. `sizes`: bytes a token of each group. Which are in the tier afterwards.

    Where `make` gives nothing, what comes behind that object is left out: it would have no parent.
    """
    done: list[bool] = []
    lost: set[bytes] = set()
    for batch in in_batches(items, sizes):
        blobs: dict[bytes, Blob] = {}

        def prepare(item: WriteItem, into: dict[bytes, Blob] = blobs) -> bool:
            blob = make(item)
            if blob is not None:
                into[item.address] = blob
            return blob is not None

        list(run(prepare, [item for item in batch if item.parent not in lost]))
        ready = []
        for item in batch:
            if item.address in blobs and item.parent not in lost:
                ready.append(item._replace(blob=blobs[item.address]))
            else:
                lost.add(item.address)
        there = tier.write(ready, run) if ready else []
        stored = {item.address for item, ok in zip(ready, there, strict=True) if ok}
        lost.update(item.address for item in ready if item.address not in stored)
        done += [item.address in stored for item in batch]
    return done


def in_batches(items: Sequence[WriteItem], sizes: Sequence[int]) -> Iterator[list[WriteItem]]:
    """Items in order, as many at once as BATCH_BYTES of KV allow. `sizes`: bytes a token of each group."""
    batch: list[WriteItem] = []
    held = 0
    for item in items:
        size = sizes[item.address[KEY_BYTES]] * item.length
        if batch and held + size > BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def move(
    source: Tier, target: Tier, items: Sequence[WriteItem], recoder: Recoder, failed: Failed, run: Run,
    at: Mapping[bytes, bytes] | None = None,
) -> int:  # fmt: skip
    """As `moving.copy`, for tiers that store by different codecs: how many items are not in the target now.

    `at`: where the source has an item, if under another address.
    """

    def make(item: WriteItem) -> Blob | None:
        one = at[item.address] if at is not None else item.address
        try:
            blob = recoded_of(source, item, one, recoder, failed)
        except KeyError:
            return None
        if blob is None:
            metrics.dropped_stores.labels(target.name, "error").inc()
        return blob

    groups = recoder.target.namespace.spec.groups
    done = write_encoded(target, items, make, [group.bytes_per_token for group in groups], run)
    return done.count(False)

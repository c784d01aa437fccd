"""Whether a directory tier's files and its index say the same, and nothing else is left lying about."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvass.chunks import Tokens, as_tokens
from kvass.container import Array, Header, empty_arrays, read_arrays, read_header
from kvass.fingerprints import fingerprints_of_parts
from kvass.keys import KEY_BYTES, address_text, next_key, parse_address, split_address
from kvass.spec import LayerGroup
from kvass.tiers.base import MOST_MARKS
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.files import charge, open_object
from kvass.tiers.index import _CHILD, _TAG_BYTES, Index, Record, _rows, pack_tokens, tree_parent
from kvass.tiers.marks import _PLACE, is_marked

from .kv import same_bits, values

_SUFFIX = ".safetensors"


class Rows(NamedTuple):
    """What an index holds, less the times. Addresses as text."""

    objects: dict[str, Record]
    tokens: dict[str, bytes]
    children: dict[bytes, bytes]
    leaves: set[str]
    intents: dict[str, int]
    quarantined: dict[str, int]
    used: int
    count: int


def rows_of(index: Index) -> Rows:
    """Everything in an index, at one moment."""
    with index.read() as txn:
        return Rows(
            {
                address_text(bytes(one)): Record.unpack(raw)._replace(created=0.0, accessed=0.0)
                for one, raw in txn.cursor(index.objects)
            },
            {address_text(bytes(one)): bytes(raw) for one, raw in txn.cursor(index.tokens)},
            {bytes(row): bytes(raw) for row, raw in txn.cursor(index.children)},
            {address_text(bytes(one)) for one, _ in txn.cursor(index.leaves)},
            {
                address_text(bytes(one)): int.from_bytes(bytes(raw)[16:], "little")
                for one, raw in txn.cursor(index.intents)
            },
            index.in_quarantine(txn),
            *index.usage(txn),
        )


class Stored(NamedTuple):
    """An object file that was read and verified."""

    header: Header
    size: int
    tokens: Tokens


def read_objects(path: Path) -> dict[str, Stored]:
    """Every object file of a tier, each verified: digests, key, place, and contents as `values` makes them.

    Raises AssertionError for anything else below `objects`, CorruptObjectError for what fails its digest.
    """
    found: dict[str, Stored] = {}
    contents = {}
    for file in sorted((path / "objects").glob("*/*")):
        assert file.suffix == _SUFFIX and file.is_file() and not file.is_symlink(), f"{file} lies about"
        one = file.name.removesuffix(_SUFFIX)
        assert file.parent.name == one[:2]
        with open_object(file) as reader:
            parsed = read_header(reader)
            contents[one] = empty_arrays(parsed)
            read_arrays(reader, parsed, contents[one])
        header = parsed.header
        key, group, shard = split_address(parse_address(one))
        assert (header.key, header.group, header.shard) == (key.hex(), group, shard)
        found[one] = Stored(header, file.stat().st_size, as_tokens(header.tokens))
    for one, (header, _, tokens) in found.items():
        before = _before(found, header)
        previous = (
            split_address(parse_address(header.parent))[0] if header.parent else header.namespace.root()
        )
        assert next_key(previous, tokens.tobytes(), tokens.size).hex() == header.key
        assert before.size == header.position, f"{one} stands at {header.position}, not {before.size}"
        held = header.namespace.spec.groups[header.group]
        _check_contents(held, as_tokens([*before, *tokens]), header.position, contents[one])
    return found


def _before(found: dict[str, Stored], header: Header) -> Tokens:
    parts: list[int] = []
    while header.parent:
        assert header.parent in found, f"{header.key} has lost its parent"
        header = found[header.parent].header
        parts = [*header.tokens, *parts]
    return as_tokens(parts)


def _check_contents(group: LayerGroup, tokens: Tokens, start: int, arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        assert same_bits(array, values(group, name, tokens, start, tokens.size)), f"{name} has wrong contents"


def rows_for(stored: dict[str, Stored], quarantined: dict[str, int]) -> Rows:
    """What an index must hold for these files."""
    children = dict.fromkeys(stored, 0)
    for held in stored.values():
        if held.header.parent:
            children[held.header.parent] += 1
    objects, packed_tokens, tree = {}, {}, {}
    for text, (header, size, tokens) in stored.items():
        one = parse_address(text)
        root = header.namespace.root()
        parent = parse_address(header.parent) if header.parent else b""
        objects[text] = Record(
            charge(size), tokens.size, header.position, children[text], 0.0, 0.0, 0.0, parent, root
        )
        packed = pack_tokens(tokens) if header.group == 0 else b""
        if packed:
            packed_tokens[text] = packed
        for row in _rows(tree_parent(parent, root, header.group, header.shard), one[:_TAG_BYTES], packed):
            tree[row] = _CHILD.pack(one, tokens.size)
    used = sum(record.size for record in objects.values()) + sum(quarantined.values())
    leaves = {one for one, count in children.items() if not count}
    return Rows(objects, packed_tokens, tree, leaves, {}, quarantined, used, len(objects))


def blocks(path: Path) -> int:
    """Bytes of all files below a tier's directory, in whole blocks."""
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                total += charge(file.stat().st_size)
    return total


@contextlib.contextmanager
def opened(path: Path, budget: int) -> Iterator[DirectoryTier]:
    """A tier of one's own, closed in the end."""
    tier = DirectoryTier(path, budget, name="checked")
    try:
        yield tier
    finally:
        tier.close()


class Healed(NamedTuple):
    """How many objects a tier holds, and how many rows had lost their file before it was mended."""

    objects: int
    without_file: int


def assert_consistent(path: Path, budget: int) -> Healed:
    """Reconcile with a fresh tier while nobody else uses the directory; then everything must be right.

    A row without a file is what a death between unlinking and committing leaves; it must go as soon as
    somebody asks for the object. A file without a row must never be.
    """
    with opened(path, budget) as tier:
        tier.maintain()
        index = tier._live()
        before = rows_of(index)
        assert not before.intents, "intents of the dead were not undone"
        files = {file.name.removesuffix(_SUFFIX) for file in (path / "objects").glob("*/*")}
        assert not files - before.objects.keys(), "files without a row"
        without = before.objects.keys() - files
        for one in without:
            with contextlib.suppress(KeyError), tier.open(parse_address(one)):
                raise AssertionError("an object without a file was opened")
        tier.maintain()
        stored = read_objects(path)
        quarantined = {file.name: charge(file.stat().st_size) for file in (path / "quarantine").iterdir()}
        found = rows_of(index)
        unpinned = {one: record._replace(pinned_until=0.0) for one, record in found.objects.items()}
        assert_same(found._replace(objects=unpinned), rows_for(stored, quarantined))
        assert_marks(index, stored)
        assert [folder.name for folder in (path / "owners").iterdir()] == [tier._owner.id.hex()]
        assert not list((path / "owners").glob("*/tmp/*")) and not list((path / "owners").glob("*/leases/*"))
        expected = {"index", "kvass.json", "objects", "owners", "quarantine", "setup.lock"}
        assert {entry.name for entry in path.iterdir()} <= expected
        assert tier.usage().bytes <= budget
        assert blocks(path) <= budget
        return Healed(len(stored), len(without))


def assert_marks(index: Index, stored: dict[str, Stored]) -> None:
    """Each object has the fingerprints that its tokens and those before them have; they lead to it, unless
    as many others have them too, and to nothing else."""
    with index.read() as txn:
        own = {bytes(one): bytes(raw) for one, raw in txn.cursor(index.marked)}
        rows = {bytes(row): list(_PLACE.iter_unpack(raw)) for row, raw in txn.cursor(index.marks)}
    led = {(row, *place) for row, places in rows.items() for place in places}
    assert all(0 < len(places) <= MOST_MARKS for places in rows.values())
    wanted, all_places = {}, set()
    for text, (header, _, tokens) in stored.items():
        one = parse_address(text)
        if not is_marked(header.namespace, one):
            continue
        before = _before(stored, header)
        (marks,) = fingerprints_of_parts(as_tokens([*before, *tokens]), [before.size])
        root, values = header.namespace.root(), [value.to_bytes(8) for value in marks.values.tolist()]
        if values:
            wanted[one] = b"".join(values)
        for value, place in zip(values, marks.places.tolist(), strict=True):
            all_places.add((root[:8] + value, one[:KEY_BYTES], place))
    assert own == wanted, "objects with other fingerprints than those of their tokens"
    assert led <= all_places, "rows that lead where nothing stands"
    for row, *_ in all_places - led:
        assert len(rows.get(row, ())) > 0, "a fingerprint that leads nowhere"


def assert_same(found: Rows, wanted: Rows) -> None:
    """Raises AssertionError that names the table, and a few of the rows, in which two indexes differ."""
    for name, one, other in zip(Rows._fields, found, wanted, strict=True):
        if one != other:
            if isinstance(one, dict) and isinstance(other, dict):
                differ = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
                shown = [(key, one.get(key), other.get(key)) for key in differ[:3]]
                raise AssertionError(f"{len(differ)} rows of {name} differ: {shown}")
            raise AssertionError(f"{name}: {one} instead of {other}")

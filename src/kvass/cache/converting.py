"""Recoding what a tier holds: `KVCache.recode`, behind `kvass recode`."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvass.cache.blobs import NO_BLOB
from kvass.cache.coding import Recoder, Target
from kvass.cache.inspection import StoredChunk, opener
from kvass.cache.moving import FAILURES
from kvass.cache.reading import Reading
from kvass.cache.recoding import recoded_of, write_encoded
from kvass.chunks import as_tokens
from kvass.codecs.registry import is_lossless
from kvass.container import Blob, Header, read_header, verify
from kvass.errors import ConfigError, InputError, UnsupportedModelError
from kvass.keys import KEY_BYTES, Namespace, next_key
from kvass.provenance import EXACT, Lossy
from kvass.tiers.base import Entry, Pruning, Replacing, Tier, WriteItem

_FAILURES = (*FAILURES, InputError, UnsupportedModelError)


class RecodeCounts(NamedTuple):
    """What a recoding did. `already`: were in that codec; `left`: may not be in it (another class of state,
    an engine's own layout, refused by the gate, not matched); bytes of those recoded, before and after."""

    objects: int = 0
    recoded: int = 0
    already: int = 0
    left: int = 0
    failed: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def plus(self, **more: int) -> "RecodeCounts":
        """These counts and more."""
        return self._replace(**{name: getattr(self, name) + count for name, count in more.items()})


class Converting(Reading):
    """The verb of `kvass recode`."""

    def recode(
        self,
        to: str,
        tier: str,
        match: Callable[[StoredChunk], bool] | None = None,
        progress: Callable[[StoredChunk], None] | None = None,
    ) -> RecodeCounts:
        """Bring a tier's objects (those that `match`) to a codec, parents before children.

        A lossless codec replaces objects where they lie. A lossy one puts exact state, with what comes before
        it, into the namespace of its class and then takes the exact objects out of this tier, unless others
        that stay are stored behind them. Killed at any moment, the tier holds only whole objects, and another
        run goes on. `progress` is called for each object looked at. Raises ConfigError for an unknown codec
        or tier, or one that cannot replace objects.
        """
        chosen = next((one for one in self._usable() if one.name == tier), None)
        if chosen is None:
            names = ", ".join(one.name for one in self.tiers)
            raise ConfigError(f"no tier is called {tier!r}; there are: {names}")
        if is_lossless(to) and not isinstance(chosen, Replacing):
            raise ConfigError(f"the {tier} tier cannot replace objects, so nothing of it is made {to!r}")
        counts = RecodeCounts()
        try:
            families = _families(chosen.scan())
        except FAILURES as error:
            self._failed(chosen, "scan", error)
            return counts
        for family in families:
            stored = [
                StoredChunk(tier, one, opener(chosen.within(one.root), one, self._coding.decoder))
                for one in family
            ]
            counts = self._recode_family(to, chosen.within(family[0].root), stored, match, counts)
            for one in stored if progress else ():
                assert progress is not None
                progress(one)
        return counts

    def _recode_family(
        self, to: str, tier: Tier, stored: Sequence[StoredChunk], match: Callable[[StoredChunk], bool] | None,
        counts: RecodeCounts,
    ) -> RecodeCounts:  # fmt: skip
        """Recode the objects of texts that begin with one chunk, in the order of their positions."""
        counts = counts.plus(objects=len(stored))
        headers: dict[bytes, Header] = {}
        wanted: list[Entry] = []
        for one in stored:
            try:
                with tier.open(one.entry.address) as reader:
                    headers[one.entry.address] = read_header(reader).header
                if match is None or match(one):
                    wanted.append(one.entry)
                else:
                    counts = counts.plus(left=1)
            except KeyError:
                counts = counts.plus(objects=-1)  # evicted meanwhile
            except _FAILURES as error:
                self._failed(tier, "recode", error)
                counts = counts.plus(failed=1)
        lossy: list[Entry] = []
        inside: list[tuple[Entry, Target]] = []
        for entry in wanted:
            header = headers[entry.address]
            exact = header.namespace.state == EXACT.kind
            if exact and not is_lossless(to):
                lossy.append(entry)
                continue
            target = self._coding.in_place(to, header)
            if target is None:
                counts = counts.plus(left=1)
            elif header.codec == [target.coder.step()]:
                counts = counts.plus(already=1)
            else:
                inside.append((entry, target))
        counts = self._replace_all(tier, inside, headers, counts)
        return self._lower_all(to, tier, [one.entry for one in stored], lossy, headers, counts)

    def _replace_all(
        self, tier: Tier, found: list[tuple[Entry, Target]], headers: dict[bytes, Header],
        counts: RecodeCounts,
    ) -> RecodeCounts:  # fmt: skip
        if not isinstance(tier, Replacing):
            return counts.plus(left=len(found))

        def one(place: tuple[Entry, Target]) -> int:
            entry, target = place
            item = _item(entry, headers[entry.address], entry.address, entry.parent, entry.root)
            blob = self._recoded(tier, item, entry.address, target)
            if blob is None:
                return 0
            try:
                return blob.size if tier.replace(item._replace(blob=blob)) else 0
            except FAILURES as error:
                self._failed(tier, "recode", error)
                return 0

        sizes = self._executor.background_io_map(one, found)
        for (entry, _), size in zip(found, sizes, strict=True):
            if size:
                counts = counts.plus(recoded=1, bytes_before=entry.size, bytes_after=size)
            else:
                counts = counts.plus(failed=1)
        return counts

    def _recoded(
        self, tier: Tier, item: WriteItem, source: bytes, target: Target, end: int = 0
    ) -> Blob | None:
        recoder = Recoder(target, self._coding.decoder, end)
        try:
            return recoded_of(tier, item, source, recoder, self._failed)
        except KeyError:
            return None

    # -- from exact to lossy ------------------------------------------------------------------------------

    def _lower_all(
        self, to: str, tier: Tier, family: list[Entry], chosen: list[Entry], headers: dict[bytes, Header],
        counts: RecodeCounts,
    ) -> RecodeCounts:  # fmt: skip
        """Write exact objects by a lossy codec into the namespace of its class, then take them out."""
        if not chosen:
            return counts
        space = headers[chosen[0].address].namespace
        target = None
        if space.layout == "canonical":
            target = self._coding.lossy_target(space, to, to, "recode", None)
        if target is None:
            return counts.plus(left=len(chosen))
        needed = _with_parents(family, chosen)
        items, at = _lowered(needed, headers, target.namespace)
        lane, sizes = tier.within(target.namespace.root()), dict[bytes, int]()
        ends = _nearest_ends(family)

        def make(item: WriteItem) -> Blob | None:
            blob = self._recoded(tier, item, at[item.address], target, ends[at[item.address]])
            if blob is not None:
                sizes[at[item.address]] = blob.size
            return blob

        def whole(item: WriteItem) -> bool:
            return self._stands_in(lane, item, target, ends[at[item.address]])

        def again(item: WriteItem) -> None:
            blob = make(item) if isinstance(lane, Replacing) else None
            if blob is not None and isinstance(lane, Replacing):
                lane.replace(item._replace(blob=blob))

        run = self._executor.background_io_map
        try:
            there = lane.contains([item.address for item in items])
            lacking = [item for item, ok in zip(items, there, strict=True) if not ok]
            held = [item for item, ok in zip(items, there, strict=True) if ok]
            done = {item.address for item, ok in zip(held, run(whole, held), strict=True) if ok}
            # of other tables, damaged, or coded for an end further on
            list(run(again, [item for item in held if item.address not in done]))
            each = [group.bytes_per_token for group in target.namespace.spec.groups]
            write_encoded(lane, lacking, make, each, run)
            new = [item for item in items if item.address not in done]
            done |= {item.address for item, ok in zip(new, run(whole, new), strict=True) if ok}
            lowered = {at[one] for one in done}
            self._take_out(tier, family, chosen, lowered)
        except FAILURES as error:
            self._failed(tier, "recode", error)
            return counts.plus(failed=len(chosen))
        for entry in chosen:
            if entry.address in lowered:
                after = sizes.get(entry.address, 0)
                counts = counts.plus(recoded=1, bytes_before=entry.size, bytes_after=after)
            else:
                counts = counts.plus(failed=1)
        return counts

    def _stands_in(self, lane: Tier, item: WriteItem, target: Target, end: int) -> bool:
        """Whether an object can stand in for the exact one that is to go: read, whole, decoded by today's
        tables, and coded for no end further on than its text has."""
        try:
            with lane.open(item.address) as reader:
                parsed = read_header(reader)
                header, done = parsed.header, target.provenance
                if not (isinstance(header.provenance, Lossy) and isinstance(done, Lossy)):
                    return False
                group = target.namespace.spec.groups[header.group]
                behind = target.behind(group, end, item.position + item.length)
                if header.provenance.tables != done.tables or header.provenance.behind > behind:
                    return False
                self._coding.decoder(header)
                verify(reader, parsed)
                return True
        except (KeyError, *_FAILURES):
            return False

    @staticmethod
    def _take_out(tier: Tier, family: list[Entry], chosen: list[Entry], lowered: set[bytes]) -> None:
        """Delete what was lowered with all its parts, children first, where nothing that stays needs it."""
        parts: dict[bytes, set[bytes]] = {}
        children: dict[bytes, set[bytes]] = {}
        for entry in family:
            key = entry.address[:KEY_BYTES]
            parts.setdefault(key, set()).add(entry.address)
            if entry.parent:
                children.setdefault(entry.parent[:KEY_BYTES], set()).add(key)
        gone = lowered & {entry.address for entry in chosen}
        deleted: set[bytes] = set()
        delete = tier.delete_leaves if isinstance(tier, Pruning) else tier.delete
        for entry in reversed(family):
            key = entry.address[:KEY_BYTES]
            if key in deleted or not parts[key] <= gone or not children.get(key, set()) <= deleted:
                continue
            if delete(sorted(parts[key])):
                deleted.add(key)


def _families(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Objects by the first chunk of their text, each family in the order of positions."""
    known = {entry.address: entry for entry in entries}
    first: dict[bytes, bytes] = {}

    def origin(entry: Entry) -> bytes:
        path = []
        while entry.address not in first and (before := _parent(entry, known)):
            path.append(entry.address)
            entry = before
        found = first.get(entry.address, entry.address[:KEY_BYTES])
        first.update(dict.fromkeys((*path, entry.address), found))
        return found

    families: dict[bytes, list[Entry]] = {}
    for entry in sorted(known.values(), key=lambda one: (one.position, one.address[KEY_BYTES:], one.address)):
        families.setdefault(origin(entry), []).append(entry)
    return list(families.values())


def _parent(entry: Entry, known: dict[bytes, Entry]) -> Entry | None:
    """An object's parent, where it is here; a damaged index must not lead in circles."""
    found = known.get(entry.parent) if entry.parent else None
    return found if found is not None and found.position < entry.position else None


def _with_parents(family: list[Entry], chosen: list[Entry]) -> list[Entry]:
    """Chosen objects and all that come before them, in order: without those they could not be found."""
    known, needed = {entry.address: entry for entry in family}, set[bytes]()
    for entry in chosen:
        one: Entry | None = entry
        while one is not None and one.address not in needed:
            needed.add(one.address)
            one = _parent(one, known)
    return [entry for entry in family if entry.address in needed]


def _nearest_ends(family: list[Entry]) -> dict[bytes, int]:
    """For each object the nearest end of a stored sequence that goes through it: a prompt that ends there
    must not find it coded for one further on. One pass from the last position to the first."""
    known = {entry.address: entry for entry in family}
    nearest: dict[bytes, int] = {}
    for entry in reversed(family):
        end = nearest.setdefault(entry.address, entry.position + entry.length)
        before = _parent(entry, known)
        if before is not None and before.address[KEY_BYTES:] == entry.address[KEY_BYTES:]:
            nearest[before.address] = min(end, nearest.get(before.address, end))
    return nearest


def _lowered(
    entries: list[Entry], headers: dict[bytes, Header], space: Namespace
) -> tuple[list[WriteItem], dict[bytes, bytes]]:
    """The same texts' objects in another namespace, and where each comes from: keys anew, from the tokens.

    What has no parent here, as may be in a remote tier, is left out.
    """
    root = space.root()
    keys: dict[bytes, bytes] = {}
    items, at = [], {}
    for entry in entries:
        header = headers.get(entry.address)
        before = root if entry.parent is None else keys.get(entry.parent)
        if header is None or before is None:
            continue
        part, tokens = entry.address[KEY_BYTES:], as_tokens(header.tokens)
        key = next_key(before, tokens.tobytes(), tokens.size)
        keys[entry.address] = key
        parent = before + part if entry.parent else None
        items.append(_item(entry, header, key + part, parent, root))
        at[key + part] = entry.address
    return items, at


def _item(entry: Entry, header: Header, one: bytes, parent: bytes | None, root: bytes) -> WriteItem:
    tokens = as_tokens(header.tokens) if one[KEY_BYTES] == 0 else None
    return WriteItem(one, parent, root, entry.position, entry.length, tokens, NO_BLOB)

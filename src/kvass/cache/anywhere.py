"""What is stored of a prompt wherever in a stored sequence it stands: found, and made ready to be loaded."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvass.cache.finding import Failed, nearest
from kvass.cache.looking import TokenIds
from kvass.cache.match import Match
from kvass.cache.moving import FAILURES
from kvass.cache.passages import Held, Passage, passages
from kvass.cache.reading import Reading
from kvass.chunks import Tokens, as_tokens
from kvass.container import read_header
from kvass.errors import CorruptObjectError, InputError
from kvass.keys import KEY_BYTES, Namespace, address, next_key, parse_address
from kvass.tiers.base import Mark, Marking, Tier


class Anywhere(Reading):
    """The verbs of reuse anywhere in a prompt."""

    def passages(self, tokens: TokenIds, namespace: Namespace, *, start: int = 0) -> list[Passage]:
        """The passages of `tokens[start:]` that this machine's tiers hold as exact state, wherever in a
        stored sequence they stand: every run of 64 tokens or more. Apart from each other, in order; each
        compared token by token. Of what stands in very many sequences the latest are looked at, and tiers
        that are no `Marking` give nothing.

        Takes time in proportion to the prompt, not to what is stored. Never raises because of a tier. Raises
        InputError for unusable tokens.
        """
        array = as_tokens(tokens)
        start = max(0, min(start, array.size))
        tiers = self._here() if namespace.state == "exact" else []
        root = namespace.root()

        def seen(values: Sequence[int]) -> list[Mark]:
            found: dict[Mark, None] = {}
            for tier in tiers:
                if isinstance(tier, Marking):
                    try:
                        found.update(dict.fromkeys(tier.seen(root, values)))
                    except FAILURES as error:
                        self._failed(tier, "passages", error)
            return list(found)

        def child(parent: bytes, following: Tokens) -> bytes | None:
            found = nearest(tiers, self._failed, parent, following)
            return None if found is None else found[1].address

        return passages(array, start, seen, _remembered(tiers, self._failed, namespace), child)

    def donors(self, found: Iterable[Passage], namespace: Namespace) -> Iterator[Match | None]:
        """For each passage what is stored up to its end, from its sequence's beginning on: for `load`, with
        `start`. None where it is no longer all there.

        Costs a lookup each, and the header of each chunk before it, once. Never raises because of a tier.
        """
        held = _remembered(self._here(), self._failed, namespace)
        for passage in found:
            yield self._donor(passage, namespace, held)

    def _donor(
        self, passage: Passage, namespace: Namespace, held: Callable[[bytes], Held | None]
    ) -> Match | None:
        parts: list[Tokens] = []
        position = -1
        one: bytes | None = passage.address
        while one is not None:
            chunk = held(one)
            if chunk is None or (parts and chunk.position + chunk.tokens.size != position):
                return None
            parts.append(chunk.tokens)
            position, one = chunk.position, chunk.parent
        tokens = np.concatenate(parts[::-1])
        if position or not 0 <= passage.place < passage.end <= tokens.size:
            return None
        match = self._find(tokens, namespace, passage.end, None, 0.0, local=True)
        return match if match.length == passage.end else None


def _remembered(
    tiers: Sequence[Tier], failed: Failed, namespace: Namespace
) -> Callable[[bytes], Held | None]:
    """A function that gives a chunk as the first tier has it; each is read once."""
    known: dict[bytes, Held | None] = {}

    def held(one: bytes) -> Held | None:
        if one not in known:
            known[one] = _held(tiers, failed, namespace, one)
        return known[one]

    return held


def _held(tiers: Sequence[Tier], failed: Failed, namespace: Namespace, one: bytes) -> Held | None:
    for tier in tiers:
        try:
            return _read(tier, namespace, one)
        except KeyError:
            continue
        except (*FAILURES, InputError) as error:
            failed(tier, "passages", error)
    return None


def _read(tier: Tier, namespace: Namespace, one: bytes) -> Held:
    """A chunk's header, which must be that of the address: from that follow its tokens and all before it."""
    with tier.open(one) as reader:
        header = read_header(reader).header
    tokens, root = as_tokens(header.tokens), namespace.root()
    parent = parse_address(header.parent) if header.parent else None
    key = next_key(parent[:KEY_BYTES] if parent else root, tokens.tobytes(), tokens.size)
    if (
        address(key, 0) != one
        or address(bytes.fromhex(header.key), header.group, header.shard) != one
        or (parent is not None and parent[KEY_BYTES:] != one[KEY_BYTES:])
        or (header.namespace != namespace and header.namespace.root() != root)
    ):
        raise CorruptObjectError("object is not the one that its address says")
    return Held(tokens, header.position, parent)

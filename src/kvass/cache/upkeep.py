"""What an operator does with what is stored: pin, forget, remove, list, verify, explain."""

import time
from collections.abc import Callable, Iterator, Sequence

from kvass.cache.inspection import Explanation, StoredChunk, explanation, opener
from kvass.cache.looking import TokenIds
from kvass.cache.moving import FAILURES
from kvass.cache.pool import Pool
from kvass.cache.reading import STAGE_SECONDS, Reading
from kvass.chunks import Tokens, as_tokens, common_prefix
from kvass.codecs.registry import NotDecodableError, is_lossless
from kvass.container import read_header
from kvass.errors import CorruptObjectError
from kvass.keys import Namespace, address, approximate_namespace, chain, next_key, parse_address
from kvass.provenance import codec_of_class, is_blend
from kvass.quality import Budget
from kvass.tiers.base import Tier, Usage


class Upkeep(Reading):
    """The verbs of `kvass ls`, `rm`, `verify`, `explain` and of rules."""

    def pin(self, tokens: TokenIds, namespace: Namespace, seconds: float) -> int:
        """Keep a prompt's stored objects from eviction for `seconds` (0: unpin), in every tier.

        Returns the tokens that are pinned. Their parents stay with them.
        """
        match = self.lookup(tokens, namespace, local=True)
        addresses = [piece.address for piece in match.pieces()]
        until = self._clock() + seconds if seconds else 0.0
        pinned = 0
        for tier in self._usable():
            try:
                pinned = max(pinned, tier.pin(addresses, until))
            except FAILURES as error:
                self._failed(tier, "pin", error)
        return match.length if pinned else 0

    def forget(self, tokens: TokenIds, namespace: Namespace, *, keep: int = 0) -> int:
        """Delete a prompt's stored chunks from the one that holds token `keep` on, with everything stored
        behind them, in every tier, and what lossy codecs made of them, or repair of prompts that begin with
        them; objects deleted. Pins do not hold against this. Scans this machine's tiers."""
        array = as_tokens(tokens)
        self._executor.flush()
        until = time.monotonic() + STAGE_SECONDS
        spaces = [namespace, *self._coding.classes(namespace), *self._blends(array, namespace)]
        return sum(self._forget(array, space, keep, until) for space in spaces)

    def _blends(self, array: Tokens, namespace: Namespace) -> list[Namespace]:
        """Where prompts were repaired that begin as `array` does: their roots tell nothing of them."""
        found: dict[bytes, Namespace] = {}
        for tier in self._here():
            for stored in self._entries(tier):
                entry = stored.entry
                if entry.parent is not None or entry.root in found or entry.root == namespace.root():
                    continue
                try:
                    with tier.open(entry.address) as reader:
                        header = read_header(reader).header
                except (KeyError, *FAILURES):
                    continue  # gone, or to be found by whoever verifies it
                space, size = header.namespace, min(array.size, len(header.tokens))
                same = space.root() == approximate_namespace(namespace, space.state).root()
                if same and is_blend(space.state) and common_prefix(as_tokens(header.tokens), array) >= size:
                    found[entry.root] = space
        return list(found.values())

    def _forget(self, array: Tokens, namespace: Namespace, keep: int, until: float) -> int:
        first = max(0, min(keep, array.size)) // self.chunk_tokens
        keys = chain(namespace.root(), array, self.chunk_tokens)
        parent = address(keys[first - 1] if first else namespace.root(), 0)
        whole = [address(keys[first], 0)] if first < len(keys) else []
        rest = array[first * self.chunk_tokens :][: self.chunk_tokens]
        gone = 0
        # In turn with stagings: one under way would bring back what it fetched before.
        with self._turns.wait(namespace.root() + b"".join(keys[:1]), until):
            for tier in reversed(
                self._within(namespace)
            ):  # slowest first: nothing can be promoted from it then
                try:
                    if tier.remote:
                        if self._coding.far(tier.name, namespace):
                            gone += tier.delete(self._parts(array, namespace, keys, first))
                        continue
                    if namespace.state == "exact" or any(tier.contains(whole)):
                        gone += tier.delete(whole)
                    while (child := tier.nearest_child(parent, rest)) and child.common in (
                        rest.size,
                        child.length,
                    ):
                        went = tier.delete([child.address])
                        gone += went
                        if not went:
                            break
                except FAILURES as error:
                    self._failed(tier, "forget", error)
        return gone

    def _parts(self, tokens: Tokens, namespace: Namespace, keys: list[bytes], first: int) -> list[bytes]:
        """Every object that a text has from its chunk `first` on: whole chunks and the last partial one."""
        tail = tokens[len(keys) * self.chunk_tokens :]
        last = keys[-1] if keys else namespace.root()
        wanted = [*keys[first:], *([next_key(last, tail.tobytes(), tail.size)] if tail.size else [])]
        groups = range(len(namespace.spec.groups))
        return [address(key, group, shard) for key in wanted for group in groups for shard in self.shards]

    def remove(self, text: str) -> int:
        """Delete one object by its address (as `entries` lists it) with everything behind it, in every
        tier; objects deleted. Raises InputError when the address is malformed."""
        one = parse_address(text)
        self._executor.flush()
        gone = 0
        for tier in reversed(self._usable()):
            try:
                gone += tier.delete([one]) if tier.remote or tier.contains([one])[0] else 0
            except FAILURES as error:
                self._failed(tier, "forget", error)
        return gone

    # -- looking --------------------------------------------------------------------------------------

    def explain(
        self,
        tokens: TokenIds,
        namespace: Namespace,
        *,
        context: int = 16,
        approximate: Sequence[Namespace] = (),
        budget: Budget | None = None,
    ) -> Explanation:
        """Why a prompt hits as far as it does: the first token that differs from the nearest stored text,
        and up to `context` tokens of both from there on. Looks at this machine's tiers, and scans them where
        the texts part at a chunk's start, or where more is asked for than one chunk holds. `approximate` and
        `budget` as in `lookup`; `verdicts` says of lossy codecs whether they may be used, and why."""
        match = self.lookup(tokens, namespace, local=True, approximate=approximate, budget=budget)
        found = explanation(self._here(), self._failed, match, context)
        asked = [name for space in approximate if (name := codec_of_class(space.state))]
        names = dict.fromkeys([*asked, *(self._coding.name(tier.name) for tier in self.tiers)])
        lossy = [name for name in names if name in asked or not is_lossless(name)]
        verdicts = {name: self._coding.verdict(namespace, name, budget) for name in lossy}
        return found._replace(verdicts=verdicts)

    def context(self, tokens: TokenIds, namespace: Namespace) -> tuple[int, Pool]:
        """What is stored of a prompt, as arrays: how many tokens, and a pool that holds their KV.

        Layers with a window hold only what it still sees.
        """
        match = self.lookup(tokens, namespace)
        pool = Pool(namespace.spec, match.length)
        return self.load(match, pool).tokens, pool

    def entries(self, namespace: Namespace | None = None) -> Iterator[StoredChunk]:
        """All stored objects, tier by tier; only those of `namespace` where one is given."""
        for tier in self._usable():
            yield from self._entries(tier, namespace)

    def _entries(self, tier: Tier, namespace: Namespace | None = None) -> Iterator[StoredChunk]:
        root = namespace.root() if namespace else None
        tier = tier.within(root) if root else tier
        try:
            for entry in tier.scan():
                if root is None or entry.root == root:
                    yield StoredChunk(
                        tier.name, entry, opener(tier.within(entry.root), entry, self._coding.decoder)
                    )
        except FAILURES as error:
            self._failed(tier, "scan", error)

    def verify(self, progress: Callable[[StoredChunk], None] | None = None) -> tuple[int, list[str]]:
        """Read every object of this machine's tiers; those that fail are quarantined. Objects read, addresses
        bad. What is in remote tiers is verified when it is staged."""
        count, bad = 0, []
        for tier in self._here():
            for stored in self._entries(tier):
                count += 1
                try:
                    self._verify_one(tier, stored)
                except KeyError:
                    count -= 1  # evicted meanwhile
                except FAILURES as error:
                    self._failed(tier, "verify", error)
                    bad.append(stored.address)
                if progress is not None:
                    progress(stored)
        return count, bad

    @staticmethod
    def _verify_one(tier: Tier, stored: StoredChunk) -> None:
        try:
            stored.arrays()
        except NotDecodableError:
            pass  # its digests are right, and that is all that can be said here
        except CorruptObjectError:
            tier.quarantine(stored.entry.address)
            raise

    def stats(self) -> dict[str, Usage]:
        """Usage of each tier that answers."""
        found = {}
        for tier in self._usable():
            try:
                found[tier.name] = tier.usage()
            except FAILURES as error:
                self._failed(tier, "stats", error)
        return found

"""What the two halves tell each other: the scheduler what to load and store, the worker what came of it."""

from collections.abc import Collection
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvass.cache.match import Match, Piece
from kvass.chunks import Tokens
from kvass.keys import Namespace

BlockIds = tuple[list[int], ...]
"""Of one request: for each vLLM group the ids of its blocks, from its first token on."""


@dataclass(frozen=True, slots=True)
class Remainder(Match):
    """A match of which the tokens before `start` are in the engine already."""

    start: int = 0

    def pieces(
        self, length: int | None = None, have: Collection[bytes] = (), *, unseen: bool = False
    ) -> list[Piece]:
        found = Match.pieces(self, length, have, unseen=unseen)
        return [piece for piece in found if piece.start + piece.used > self.start]


def remainder(match: Match, start: int) -> Remainder:
    """What of a match is still to be loaded behind the first `start` tokens."""
    fields = {name: getattr(match, name) for name in Match.__dataclass_fields__}
    return Remainder(**fields, start=start)


@dataclass(frozen=True, slots=True)
class Load:
    """One request's promised hit: `match.start` to `match.length` go into `blocks`.

    `waits`: the request runs only once its load was reported, and from its first token if that failed.
    """

    request: str
    match: Remainder
    blocks: BlockIds
    waits: bool


@dataclass(frozen=True, slots=True)
class Store:
    """One request's whole chunks, to be stored after this step; those before `start` are stored already."""

    request: str
    tokens: Tokens
    namespace: Namespace
    blocks: BlockIds
    start: int


@dataclass(slots=True)
class Work(KVConnectorMetadata):
    """One step's work. `tokens`: how many the step computes."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    tokens: int = 0


@dataclass(slots=True)
class Report(KVConnectorWorkerMetadata):
    """What came of a step's work: tokens in place of each load; where a store left off, of those skipped."""

    loaded: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        """Over the ranks: what all of them have."""
        assert isinstance(other, Report)
        for mine, theirs in ((self.loaded, other.loaded), (self.skipped, other.skipped)):
            for request, tokens in theirs.items():
                mine[request] = min(tokens, mine.get(request, tokens))
        return self

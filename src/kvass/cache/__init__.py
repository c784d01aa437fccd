"""The cache: lookup, load and store over tiers; the only package with threads."""

from kvass.cache.converting import RecodeCounts
from kvass.cache.executor import Copying
from kvass.cache.inspection import Difference, Explanation, StoredChunk
from kvass.cache.kvcache import KVCache
from kvass.cache.loading import LoadResult
from kvass.cache.looking import TokenIds
from kvass.cache.match import Match
from kvass.cache.pace import Pace
from kvass.cache.passages import Passage
from kvass.cache.pool import KVView, Pool
from kvass.cache.storing import StoreTicket

__all__ = [
    "Copying",
    "Difference",
    "Explanation",
    "KVCache",
    "KVView",
    "LoadResult",
    "Match",
    "Pace",
    "Passage",
    "Pool",
    "RecodeCounts",
    "StoreTicket",
    "StoredChunk",
    "TokenIds",
]

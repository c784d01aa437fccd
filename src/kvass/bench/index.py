"""`kvass bench index`: lookups of a long prompt in an index of a million objects, against raw index reads."""

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvass.bench.report import interleaved, machine, ratios
from kvass.bench.scratch import scratch
from kvass.bench.store import namespace
from kvass.cache import KVCache
from kvass.chunks import Tokens
from kvass.keys import address, chain
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.index import Record, acquire, release

_CHUNK = 256
_CHUNKS = 500
_BATCH = 5
_PROMPTS = 100
"""Each lookup is of another prompt than the last ones: nothing is warm but what a server would have warm."""


def run(disk: Path, *, objects: int, rounds: int, progress: Callable[[], None]) -> dict[str, Any]:
    """Medians of pairs: `lookup_vs_raw` with keys given, `lookup_tokens_vs_raw` from int32 tokens."""
    with scratch(disk) as (host_path, _):
        path = host_path / "tier"
        prompts = _fill(path, objects, progress)
        space = namespace()
        began = time.perf_counter()
        tier = DirectoryTier(path, 1 << 50, name="host")
        opened = time.perf_counter() - began
        with KVCache([tier]) as cache:
            index = acquire(path / "index", durable=False)
            known = [chain(space.root(), prompt, _CHUNK) for prompt in prompts]
            addresses = [[key + address(b"", 0) for key in keys] for keys in known]
            turn = itertools.count()

            def raw() -> float:
                wanted = addresses[next(turn) % len(prompts)]
                began = time.perf_counter()
                with index.read() as txn:
                    found = [txn.get(one, None, index.objects) for one in wanted]
                took = time.perf_counter() - began
                assert None not in found
                return took

            def lookup(*, with_keys: bool) -> float:
                at = next(turn) % len(prompts)
                keys = known[at] if with_keys else None
                began = time.perf_counter()
                match = cache.lookup(prompts[at], space, keys=keys)
                took = time.perf_counter() - began
                assert match.length == prompts[at].size
                return took

            sides = {
                "raw": raw,
                "keys": lambda: lookup(with_keys=True),
                "tokens": lambda: lookup(with_keys=False),
            }
            seconds = interleaved(sides, rounds)
            size = index.bytes_on_disk()
            release(index)
            progress()
            return {
                "bench": "index", "machine": machine(), "objects": tier.usage().objects, "chunks": _CHUNKS,
                "prompt_tokens": _CHUNKS * _CHUNK, "prompts": len(prompts), "rounds": rounds,
                "lookup_vs_raw": round(statistics.median(ratios(seconds["keys"], seconds["raw"])), 3),
                "lookup_tokens_vs_raw": round(
                    statistics.median(ratios(seconds["tokens"], seconds["raw"])), 3
                ),
                "raw_ms": round(statistics.median(seconds["raw"]) * 1e3, 3),
                "lookup_ms": round(statistics.median(seconds["keys"]) * 1e3, 3),
                "lookup_tokens_ms": round(statistics.median(seconds["tokens"]) * 1e3, 3),
                "open_ms": round(opened * 1e3, 2),
                "index_bytes": size,
            }  # fmt: skip


def _fill(path: Path, objects: int, progress: Callable[[], None]) -> list[Tokens]:
    """Rows of contexts of 500 chunks each, as storing them would leave; the tokens of some of them."""
    space, random = namespace(), np.random.default_rng(0)
    root = space.root()
    tier = DirectoryTier(path, 1 << 50, name="host")
    index = acquire(path / "index", durable=False)
    contexts = objects // _CHUNKS
    kept = []
    for first in range(0, contexts, _BATCH):
        with index.write() as txn:
            for context in range(first, min(first + _BATCH, contexts)):
                tokens = random.integers(0, 1 << 17, _CHUNKS * _CHUNK, np.int32)
                parent = b""
                for number, key in enumerate(chain(root, tokens, _CHUNK)):
                    one = address(key, 0)
                    record = Record(5_906_432, _CHUNK, number * _CHUNK, 0, 0.0, 0.0, 0.0, parent, root)
                    index.insert(txn, one, record, tokens[number * _CHUNK : (number + 1) * _CHUNK])
                    parent = one
                if context % max(1, contexts // _PROMPTS) == 0:
                    kept.append(tokens)
        progress()
    release(index)
    tier.close()
    return kept

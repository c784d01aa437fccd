"""How much of what recurs in agents' prompts is found: files and tool results moved, inserted, edited."""

import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvass.bench.scratch import scratch
from kvass.cache import KVCache, Pool
from kvass.calibrate.texts import held_texts
from kvass.chunks import Tokens, as_tokens
from kvass.keys import Namespace
from kvass.runner import ModelRunner
from kvass.spec import KVSpec, LayerGroup
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.index import acquire, release

RUNS: Final = (64, 128, 256)
"""Tokens in a run that recurs."""

_AGENTS, _TURNS = 12, 6
_PARTS = 5
_BUDGET = 1 << 30

_TIMED_TOKENS = 1024

_SMALL = LayerGroup(kind="attention", layers=(0,), kv_heads=1, head_dim=2, v_head_dim=2, dtype="float16")
"""Finding looks at tokens: of the model that read them it needs nothing."""

_SPACE = Namespace(
    model="moved", weights="", config="", adapter="", spec=KVSpec(groups=(_SMALL,)), tenant="", numerics=""
)


def run(disk: Path, runner: ModelRunner) -> dict[str, Any]:
    """`recall_64` and so on: of the tokens of later prompts that lie in a run of so many which stood in an
    earlier one (by comparing all runs), the share that a cache over a host tier finds, which stores each in
    turn; `find_vs_prefill`: seconds to find over seconds to compute; `index_bytes_per_token`: of the tables
    of fingerprints."""
    there: dict[int, set[bytes]] = {size: set() for size in RUNS}
    found = dict.fromkeys(RUNS, 0)
    recurring = dict.fromkeys(RUNS, 0)
    seconds, asked, texts = 0.0, 0, list(prompts(runner))
    with scratch(disk) as (host, _):
        with KVCache([DirectoryTier(host / "tier", _BUDGET, name="host")]) as cache:
            for prompt in texts:
                began = time.perf_counter()
                passages = cache.passages(prompt, _SPACE)
                seconds += time.perf_counter() - began
                asked += prompt.size
                covered = np.zeros(prompt.size, bool)
                for one in passages:
                    covered[one.start : one.stop] = True
                for size in RUNS:
                    wanted = _recurring(prompt, there[size], size)
                    recurring[size] += int(wanted.sum())
                    found[size] += int((wanted & covered).sum())
                    there[size].update(_runs(prompt, size))
                cache.store(prompt, _SPACE, Pool(_SPACE.spec, prompt.size)).wait()
        index_bytes = _index_bytes(host / "tier")
    began = time.perf_counter()
    runner.prefill(prompt[:_TIMED_TOKENS].tolist())
    computing = (time.perf_counter() - began) / min(_TIMED_TOKENS, prompt.size)
    return {
        **{f"recall_{size}": round(found[size] / recurring[size], 4) for size in RUNS},
        "find_vs_prefill": round(seconds / asked / computing, 6),
        "index_bytes_per_token": round(index_bytes / asked, 3),
        "moved_setting": {
            "prompts": len(texts), "tokens": asked, "recurring": {str(k): v for k, v in recurring.items()},
            "found_tokens_per_second": round(asked / seconds),
        },
    }  # fmt: skip


def _index_bytes(tier: Path) -> int:
    """Bytes of the pages of a tier's tables of fingerprints."""
    index = acquire(tier / "index", durable=False)
    try:
        with index.read() as txn:
            tables = [txn.stat(table) for table in (index.marks, index.marked)]
        kinds = ("branch_pages", "leaf_pages", "overflow_pages")
        return sum(table["psize"] * table[kind] for table in tables for kind in kinds)
    finally:
        release(index)


def prompts(runner: ModelRunner) -> Iterable[Tokens]:
    """Turns of agents that look at the same files: passages of texts in another order each time, some edited,
    some with a line inserted, between results that are new."""
    texts = [runner.encode(one.text, begin=False) for one in held_texts()]
    for agent in range(_AGENTS):
        draw = random.Random(f"kvass moved {agent}")
        files = [_piece(draw, texts) for _ in range(_PARTS)]
        for turn in range(_TURNS):
            parts = [_touched(draw, one, texts) for one in draw.sample(files, draw.randrange(2, _PARTS + 1))]
            files.append(_piece(draw, texts))
            new = runner.encode(f"\nTurn {turn} of agent {agent}: result {draw.random()}\n", begin=False)
            yield as_tokens([token for part in parts for token in (*part, *new)])


def _piece(draw: random.Random, texts: Sequence[Sequence[int]]) -> list[int]:
    text, size = draw.choice(texts), draw.randrange(100, 900)
    first = draw.randrange(max(1, len(text) - size))
    return list(text[first : first + size])


def _touched(draw: random.Random, part: list[int], texts: Sequence[Sequence[int]]) -> list[int]:
    """As it is, or with some tokens inserted, taken out or replaced in places."""
    made = list(part)
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
        at, other = draw.randrange(len(made)), draw.choice(texts)
        begin = draw.randrange(len(other) - 8)
        made[at : at + draw.choice((0, 1, 6))] = other[begin : begin + draw.choice((0, 1, 6))]
    return made


def _runs(tokens: Tokens, size: int) -> Iterable[bytes]:
    raw, width = tokens.tobytes(), tokens.itemsize
    return (raw[width * at : width * (at + size)] for at in range(tokens.size - size + 1))


def _recurring(tokens: Tokens, there: set[bytes], size: int) -> npt.NDArray[np.bool_]:
    """Which tokens lie in a run that is there."""
    found = np.zeros(tokens.size, bool)
    for at, one in enumerate(_runs(tokens, size)):
        if one in there:
            found[at : at + size] = True
    return found

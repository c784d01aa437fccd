"""Checks of single pieces of the connector, which need vLLM but no engine; each runs in a process."""

from typing import Any

import numpy as np
import torch

from kvass.cache import KVCache
from kvass.chunks import as_tokens
from kvass.config import Settings
from kvass.engines.vllm.blocks import Memory
from kvass.engines.vllm.canonical import ISAS, check_packing, pack, unpack
from kvass.engines.vllm.meta import Load, Report, Store, Work, remainder
from kvass.engines.vllm.plan import Plan
from kvass.engines.vllm.worker import WorkerHalf
from kvass.errors import UnsupportedModelError
from kvass.keys import Namespace
from kvass.spec import KVSpec, LayerGroup

Job = dict[str, Any]
WINDOW = 40


def plan_of(*, block: int, chunk: int, ranks: int = 1, canonical: bool = False) -> Plan:
    """Three layers of full attention and two with a window, in vLLM groups 1 and 0."""
    full = LayerGroup(
        kind="attention", layers=(0, 2, 4), kv_heads=2, head_dim=32, v_head_dim=32, dtype="float32"
    )
    near = LayerGroup(
        kind="sliding", layers=(1, 3), kv_heads=2, head_dim=32, v_head_dim=32, dtype="float32", window=WINDOW
    )
    return Plan(
        spec=KVSpec(groups=(full, near)), names=(("l0", "l2", "l4"), ("l1", "l3")),
        engine_groups=((1, 1, 1), (0, 0)), block_tokens=block, chunk_tokens=chunk,
        layout="canonical" if canonical else f"vllm/tests/block{block}/tp{ranks}", numerics="tests",
        isa="vec", ranks=ranks,
    )  # fmt: skip


def memory_of(plan: Plan, seed: int | None) -> dict[str, torch.Tensor]:
    """KV tensors of 64 blocks, of random numbers or zeros; the layers of a group in one allocation or not."""
    found = {}
    for names, apart in zip(plan.names, (False, True), strict=True):
        shape = (len(names), 64, 2, plan.block_tokens, 64)
        random = torch.Generator().manual_seed(seed or 0)
        whole = torch.zeros(shape) if seed is None else torch.rand(shape, generator=random)
        for number, name in enumerate(names):
            found[name] = whole[number].clone() if apart else whole[number]
    return found


def space_of(plan: Plan) -> Namespace:
    return Namespace(
        model="tiny", weights="w" * 64, config="c" * 64, adapter="", spec=plan.spec, tenant="",
        numerics=plan.numerics, layout=plan.layout,
    )  # fmt: skip


def worker(plan: Plan, job: Job, rank: int, kv: dict[str, torch.Tensor]) -> tuple[WorkerHalf, KVCache]:
    settings = Settings.load(**job["kvass"])
    cache = KVCache.open(settings, chunk_tokens=plan.chunk_tokens, shards=(rank,))
    half = WorkerHalf(plan, cache, patient=False)
    half.register(kv)
    return half, cache


def blocks_of(plan: Plan, tokens: int, first: int, *, windowed: bool) -> tuple[list[int], list[int]]:
    """Block tables as vLLM has them: those that no window sees are block 0."""
    count = -(-tokens // plan.block_tokens)
    near = [first + 30 + number for number in range(count)]
    if windowed:
        skipped = max(0, tokens - WINDOW + 1) // plan.block_tokens
        near[:skipped] = [0] * skipped
    return near, [first + 2 * number for number in range(count)]


def moved(job: Job) -> None:
    """Blocks that are stored from one engine's memory arrive in another's, and nothing else is touched."""
    plan = plan_of(block=job["block"], chunk=job["chunk"], canonical=job["canonical"])
    kv = memory_of(plan, 7)
    tokens = as_tokens(np.arange(1, 193))
    stored, cache = worker(plan, job, 0, kv)
    there = blocks_of(plan, 192, 1, windowed=False)
    work = Work(stores=[Store("a", tokens, space_of(plan), there, 0)])
    stored.begin()
    stored.store(work)
    cache.flush()
    match = cache.lookup(tokens, space_of(plan))
    assert match.length == 192
    fresh = memory_of(plan, None)
    loads, other = worker(plan, job, 0, fresh)
    here = blocks_of(plan, 192, 2, windowed=True)
    start = job["start"]
    loads.begin()
    one = Load("b", remainder(match, start), here, True)
    loads.load(Work(loads=[one]))
    loads.settle(Work(loads=[one]))
    assert loads.take_report() == Report(loaded={"b": 192})
    assert loads.take_results() == ({"b"}, set())
    written = {
        name: set(torch.nonzero(one.flatten(1).any(1)).flatten().tolist()) for name, one in fresh.items()
    }
    for names, groups in zip(plan.names, plan.engine_groups, strict=True):
        for name, group in zip(names, groups, strict=True):
            wanted = [
                (to, source)
                for place, (to, source) in enumerate(zip(here[group], there[group], strict=True))
                if to and (place + 1) * plan.block_tokens > start
            ]
            assert written[name] == {to for to, _ in wanted}, (name, written[name], wanted)
            for to, source in wanted:
                assert torch.equal(fresh[name][to], kv[name][source])
    for one_cache in (cache, other):
        one_cache.close()


def ranks(job: Job) -> None:
    """A prompt is there once every rank stored its part; each rank gets its own back."""
    plan = plan_of(block=16, chunk=32, ranks=2)
    tokens, there = as_tokens(np.arange(1, 97)), blocks_of(plan, 96, 1, windowed=False)
    scheduler = KVCache.open(Settings.load(**job["kvass"]), chunk_tokens=32, shards=(0, 1))
    kv = [memory_of(plan, 11 + rank) for rank in range(2)]
    found = []
    for rank in range(2):
        half, cache = worker(plan, job, rank, kv[rank])
        half.begin()
        half.store(Work(stores=[Store("a", tokens, space_of(plan), there, 0)]))
        cache.close()
        found.append(scheduler.lookup(tokens, space_of(plan)).length)
    assert found == [0, 96]
    match = remainder(scheduler.lookup(tokens, space_of(plan)), 0)
    for rank in range(2):
        fresh = memory_of(plan, None)
        half, cache = worker(plan, job, rank, fresh)
        one = Load("b", match, there, True)
        half.begin()
        half.load(Work(loads=[one]))
        half.settle(Work(loads=[one]))
        assert half.take_report() == Report(loaded={"b": 96})
        assert torch.equal(fresh["l0"][there[1]], kv[rank]["l0"][there[1]])
        cache.close()
    scheduler.close()


def lost(job: Job) -> None:
    """A load of which a part is gone is reported as far as it came, and nothing of the step is stored."""
    for single in (False, True):
        plan = plan_of(block=64, chunk=64)
        if single:
            groups, names = plan.spec.groups[:1], plan.names[:1]
            plan = Plan(
                spec=KVSpec(groups=groups), names=names, engine_groups=((0, 0, 0),), block_tokens=64,
                chunk_tokens=64, layout="vllm/tests/single", numerics="tests", isa="vec", ranks=1,
            )  # fmt: skip
        tokens = as_tokens(np.arange(1, 193))
        kv = memory_of(plan_of(block=64, chunk=64), 7)
        half, cache = worker(plan, job, 0, kv)
        there = ([1, 2, 3], [4, 5, 6])
        half.begin()
        half.store(Work(stores=[Store("a", tokens, space_of(plan), there, 0)]))
        cache.flush()
        match = cache.lookup(tokens, space_of(plan))
        assert match.length == 192
        piece = next(one for one in match.pieces() if one.start == 64)
        for tier in cache.tiers:
            tier.delete([piece.address])
        one = Load("b", remainder(match, 0), ([11, 12, 13], [14, 15, 16]), not single)
        new = Store("c", as_tokens(np.arange(500, 564)), space_of(plan), there, 0)
        work = Work(loads=[one], stores=[new])
        half.begin()
        half.load(work)
        half.settle(work)
        half.store(work)
        cache.flush()
        report = half.take_report()
        assert report is not None
        assert report.loaded["b"] == 64
        assert half.take_bad_blocks() == ({12, 13} if single else set())
        assert half.take_results() == ((set(), set()) if single else ({"b"}, {"b"}))
        assert report.skipped == ({"c": 0} if single else {})
        assert bool(cache.lookup(new.tokens, space_of(plan)).length) is not single
        cache.close()


def packing(job: Job) -> None:
    """Every packing that we claim to know is that of vLLM's kernel, and is undone by its inverse."""
    for dtype in ("float32", "bfloat16", "float16"):
        group = LayerGroup(kind="attention", layers=(0,), kv_heads=3, head_dim=64, v_head_dim=64, dtype=dtype)
        for isa in ISAS:
            if isa == "amx" and dtype == "float32":
                try:
                    check_packing(isa, group, 128)
                except UnsupportedModelError:
                    continue
                raise AssertionError("a packing that we do not know was taken for one that we do")
            check_packing(isa, group, 128)
            random = np.random.default_rng(7)
            k, v = (random.random((2, 256, 3, 64), dtype=np.float32) for _ in range(2))
            again = unpack(isa, pack(isa, k, v, 128), 128)
            assert np.array_equal(again[0], k) and np.array_equal(again[1], v)


def refused(job: Job) -> None:
    """Tensors that are not what the plan says are refused by the layer's name."""
    plan = plan_of(block=16, chunk=32)
    whole = memory_of(plan, 7)
    for wrong in (
        None,
        whole["l2"].to(torch.bfloat16),
        whole["l2"][:, :, :8],
        torch.zeros((64, 2, 16, 128))[..., ::2],
    ):
        try:
            Memory(plan, whole | {"l2": wrong})
        except UnsupportedModelError as error:
            assert "l2" in str(error)
            continue
        raise AssertionError("a tensor of another layout was taken")

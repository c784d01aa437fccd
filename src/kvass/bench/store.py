"""`kvass bench store`: loading and storing chunks, against the floor and against what people use instead."""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvass.bench.report import interleaved, machine, ratios
from kvass.bench.scratch import scratch
from kvass.cache import KVCache, Pool
from kvass.container import Array
from kvass.keys import Namespace
from kvass.spec import KVSpec, LayerGroup
from kvass.tiers.directory import DirectoryTier

_CHUNK = 256
_BUDGET = 4 << 30


SHAPES = {"llama-3-8b": (32, 8, 128), "smollm2-135m": (30, 3, 64)}
"""Layers, KV heads and head dim: 33.6 and 5.9 MB of bf16 for a chunk of 256 tokens."""

_TOTAL_BYTES = 160 << 20
"""What is loaded or stored at once: several times the processor's caches."""


def namespace(shape: str = "smollm2-135m") -> Namespace:
    """A namespace with that model's KV shape in bf16."""
    layers, heads, dim = SHAPES[shape]
    group = LayerGroup(
        kind="attention", layers=tuple(range(layers)), kv_heads=heads, head_dim=dim, v_head_dim=dim,
        dtype="bfloat16",
    )  # fmt: skip
    return Namespace(
        model="bench", weights="bench", config="bench", adapter="", spec=KVSpec(groups=(group,)), tenant="",
        numerics="bench",
    )  # fmt: skip


def run(disk: Path, *, rounds: int, threads: int, progress: Callable[[], None]) -> dict[str, Any]:
    """All ratios: the other side's seconds over kvass', so that more is better and 1 is as fast.

    The figures at the top are those of the larger chunks; those of the smaller ones stand below their
    model's name.
    """
    report: dict[str, Any] = {"bench": "store", "machine": machine(), "threads": threads, "rounds": rounds}
    for number, shape in enumerate(SHAPES):
        with scratch(disk) as (host_path, disk_path):
            found = {"shape": shape}
            for name, path in (("host", host_path), ("disk", disk_path)):
                found |= _one_tier(name, path, shape, rounds, threads, progress)
        report |= found if number == 0 else {shape: found}
    return report


def _one_tier(
    name: str, path: Path, shape: str, rounds: int, threads: int, progress: Callable[[], None]
) -> dict[str, Any]:
    space, random = namespace(shape), np.random.default_rng(0)
    chunks = _TOTAL_BYTES // (space.spec.bytes_per_token * _CHUNK)
    source, target = Pool(space.spec, chunks * _CHUNK), Pool(space.spec, chunks * _CHUNK)
    for array in source.arrays(0, 0, chunks * _CHUNK).values():
        array.view(np.uint16)[:] = random.integers(0, 1 << 16, array.shape, np.uint16)
    tier = DirectoryTier(path / "tier", _BUDGET, name=name)
    found: dict[str, Any] = {}
    with KVCache([tier], io_threads=threads) as cache, ThreadPoolExecutor(threads) as pool:
        tokens = random.integers(0, 1 << 15, chunks * _CHUNK)
        cache.store(tokens, space, source).wait()
        match = cache.lookup(tokens, space)
        size = cache.load(match, target).bytes
        files = sorted((path / "tier" / "objects").glob("*/*"))
        places = _places(match.keys, files, target)

        def kvass_load() -> float:
            began = time.perf_counter()
            loaded = cache.load(cache.lookup(tokens, space), target)
            took = time.perf_counter() - began
            assert loaded.tokens == tokens.size
            return took

        def floor_load() -> float:
            began = time.perf_counter()
            list(pool.map(_read_and_hash, places))
            return time.perf_counter() - began

        seconds = interleaved({"kvass": kvass_load, "floor": floor_load}, rounds, progress)
        _verify(source, target, chunks)
        found[f"{name}_load_vs_floor"] = _ratio(seconds, "floor")
        found[f"{name}_load_gbps"] = _gbps(seconds, size)
        if name == "host":
            sides = {"kvass": kvass_load, **_others_load(path, source, target, chunks)}
            seconds = interleaved(sides, rounds, progress)
            found["load_vs_torch_load"] = _ratio(seconds, "torch_load")
            found["load_vs_safetensors"] = _ratio(seconds, "safetensors")
            found["others_load_gbps"] = _gbps(seconds, size)

        def kvass_store() -> float:
            fresh = random.integers(0, 1 << 15, chunks * _CHUNK)
            began = time.perf_counter()
            ticket = cache.store(fresh, space, source).wait()
            took = time.perf_counter() - began
            assert ticket.objects == chunks
            cache.forget(fresh, space)
            return took

        def floor_store() -> float:
            return _write_and_hash(path / "floor", source, chunks, pool, sync=tier.durable)

        seconds = interleaved({"kvass": kvass_store, "floor": floor_store}, rounds, progress)
        found[f"{name}_store_vs_floor"] = _ratio(seconds, "floor")
        found[f"{name}_store_gbps"] = _gbps(seconds, size)
        if name == "host":
            seconds = interleaved(
                {"kvass": kvass_store, **_others_store(path, source, chunks)}, rounds, progress
            )
            found["store_vs_torch_save"] = _ratio(seconds, "torch_save")
            found["others_store_gbps"] = _gbps(seconds, size)
            found["chunk_bytes"] = size // chunks
    return found


def _ratio(seconds: dict[str, list[float]], other: str) -> float:
    return round(statistics.median(ratios(seconds[other], seconds["kvass"])), 3)


def _gbps(seconds: dict[str, list[float]], size: int) -> dict[str, float]:
    return {name: round(size / statistics.median(took) / 1e9, 2) for name, took in seconds.items()}


def _layers(pool: Pool, chunk: int) -> list[Array]:
    arrays = pool.arrays(0, chunk * _CHUNK, (chunk + 1) * _CHUNK)
    return [layer for name in ("k", "v") for layer in arrays[name]]


def _raw(layers: list[Array]) -> list[memoryview]:
    return [layer.view(np.uint8).reshape(-1).data for layer in layers]


def _places(keys: list[bytes], files: list[Path], target: Pool) -> list[tuple[Path, list[memoryview]]]:
    by_key = {path.name[:64]: path for path in files}
    return [(by_key[key.hex()], _raw(_layers(target, chunk))) for chunk, key in enumerate(keys)]


def _read_and_hash(place: tuple[Path, list[memoryview]]) -> None:
    path, buffers = place
    size = sum(len(buffer) for buffer in buffers)
    fd = os.open(path, os.O_RDONLY)
    try:
        got = os.preadv(fd, buffers, os.fstat(fd).st_size - size)
        assert got == size
    finally:
        os.close(fd)
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    digest.digest()


def _write_and_hash(
    folder: Path, source: Pool, chunks: int, pool: ThreadPoolExecutor, *, sync: bool
) -> float:
    folder.mkdir(exist_ok=True)

    def one(chunk: int) -> None:
        buffers = _raw(_layers(source, chunk))
        digest = xxhash.xxh3_128()
        for buffer in buffers:
            digest.update(buffer)
        fd = os.open(folder / f"{chunk}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            written = os.writev(fd, buffers)
            assert written == sum(len(buffer) for buffer in buffers)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    began = time.perf_counter()
    list(pool.map(one, range(chunks)))
    took = time.perf_counter() - began
    for chunk in range(chunks):
        (folder / f"{chunk}").unlink()
    return took


def _verify(source: Pool, target: Pool, chunks: int) -> None:
    for chunk in range(chunks):
        for one, other in zip(_layers(source, chunk), _layers(target, chunk), strict=True):
            assert np.array_equal(one.view(np.uint8), other.view(np.uint8))


def _others_load(path: Path, source: Pool, target: Pool, chunks: int) -> dict[str, Callable[[], float]]:
    import torch
    from safetensors.torch import load_file, save_file

    folder = path / "others"
    folder.mkdir()
    targets = [_torch_arrays(target, chunk) for chunk in range(chunks)]
    for chunk in range(chunks):
        tensors = {name: tensor.clone() for name, tensor in _torch_arrays(source, chunk).items()}
        torch.save(tensors, folder / f"{chunk}.pt")
        save_file(tensors, folder / f"{chunk}.safetensors")

    def into_arrays(read: Callable[[Path], dict[str, Any]], suffix: str) -> float:
        began = time.perf_counter()
        for chunk in range(chunks):
            for name, tensor in read(folder / f"{chunk}.{suffix}").items():
                targets[chunk][name].copy_(tensor)
        return time.perf_counter() - began

    return {
        "torch_load": lambda: into_arrays(lambda file: torch.load(file, weights_only=True), "pt"),
        "safetensors": lambda: into_arrays(load_file, "safetensors"),
    }


def _others_store(path: Path, source: Pool, chunks: int) -> dict[str, Callable[[], float]]:
    import torch

    folder = path / "others-store"
    folder.mkdir()
    tensors = [
        {name: tensor.clone() for name, tensor in _torch_arrays(source, chunk).items()}
        for chunk in range(chunks)
    ]

    def torch_save() -> float:
        began = time.perf_counter()
        for chunk in range(chunks):
            torch.save(tensors[chunk], folder / f"{chunk}.pt")
        took = time.perf_counter() - began
        for chunk in range(chunks):
            (folder / f"{chunk}.pt").unlink()
        return took

    return {"torch_save": torch_save}


def _torch_arrays(pool: Pool, chunk: int) -> dict[str, Any]:
    import torch

    arrays = pool.arrays(0, chunk * _CHUNK, (chunk + 1) * _CHUNK)
    return {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for name, array in arrays.items()
    }

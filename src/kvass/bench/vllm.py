"""`kvass bench vllm`: a real vLLM with the connector: time to first token by tier, and what storing costs."""

import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvass.bench.report import drop_pages, interval, machine, ratios
from kvass.bench.scratch import scratch
from kvass.bench.servers import SERVERS
from kvass.engines.transformers.load import find_model
from kvass.errors import ConfigError

PREFIX = 5120
SUFFIX = 24
_WORDS = 40_000
"""Token ids are drawn below this: every vocabulary has them."""

_PROMPTS, _PROMPT = 16, 2048
_HOST_BYTES = 3 << 30

Job = dict[str, Any]


class Engine:
    """A vLLM in a process of its own."""

    def __init__(
        self, model: Path, log: Path, *, transfer: Job | None, many: bool = False,
        python: Path | None = None, environment: Mapping[str, str] | None = None,
    ):  # fmt: skip
        """`transfer`: vLLM's KVTransferConfig; `many`: in vLLM's multi-process mode; `python`: an interpreter
        other than this one, `environment`: what it needs beside ours."""
        answers, theirs = os.pipe()
        job = json.dumps({"model": str(model), "transfer": transfer})
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [str(python or sys.executable), "-m", "kvass.bench.vllm_engine", job, str(theirs)],
                stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=(theirs,), text=True,
                env=os.environ | _ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(many))}
                | dict(environment or {}),
            )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(answers, encoding="utf-8")
        self._log = log
        self._answer()

    @property
    def pid(self) -> int:
        """The first of its processes; the others are below it."""
        return self._process.pid

    def ask(
        self, prompts: list[list[int]], *, drain: bool = False, salt: str | None = None,
        transfer: Job | None = None,
    ) -> Job:  # fmt: skip
        """One token to each prompt: seconds for all of them, and cached tokens of each. `salt`: their
        `cache_salt`, `transfer`: their `kv_transfer_params`."""
        assert self._process.stdin is not None
        asked = {"ask": prompts, "drain": drain, "salt": salt, "transfer": transfer}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Job:
        line = self._answers.readline()
        if not line:
            last = self._log.read_text(errors="replace")[-2000:]
            raise ConfigError(f"vLLM ended: {last}")
        found: Job = json.loads(line)
        return found

    def close(self) -> None:
        """As vLLM is shut down; what it stores is finished."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip


def connector(**settings: Any) -> Job:
    """vLLM's KVTransferConfig for kvass with these settings."""
    return {
        "kv_connector": "KvassConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_module_path": "kvass.engines.vllm",
        "kv_connector_extra_config": {name: _plain(value) for name, value in settings.items()},
    }  # fmt: skip


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@contextlib.contextmanager
def running(
    model: Path, log: Path, *, transfer: Job | None, many: bool = False,
    python: Path | None = None, environment: Mapping[str, str] | None = None,
) -> Iterator[Engine]:  # fmt: skip
    """An engine that has answered once, so that nothing is done for the first time in what is measured."""
    engine = Engine(model, log, transfer=transfer, many=many, python=python, environment=environment)
    try:
        engine.ask([random_tokens(random.Random(99), 300)])
        yield engine
    finally:
        engine.close()


def random_tokens(draw: random.Random, count: int) -> list[int]:
    """Ids that every vocabulary has."""
    return [draw.randrange(100, _WORDS) for _ in range(count)]


def run(
    disk: Path, models_path: Path, *, model: str, rounds: int, pairs: int, stores: tuple[str, ...],
    progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Speed-ups of the time to first token over cold, and the ratio of prompts that are never seen again."""
    _, folder = find_model(model, models_path)
    report: dict[str, Any] = {
        "bench": "vllm", "machine": machine(), "model": model, "prefix_tokens": PREFIX, "rounds": rounds,
        "pairs": pairs,
    }  # fmt: skip
    with scratch(disk) as (host, ssd), contextlib.ExitStack() as stack:
        remote: Job = {}
        for name in stores:
            (ssd / name).mkdir()
            remote |= stack.enter_context(SERVERS[name](ssd / name))
        log = ssd / "vllm.log"
        report |= _by_tier(folder, host, ssd, log, remote, stores, rounds, progress)
        if pairs:
            report |= _no_reuse(folder, host, log, pairs, progress)
    return report


def _by_tier(
    model: Path, host: Path, ssd: Path, log: Path, remote: Job, stores: tuple[str, ...], rounds: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    draw = random.Random(7)
    prefixes = [random_tokens(draw, PREFIX) for _ in range(rounds)]
    local = {"host_bytes": _HOST_BYTES, "disk_bytes": 8 << 30}
    seconds: dict[str, list[float]] = {"cold": []}
    hits: dict[str, list[int]] = {}
    progress("cold and host tier")
    first = connector(host_path=host / "first", disk_path=ssd / "first", **local, **remote)
    with running(model, log, transfer=first) as engine:
        for prefix in prefixes:
            cold = engine.ask([prefix + random_tokens(draw, SUFFIX)])
            seconds["cold"].append(cold["seconds"])
            engine.ask([random_tokens(draw, 64)], drain=True)
            _note(engine, "host", prefix, draw, seconds, hits)
    where: dict[str, Job] = {"disk": {"disk_path": ssd / "first", "disk_bytes": 8 << 30}}
    where |= {name: {"disk_bytes": 0} | _only(remote, name) for name in stores}
    for name, settings in where.items():
        progress(f"{name}, in a new process")
        fresh = connector(host_path=host / name, host_bytes=_HOST_BYTES, **settings)
        with running(model, log, transfer=fresh) as engine:
            for prefix in prefixes:
                if name == "disk":
                    drop_pages(ssd / "first")
                _note(engine, name, prefix, draw, seconds, hits)
        shutil.rmtree(host / name, ignore_errors=True)
    cold_seconds = statistics.median(seconds["cold"])
    found: dict[str, Any] = {
        f"{name}_speedup": round(cold_seconds / statistics.median(seconds[name]), 2) for name in hits
    }
    found["ttft_seconds"] = {name: [round(one, 4) for one in each] for name, each in seconds.items()}
    found["hit_tokens"] = hits
    shutil.rmtree(host / "first", ignore_errors=True)
    return found


def _note(
    engine: Engine, name: str, prefix: list[int], draw: random.Random, seconds: dict[str, list[float]],
    hits: dict[str, list[int]],
) -> None:  # fmt: skip
    """Ask something new about a prefix, and note the seconds and the hit."""
    answer = engine.ask([prefix + random_tokens(draw, SUFFIX)])
    seconds.setdefault(name, []).append(answer["seconds"])
    hits.setdefault(name, []).append(answer["cached"][0])


def _only(remote: Job, store: str) -> Job:
    return {name: value for name, value in remote.items() if name.startswith(f"{store}_")}


def _no_reuse(
    model: Path, host: Path, log: Path, pairs: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Prompts that nobody sees again: everything stored, the queue drained inside of the time.

    Every pair has engines of its own: two processes of one vLLM differ by up to 5 % all their lives, by how
    their memory came to lie.
    """
    draw = random.Random(11)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    kvass = connector(host_path=host / "never", host_bytes=_HOST_BYTES, disk_bytes=0)
    transfers = {"with": kvass, "without": None}
    for number in range(pairs):
        progress(f"distinct prompts, pair {number + 1} of {pairs}")
        order = sorted(transfers, reverse=bool(number % 2))
        with contextlib.ExitStack() as stack:
            engines = {
                name: stack.enter_context(running(model, log, transfer=transfers[name])) for name in order
            }
            for name in order:
                prompts = [random_tokens(draw, _PROMPT) for _ in range(_PROMPTS)]
                seconds[name].append(engines[name].ask(prompts, drain=True)["seconds"])
        shutil.rmtree(host / "never", ignore_errors=True)
    found = ratios(seconds["with"], seconds["without"])
    return {
        "no_reuse_ratio": round(statistics.median(found), 4),
        "no_reuse_interval": [round(one, 4) for one in interval(found)],
        "no_reuse_seconds": {name: [round(one, 3) for one in each] for name, each in seconds.items()},
    }

"""Documents in another order in a real vLLM: repaired by a `kvass worker` beside it, against full prefill."""

import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kvass.bench.report import interleaved, interval, ratios
from kvass.bench.scratch import scratch
from kvass.bench.vllm import Engine, Job, connector, random_tokens, running
from kvass.engines.transformers.load import certified_namespace, find_model
from kvass.errors import ConfigError
from kvass.provenance import APPROXIMATE_SALT
from kvass.quality import BlendMeasured, certify_blends, keep_blends
from kvass.reuse.selectors import DEFAULT

DOCUMENTS, TOKENS, SYSTEM, QUESTION = 6, 512, 128, 32
_PROMPT: Final = SYSTEM + DOCUMENTS * TOKENS + QUESTION
CHUNK: Final = 128
_CERTIFIED: Final = BlendMeasured(
    method=DEFAULT, chosen=0.1, fraction=0.15, kl_mean=0.005, kl_low=0.0, kl_high=0.01, top1=0.9,
    facts_tried=200, facts_lost=0, facts_lost_high=0.015,
)  # fmt: skip
"""The benchmark's own, so that it needs no calibration: nothing of it was measured."""

_SETTLE_SECONDS: Final = 120.0
_WISH: Final = {"kvass": {"reuse": "anywhere", "max_fraction": 0.15}}


class _Bench:
    """Two vLLMs: `blending` over tiers that hold all documents, each read behind the system text, and `plain`
    without a connector."""

    def __init__(self, blending: Engine, plain: Engine, log: Path):
        """`log`: of the worker."""
        self._blending, self._plain, self._log = blending, plain, log
        self._draw = random.Random(5)
        self._system = random_tokens(self._draw, SYSTEM)
        self._documents = [random_tokens(self._draw, TOKENS) for _ in range(DOCUMENTS)]
        self._prompt: list[int] = []
        self.cached: list[int] = []

    def read(self) -> None:
        """Read all documents, one by one."""
        for one in self._documents:
            self._blending.ask([self._system + one], drain=True)

    def blended(self) -> float:
        """Seconds to the first token of a prompt with the documents in a new order, and a new question."""
        order = self._draw.sample(self._documents, DOCUMENTS)
        question = random_tokens(self._draw, QUESTION)
        self._prompt = [*self._system, *(token for one in order for token in one), *question]
        answer = self._blending.ask([self._prompt], salt=APPROXIMATE_SALT, transfer=_WISH)
        self.cached.append(answer["cached"][0])
        self._settle()
        return float(answer["seconds"])

    def _settle(self) -> None:
        """Where a job was not waited for to its end, the worker goes on: that is not the next round's matter.
        Raises ConfigError where it never ends."""
        until = time.monotonic() + _SETTLE_SECONDS
        while self._log.read_text(errors="replace").count("\njob ") < len(self.cached):
            if time.monotonic() > until:
                raise ConfigError(f"the worker does not end: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def plain(self) -> float:
        """Seconds to the first token of the same prompt."""
        return float(self._plain.ask([self._prompt])["seconds"])


def run(
    disk: Path, models_path: Path, *, model: str, rounds: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """`vllm_speedup`: time to first token of full prefill over that of finding, waiting for the worker and
    loading what it repaired; median over the pairs of `rounds` rounds. All share this machine's cores."""
    _, folder = find_model(model, models_path)
    with scratch(disk) as (host, ssd):
        own = _own_models(models_path, ssd / "models", model)
        settings = {
            "host_path": host / "tier", "host_bytes": 3 << 30, "disk_bytes": 0, "chunk_tokens": CHUNK,
            "models_path": own, "jobs_path": ssd / "jobs", "jobs_wait_share": 1.0,
            "shared_numerics": "bench",
        }  # fmt: skip
        log = ssd / "vllm.log"
        with (
            running(folder, log, transfer=None) as plain,
            running(folder, log, transfer=connector(**settings)) as blending,
        ):
            bench = _Bench(blending, plain, ssd / "worker.log")
            bench.read()
            with _worker(model, settings, ssd / "worker.log"):
                bench.blended()  # for the first time, neither half is warm
                done = iter(range(1, 2 * rounds + 1))
                seconds = interleaved(
                    {"blended": bench.blended, "plain": bench.plain},
                    rounds,
                    lambda: progress(next(done) // 2),
                )
    return _summed_up(seconds, bench.cached[1:])


def _summed_up(seconds: dict[str, list[float]], cached: list[int]) -> dict[str, Any]:
    whole = (_PROMPT - 1) // CHUNK * CHUNK  # what can be loaded: whole chunks, and not the last token
    found = ratios(seconds["plain"], seconds["blended"])
    return {
        "vllm_speedup": round(statistics.median(found), 3),
        "vllm_setting": {
            "documents": DOCUMENTS, "document_tokens": TOKENS, "prompt_tokens": _PROMPT,
            "chunk_tokens": CHUNK, "dtype": "bfloat16", "rounds": len(cached),
            "certificate": "the benchmark's own, not measured",
            "hits": sum(one >= whole for one in cached), "cached_tokens": cached,
            "interval95": [round(one, 3) for one in interval(found)],
            "seconds": {name: [round(one, 3) for one in each] for name, each in seconds.items()},
        },
    }  # fmt: skip


def _own_models(models_path: Path, own: Path, model: str) -> Path:
    """The converted models, and beside them the benchmark's own certificate and no other."""
    own.mkdir()
    for path in models_path.iterdir():
        if path.name != "calibrated":
            (own / path.name).symlink_to(path.absolute())
    namespace = certified_namespace(model, own)
    keep_blends(own, namespace, certify_blends(namespace, 1, 1.0, [_CERTIFIED]))
    return own


@contextlib.contextmanager
def _worker(model: str, settings: Job, log: Path) -> Iterator[None]:
    """A worker of the model over these settings, ready."""
    own = {f"KVASS_{name.upper()}": str(value) for name, value in settings.items()}
    with log.open("ab") as output:
        output.write(b"\n")  # so that every job's line follows on one
        output.flush()
        process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", "kvass", "worker", "--model", model],
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | own, stdout=subprocess.PIPE, stderr=output,
            text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        if "takes jobs" not in process.stdout.readline():
            raise ConfigError(f"the worker did not start: {log.read_text(errors='replace')[-2000:]}")
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

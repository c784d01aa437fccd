"""vLLM in processes of its own: engines forked from a warm process, and the API server."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

from .forkserver import TESTS, ForkServer, _inherited
from .ports import free_ports

_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
}
_WARM = """
import vllm, vllm.v1.engine.llm_engine, vllm.v1.worker.cpu_worker, vllm.model_executor.models.llama
import vllm.model_executor.models.gemma3, kvass.engines.vllm.connector
from harness.forkserver import _serve
_serve()
"""


def environment() -> dict[str, str]:
    """The environment of a vLLM: nothing of kvass', since its settings come with the engine's."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVASS_")}
    paths = [str(TESTS), str(TESTS / "vllm"), *_inherited()]
    return plain | _VLLM | {"PYTHONPATH": os.pathsep.join(paths)}


class Engines(ForkServer):
    """A process that has imported vLLM and opened nothing; each engine is a fork of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WARM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
            text=True,
        )  # fmt: skip

    def begin(self, function: str, folder: Path, **job: Any) -> "Running":
        """Start `scenarios.<function>(job)` in a process of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        result = folder / f"result-{time.monotonic_ns()}.json"
        return Running(self, self.start("scenarios:run", function, job, str(result)), result)

    def ask(self, function: str, folder: Path, **job: Any) -> Any:
        """Run a scenario and give what it returned. Fails with the scenario."""
        return self.begin(function, folder, **job).result()


class Running:
    """A scenario that runs."""

    def __init__(self, engines: Engines, pid: int, path: Path):
        self._engines = engines
        self.pid = pid
        self._path = path

    def result(self) -> Any:
        """What the scenario returned, once it did."""
        code = self._engines.wait(self.pid)
        assert code == 0, f"the scenario ended with {code}; its error is on stderr"
        return json.loads(self._path.read_text())

    def kill(self) -> None:
        """kill -9."""
        self._engines.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def api_server(model: Path, extra: dict[str, Any], *arguments: str) -> Iterator[str]:
    """vLLM's OpenAI server with the connector: its address. Its processes are gone at the end."""
    transfer = {
        "kv_connector": "KvassConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_module_path": "kvass.engines.vllm", "kv_connector_extra_config": extra,
    }  # fmt: skip
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype",
            "float32", "--max-model-len", "4096", "--enforce-eager", "--host", "127.0.0.1", "--port",
            str(port), "--served-model-name", "model", "--enable-prompt-tokens-details",
            "--kv-transfer-config", json.dumps(transfer), *arguments,
        ],
        env=environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.25)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples on /metrics; 0 where it is not there."""
    lines = httpx.get(url + "/metrics", timeout=30).text.splitlines()
    found = [line for line in lines if re.match(rf"{re.escape(name)}(_total)?[{{ ]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)

"""Worker processes forked from a warm one that has imported kvass and opened nothing.

A request is a line of JSON: `start` a function of a module with arguments, or `wait` for a process.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TESTS = Path(__file__).resolve().parents[1]
_PRELOAD = (
    "kvass.cache",
    "kvass.tiers.directory",
    "harness.script",
    "harness.workload",
    "harness.jobs",
    "harness.damage",
)


class ForkServer:
    """The warm process, seen from a test."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *_inherited()])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.forkserver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment, text=True,
        )  # fmt: skip

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, function: str, *arguments: Any) -> int:
        """Run `module:function` with arguments in a new process; its id."""
        return self._ask({"start": function, "arguments": arguments})

    def wait(self, pid: int) -> int:
        """Wait for a process that was started here: its exit code, minus the signal if it was killed."""
        return self._ask({"wait": pid})

    def kill(self, pid: int, number: int = signal.SIGKILL) -> int:
        """Kill a process that was started here and wait for it."""
        os.kill(pid, number)
        return self.wait(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _inherited() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _run(function: str, arguments: list[Any]) -> None:
    """In the child: never returns."""
    code = 1
    try:
        os.dup2(2, 1)
        os.close(0)
        module, name = function.split(":")
        getattr(importlib.import_module(module), name)(*arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may get out of a forked child
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    for module in _PRELOAD:
        importlib.import_module(module)
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if not pid:
                _run(request["start"], request["arguments"])
            alive.add(pid)
            answer = pid
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            alive.discard(request["wait"])
        print(answer, flush=True)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _serve()

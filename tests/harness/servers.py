"""Real servers in processes of their own, over tiers of their own."""

import glob
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx

TINY_LENGTH = 4096
_HOST_PATHS = f"/dev/shm/kvass-servers-{os.getpid()}-"


class Server(NamedTuple):
    """A running server: its address without /v1, its process, and where it keeps things."""

    url: str
    process: "subprocess.Popen[str]"
    folder: Path
    model: str

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where it is not there yet."""
        wanted = name + (
            "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
        )
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith(wanted + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


def host_path(folder: Path) -> str:
    """A place on a tmpfs that belongs to `folder`; `remove_host_paths` removes it."""
    return f"{_HOST_PATHS}{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def remove_host_paths() -> None:
    """Remove those of this process."""
    for path in glob.glob(f"{_HOST_PATHS}*"):
        shutil.rmtree(path, ignore_errors=True)


def environment(folder: Path, **settings: str) -> dict[str, str]:
    """A server's environment: nothing of kvass' but these settings, and tiers in `folder`."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVASS_")}
    own = {
        "KVASS_HOST_PATH": host_path(folder),
        "KVASS_DISK_PATH": str(folder / "disk"),
        "KVASS_STATE_PATH": str(folder / "state"),
        "KVASS_CHUNK_TOKENS": "64",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return plain | own | {f"KVASS_{name.upper()}": value for name, value in settings.items()}


@contextmanager
def started(folder: Path, model: str, *arguments: str, **settings: str) -> Iterator[Server]:
    """A server until the end of the block; whatever happens, its process is gone then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvass", "serve", "--port", "0", "--model", model, *arguments],
        env=environment(folder, **settings), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        found = re.search(r"kvass serves (\S+) on (http://\S+)/v1", process.stdout.readline())
        assert found, f"the server did not start: {process.poll()}"
        yield Server(found[2], process, folder, found[1])
    finally:
        end(process)


def end(process: "subprocess.Popen[str]") -> None:
    """Have a process end, whatever it takes, and close what it wrote to."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def head(path: str, length: int) -> bytes:
    """The head of a POST, for clients below HTTP."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()

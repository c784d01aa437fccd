"""Mooncake servers: a real master with its metadata server, and members that lend memory."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from harness.ports import free_ports
from kvass.bench.servers import listens
from kvass.config import Settings
from kvass.tiers.mooncake import MooncakeStore

LOOPBACK = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "ERROR"}
"""Environment in which members listen on this machine only, and say errors only."""

_START_SECONDS = 30.0

_LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
member = MooncakeDistributedStore()
metadata, size, master = sys.argv[1:]
assert member.setup("127.0.0.1", metadata, int(size), 0, "tcp", "", master) == 0
print("joined", flush=True)
sys.stdin.read()
"""


class MooncakeMaster:
    """A master that knows no members yet. The same ports when started anew."""

    def __init__(self, folder: Path, *options: str):
        """`options`: more of the master's command line."""
        os.environ.update(LOOPBACK)  # for members in this process
        self._log = folder / "master.log"
        self._options = options
        self._rpc, self._metrics, self._http = free_ports(3)
        self.address = f"127.0.0.1:{self._rpc}"
        self.metadata = f"http://127.0.0.1:{self._http}/metadata"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers. Raises AssertionError where it does not start."""
        spec = find_spec("mooncake")
        assert spec and spec.origin, "the Python package of Mooncake is not installed"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    Path(spec.origin).parent / "mooncake_master",
                    f"--rpc_port={self._rpc}", "--rpc_address=127.0.0.1", "--rpc_thread_num=2",
                    f"--metrics_port={self._metrics}", "--metrics_host=127.0.0.1",
                    "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1",
                    f"--http_metadata_server_port={self._http}", *self._options,
                ],
                cwd=self._log.parent, stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + _START_SECONDS
        while not (listens(self._rpc) and listens(self._http)):
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < end, f"mooncake_master did not start within {_START_SECONDS} s"
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """In the block, it takes connections and answers nothing."""
        assert self._process is not None
        stop(self._process)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def lender(self, size: int) -> Iterator[subprocess.Popen[bytes]]:
        """One more process that lends so many bytes."""
        process = subprocess.Popen(
            [sys.executable, "-c", _LENDER, self.metadata, str(size), self.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | LOOPBACK,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"joined\n", "a member could not join"
            yield process
        finally:
            process.kill()
            process.communicate()

    def store(self, **settings: object) -> MooncakeStore:
        """A store over it. Lends nothing, unless the settings say so."""
        return MooncakeStore.open(
            Settings.load(
                **{
                    "mooncake_master": self.address, "mooncake_metadata": self.metadata,
                    "mooncake_bytes": 0, "remote_call_seconds": 3, **settings,
                }
            )
        )  # fmt: skip


def stop(process: subprocess.Popen[bytes]) -> None:
    """Returns when it stands still, with all its threads."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


@contextlib.contextmanager
def mooncake_master(folder: Path, *options: str) -> Iterator[MooncakeMaster]:
    """One that runs until the end of the block."""
    master = MooncakeMaster(folder, *options)
    try:
        master.start()
        yield master
    finally:
        master.kill()

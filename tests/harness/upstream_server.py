"""Upstreams in processes of their own: a small one that misbehaves as it is asked to, and a vLLM; and kvass
before them, in a Python that has no torch."""

import asyncio
import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx

from harness.ports import free_ports
from harness.servers import Server, end, environment

VLLM_START_SECONDS = 300

USAGE = {"prompt_tokens": 9, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}
WHOLE = (
    b'{ "id":"x", "choices": [{"text":"\xc3\xa9 usage"}],\n "usage": ' + json.dumps(USAGE).encode() + b" }\n"
)
CHUNKS = (
    b': comment\n\ndata: {"choices":[{"text":"one \\"usage\\" "}],  "usage":null}\n\n',
    b'event: x\ndata:{"choices":[{"text":"\xc3\xa9"}],"usage":{"prompt_tokens":9}}\r\n\r\n',
    b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n",
    b"data: [DONE]\n\n",
)

_PROGRAM = """
import sys
sys.modules.update(torch=None, transformers=None)
from kvass.cli import main
main()
"""
KVASS_WITHOUT_TORCH = (sys.executable, "-c", _PROGRAM)


class Small(NamedTuple):
    """The small upstream that is running."""

    url: str
    process: "subprocess.Popen[str]"

    def seen(self) -> dict[str, Any]:
        """`requests` that came, how many were `aborted` by their client, and bytes `sent` in a flood."""
        found: dict[str, Any] = httpx.get(self.url + "/seen").json()
        return found

    def until(self, what: str, count: int, seconds: float = 10.0) -> None:
        """Wait until `seen` says so much."""
        end = time.monotonic() + seconds
        while self.seen()[what] < count:
            assert time.monotonic() < end, self.seen()
            time.sleep(0.02)


@contextmanager
def small_upstream(port: int = 0) -> Iterator[Small]:
    """A small upstream until the end of the block."""
    command = [sys.executable, "-m", "harness.upstream_server", str(port)]
    where = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | where)
    try:
        yield Small(process.stdout.readline().strip(), process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def before(upstream: str, folder: Path, *arguments: str, **settings: str) -> Iterator[Server]:
    """`kvass serve --upstream` until the end of the block."""
    process = subprocess.Popen(
        [*KVASS_WITHOUT_TORCH, "serve", "--port", "0", "--upstream", upstream, *arguments],
        env=environment(folder, **settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        found = re.search(r"kvass serves (\S+) on (http://\S+)/v1", process.stdout.readline())
        assert found, process.stderr.read()
        yield Server(found[2], process, folder, found[1])
    finally:
        end(process)


@contextmanager
def vllm(model: Path, folder: Path, *arguments: str) -> Iterator[str]:
    """The address of a vLLM that serves a model as `m`, until the end of the block."""
    (port,) = free_ports(1)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1",
        "--port", str(port), "--model", str(model), "--served-model-name", "m", "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "2048", *arguments,
    ]  # fmt: skip
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(folder) | own, start_new_session=True
        )
    try:
        end = time.monotonic() + VLLM_START_SECONDS
        while not _healthy(f"http://127.0.0.1:{port}"):
            assert process.poll() is None and time.monotonic() < end, (folder / "vllm.log").read_text()[
                -4000:
            ]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


# -- the small one ------------------------------------------------------------------------------------


class _App:
    """Does what the field `do` of a request's body says; tells what it has seen at /seen."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"requests": 0, "aborted": 0, "sent": 0}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] in ("/seen", "/health", "/v1/models"):
            return await _json(send, self.seen | {"data": [{"id": "small"}]})
        self.seen["requests"] += 1
        gone = asyncio.create_task(self._watch(receive))
        try:
            asked = re.search(rb'"do": ?"(\w+)"', body)
            await getattr(self, f"do_{asked[1].decode() if asked else 'echo'}")(scope, body, send)
        except OSError:
            pass
        finally:
            gone.cancel()

    async def _watch(self, receive: Any) -> None:
        await receive()
        self.seen["aborted"] += 1

    async def do_echo(self, scope: Any, body: bytes, send: Any) -> None:
        told = {
            "method": scope["method"], "path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(), "body": base64.b64encode(body).decode(),
            "headers": [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]],
        }  # fmt: skip
        await _json(send, told, (b"x-told", b"by upstream"), (b"set-cookie", b"secret=1"))

    async def do_whole(self, scope: Any, body: bytes, send: Any) -> None:
        await _start(send, 200, b"application/json", (b"content-length", str(len(WHOLE)).encode()))
        await _write(send, WHOLE, last=True)

    async def do_refuse(self, scope: Any, body: bytes, send: Any) -> None:
        await _start(send, json.loads(body)["status"], b"application/json; charset=x", (b"retry-after", b"7"))
        await _write(send, b'{"error" : "as it is", "usage": {}}\n', last=True)

    async def do_stream(self, scope: Any, body: bytes, send: Any) -> None:
        await _start(send, 200, b"text/event-stream; charset=utf-8")
        for chunk in CHUNKS:
            for piece in (chunk[:7], chunk[7:]):
                await _write(send, piece)
                await asyncio.sleep(0.001)
        await _write(send, b"", last=True)

    async def do_hang(self, scope: Any, body: bytes, send: Any) -> None:
        await asyncio.sleep(600)

    async def do_hang_streaming(self, scope: Any, body: bytes, send: Any) -> None:
        await _start(send, 200, b"text/event-stream")
        await _write(send, CHUNKS[0])
        await asyncio.sleep(600)

    async def do_late(self, scope: Any, body: bytes, send: Any) -> None:
        await asyncio.sleep(json.loads(body)["seconds"])
        await self.do_whole(scope, body, send)

    async def do_die(self, scope: Any, body: bytes, send: Any) -> None:
        """In the midst of a line; `raise` ends in a connection closed without the last chunk's mark."""
        await _start(send, 200, json.loads(body)["kind"].encode())
        await _write(send, CHUNKS[0] + CHUNKS[2][:20])
        await asyncio.sleep(0.1)
        raise OSError

    async def do_end_early(self, scope: Any, body: bytes, send: Any) -> None:
        await _start(send, 200, b"text/event-stream")
        await _write(send, CHUNKS[0], last=True)

    async def do_flood(self, scope: Any, body: bytes, send: Any) -> None:
        await _start(send, 200, b"text/event-stream")
        aborted = self.seen["aborted"]
        while self.seen["aborted"] == aborted:
            await _write(send, b"data: " + bytes(65536) + b"\n\n")
            self.seen["sent"] += 65536
            await asyncio.sleep(0)


async def _start(send: Any, status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    all_headers = [(b"content-type", kind), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})


async def _write(send: Any, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def _json(send: Any, value: Any, *headers: tuple[bytes, bytes]) -> None:
    await _start(send, 200, b"application/json", *headers)
    await _write(send, json.dumps(value).encode(), last=True)


def _main() -> None:
    import uvicorn

    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(_App(), lifespan="off", log_level="critical")
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    _main()

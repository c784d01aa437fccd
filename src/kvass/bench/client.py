"""A server in a process of its own, and the plainest client there is: what the benchmarks measure through."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvass.errors import KvassError

_START_SECONDS = 300
_ANSWER_SECONDS = 600


class Reply(NamedTuple):
    """A streamed answer: its text, what it cost, and seconds from the request to the first token."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    first_token_seconds: float


def _environment(settings: dict[str, str]) -> dict[str, str]:
    """This process's, with no other settings of kvass than these."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVASS_")} | settings


def run_kvass(arguments: list[str], settings: dict[str, str]) -> str:
    """Run a command; its standard output. Raises KvassError where it fails."""
    done = subprocess.run(  # noqa: S603 - our own command line
        [sys.executable, "-m", "kvass", *arguments],
        env=_environment(settings), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise KvassError(f"kvass {arguments[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


@contextmanager
def serving(arguments: list[str], settings: dict[str, str]) -> Iterator[str]:
    """`kvass serve` on a free port, until the end of the block; its address.

    Raises KvassError where it does not start.
    """
    process = subprocess.Popen(  # noqa: S603 - our own command line
        [sys.executable, "-m", "kvass", "serve", "--port", "0", *arguments],
        env=_environment(settings), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+(?=/v1)", process.stdout.readline())
        if found is None:
            raise KvassError("the server did not start; its error is above")
        yield found[0]
    finally:
        process.terminate()
        try:
            process.wait(_START_SECONDS)
        finally:
            process.kill()
            process.stdout.close()


class Client:
    """Asks, one connection for each request. Every answer is streamed."""

    def __init__(self, url: str, key: str = ""):
        where = urlsplit(url)
        self._host, self._port = str(where.hostname), where.port
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def chat(self, messages: list[dict[str, str]], **options: Any) -> Reply:
        """Ask `/v1/chat/completions`."""
        return self._ask("/v1/chat/completions", {"messages": messages, **options})

    def complete(self, prompt: list[int], **options: Any) -> Reply:
        """Ask `/v1/completions`, with token ids."""
        return self._ask("/v1/completions", {"prompt": prompt, **options})

    def _ask(self, path: str, body: dict[str, Any]) -> Reply:
        wanted = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        with closing(HTTPConnection(self._host, self._port, timeout=_ANSWER_SECONDS)) as connection:
            try:
                return self._read(connection, path, wanted)
            except OSError as error:
                raise KvassError(f"the server cannot be asked any more: {error}") from error

    def _read(self, connection: HTTPConnection, path: str, wanted: bytes) -> Reply:
        began = time.perf_counter()
        connection.request("POST", path, wanted, self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise KvassError(f"the server answered {response.status}: {response.read()[:500]!r}")
        first, text, usage = 0.0, "", None
        for chunk in _events(response):
            if "error" in chunk:
                raise KvassError(f"the server failed: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                if not first and (piece or choice["finish_reason"]):
                    first = time.perf_counter() - began
                text += piece
            usage = chunk.get("usage") or usage
        assert usage is not None
        return Reply(
            text, usage["prompt_tokens"], usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"], first,
        )  # fmt: skip


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])

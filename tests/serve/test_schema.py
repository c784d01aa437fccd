"""Requests made up from the OpenAPI document, in and out of what it allows: never a fault of the server's."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx

from harness.servers import Server


def test_no_request_makes_the_server_fail(
    tiny_model: str, start: Callable[..., Server], tmp_path: Path
) -> None:
    """A model of 128 tokens, so that answers without a bound of their own come to an end."""
    short = Path(shutil.copytree(tiny_model, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    server = start(model=str(short))
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")), "run", server.url + "/openapi.json",
            "--checks", "not_a_server_error", "--max-examples", "50", "--seed", "1",
            "--request-timeout", "60",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert server.metric("kvass_failed_requests_total") == 0


def test_the_document_describes_every_route(server: Server) -> None:
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    assert set(paths) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}",
        "/healthz", "/readyz", "/metrics",
    }  # fmt: skip

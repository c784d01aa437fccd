"""`kvass top`: a server's metrics as figures, and frames with and without a server."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from kvass.cli import app
from kvass.cli.scraping import EMPTY, Look, UnreachableError, fetch, figures, parsed
from kvass.errors import InputError

METRICS = """\
# TYPE kvass_requests_total counter
kvass_requests_total{{endpoint="chat",status="200"}} {requests}
kvass_requests_total{{endpoint="chat",status="429"}} 1
kvass_requests_total{{endpoint="/metrics",status="200"}} {requests}
# TYPE kvass_queued_requests gauge
kvass_queued_requests 3
# TYPE kvass_active_requests gauge
kvass_active_requests 2
# TYPE kvass_lookup_tokens_total counter
kvass_lookup_tokens_total{{result="hit"}} 750
kvass_lookup_tokens_total{{result="miss"}} 250
# TYPE kvass_ttft_seconds histogram
kvass_ttft_seconds_bucket{{hit="most",le="0.1"}} 0
kvass_ttft_seconds_bucket{{hit="most",le="0.5"}} 8
kvass_ttft_seconds_bucket{{hit="most",le="+Inf"}} 8
kvass_ttft_seconds_count{{hit="most"}} 8
kvass_ttft_seconds_sum{{hit="most"}} 2
# TYPE kvass_load_bytes_total counter
kvass_load_bytes_total{{tier="host"}} {loaded}
# TYPE kvass_store_bytes_total counter
kvass_store_bytes_total{{tier="host"}} 10
kvass_store_bytes_total{{tier="disk"}} 20
# TYPE kvass_errors_total counter
kvass_errors_total{{tier="disk",operation="load"}} 4
# TYPE kvass_evicted_objects_total counter
kvass_evicted_objects_total{{tier="host"}} 5
"""


def look(at: float, requests: int, loaded: int) -> Look:
    return Look(at, parsed(METRICS.format(requests=requests, loaded=loaded)))


def test_figures_since_the_start() -> None:
    found = figures(EMPTY, look(100.0, 9, 1000))
    assert found["requests"] == 10
    assert found["requests_per_second"] is None
    assert found["hit_share"] == 0.75
    assert found["ttft_median_seconds"] == {"none": None, "part": None, "most": pytest.approx(0.3)}
    assert (found["errors"], found["evicted_objects"]) == (4, 5)


def test_figures_between_two_looks() -> None:
    found = figures(look(100.0, 9, 1000), look(110.0, 29, 6000))
    assert found["requests_per_second"] == 2.0
    assert found["load_bytes_per_second"] == {"host": 500.0}
    assert found["store_bytes_per_second"] == {"host": 0.0, "disk": 0.0}
    assert found["hit_share"] is None  # no lookups between
    assert found["ttft_median_seconds"]["most"] is None


def test_a_server_that_was_started_anew_counts_from_nothing() -> None:
    assert figures(look(1.0, 100, 9), look(2.0, 3, 0))["requests_per_second"] == 0.0


class _Metrics(BaseHTTPRequestHandler):
    requests = 0
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        kind = type(self)
        kind.requests += 10
        kind.keys.append(self.headers.get("Authorization"))
        denied = self.path != "/metrics" or self.headers.get("Authorization") == "Bearer wrong"
        self.send_response(403 if denied else 200)
        self.end_headers()
        if not denied:
            self.wfile.write(METRICS.format(requests=kind.requests, loaded=0).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    _Metrics.requests, _Metrics.keys = 0, []
    with HTTPServer(("127.0.0.1", 0), _Metrics) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture
def tiers(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_HOST_PATH", str(shm / "host"))
    monkeypatch.setenv("KVASS_DISK_PATH", str(tmp_path / "disk"))
    monkeypatch.setenv("KVASS_HOST_BYTES", str(64 << 20))
    monkeypatch.setenv("KVASS_DISK_BYTES", str(64 << 20))
    monkeypatch.setenv("COLUMNS", "120")


def top(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["top", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.output


def test_the_tiers_alone(tiers: None) -> None:
    frame = json.loads(top("--once", "--json"))
    assert frame["server"] is None
    assert frame["tiers"]["host"]["budget"] == 64 << 20
    assert "disk" in top("--once")


def test_a_frame_with_a_server(tiers: None, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = json.loads(top("--once", "--json", "--url", server, "--interval", "0.1"))["server"]
    assert (frame["queued"], frame["active"]) == (3, 2)
    assert frame["since_start"]["requests"] == 21
    assert frame["recent"]["requests_per_second"] > 0
    text = top("--once", "--url", f"{server}/", "--interval", "0.1", "--key", "given")
    assert "75.0%" in text
    assert "hit most" in text
    assert _Metrics.keys[-1] == "Bearer given"
    monkeypatch.setenv("KVASS_API_KEYS", "acme=kv-acme-0123456789,operator=kv-operator-012345")
    top("--once", "--url", server, "--interval", "0.1")
    assert _Metrics.keys[-1] == "Bearer kv-operator-012345"


def test_a_server_that_is_not_there_leaves_the_tiers(tiers: None) -> None:
    url = "http://127.0.0.1:9"
    text = top("--once", "--url", url, "--interval", "0.1")
    assert "64" in text or "67.1 MB" in text
    assert len([line for line in text.splitlines() if url in line]) == 1
    frame = json.loads(top("--once", "--json", "--url", url, "--interval", "0.1"))
    assert url in frame["server"]["error"]
    assert set(frame["tiers"]) == {"host", "disk"}


def test_a_key_that_is_refused_says_what_to_do(server: str) -> None:
    with pytest.raises(UnreachableError, match=r"403.*--key"):
        fetch(server, "wrong")


def test_mistakes(tiers: None) -> None:
    with pytest.raises(InputError, match="--url is 'localhost:8000'"):
        top("--once", "--url", "localhost:8000")
    with pytest.raises(InputError, match="--once"):
        top("--json")


def test_the_live_view_ends_with_ctrl_c(tiers: None, server: str) -> None:
    arguments = [sys.executable, "-m", "kvass", "top", "--url", server, "--interval", "0.1"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while _Metrics.requests < 30 and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        try:
            shown, errors = running.communicate(timeout=60)
        finally:
            running.kill()  # or this would wait for it for ever
    assert running.returncode == 0, errors
    assert "Traceback" not in errors
    assert "hit most" in shown

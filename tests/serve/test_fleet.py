"""Servers with nothing in common but a Redis: what one read, the other loads."""

import time
from collections.abc import Callable
from pathlib import Path

from harness.redis_server import redis_server
from harness.servers import Server

PROMPT = "The keeper of the lighthouse wrote down every ship that passed, and where it went. " * 20


def test_a_server_hits_what_another_one_read(start: Callable[..., Server], tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    found = []
    with redis_server() as redis:
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            server = start(folder=tmp_path / name, redis_url=redis.url, disk_bytes="0")
            found.append(server.post("/v1/completions", body).json())
            end = time.monotonic() + 20
            while not redis.admin.dbsize() or server.metric("kvass_queued_objects", tier="redis"):
                assert time.monotonic() < end, "nothing was written to Redis"
                time.sleep(0.05)
    assert found[0]["choices"] == found[1]["choices"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert cached[0] == 0
    assert cached[1] >= (found[1]["usage"]["prompt_tokens"] - 1) // 64 * 64 > 64

"""What another machine stored arrives through a remote tier; one that is gone costs no answer."""

from pathlib import Path
from typing import Any

from same import assert_all_same

from harness.redis_server import redis_server
from harness.vllm_server import Engines

Answer = dict[str, Any]
HIT = 384


def test_an_engine_hits_what_one_on_another_machine_stored_and_does_without_when_it_is_gone(
    engines: Engines, shallow: Path, place: Answer, prompts: list[list[int]], answered: list[Answer],
    tmp_path: Path,
) -> None:  # fmt: skip
    def on_a_machine(name: str, url: str) -> list[int]:
        host = f"{place['host_path']}-{name}"
        kvass = place | {"disk_bytes": 0, "redis_url": url, "host_path": host}
        job = {"model": str(shallow), "groups": [prompts[:1], prompts[1:4]], "kvass": kvass}
        found = engines.ask("answers", tmp_path, **job)["groups"]
        assert_all_same(found[0] + found[1], answered[:4])
        return [answer["cached"] for group in found for answer in group]

    with redis_server() as server:
        assert on_a_machine("a", server.url) == [0, HIT, HIT, HIT]
        assert on_a_machine("b", server.url) == [HIT] * 4
    assert on_a_machine("c", server.url) == [0, HIT, HIT, HIT]

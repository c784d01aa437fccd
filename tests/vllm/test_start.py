"""Whether an engine starts: what kvass does not handle is refused by name, or served without kvass."""

from pathlib import Path
from typing import Any

from harness.vllm_server import Engines

Answer = dict[str, Any]


def test_kv_that_kvass_does_not_handle_is_refused_by_name_or_served_without(
    engines: Engines, shallow: Path, place: Answer, prompts: list[list[int]], tmp_path: Path
) -> None:
    job = {"model": str(shallow), "engine": {"kv_cache_dtype": "fp8"}, "prompts": prompts[:2]}
    refused = engines.ask("started", tmp_path, **job, kvass=place)
    assert "kv_cache_dtype fp8" in refused["error"]
    off = engines.ask("started", tmp_path, **job, kvass=place | {"on_unsupported": "off"})
    assert [answer["reason"] for answer in off["answers"]] == ["length"] * 2
    assert off["counts"] == {}
    assert not Path(place["host_path"]).exists()


def test_a_setting_that_does_not_exist_is_refused_by_name(
    engines: Engines, shallow: Path, place: Answer, tmp_path: Path
) -> None:
    job = {"model": str(shallow), "prompts": [], "kvass": place | {"host_byte": 1}}
    assert "host_byte" in engines.ask("started", tmp_path, **job)["error"]

"""A model with sliding and full attention, whose KV vLLM keeps in several groups: Gemma 3."""

from pathlib import Path
from typing import Any

from same import assert_all_same
from test_answers import corrupt

from harness.vllm_server import Engines

Answer = dict[str, Any]
Prompts = list[list[int]]
HIT = 896


def test_what_a_window_sees_is_stored_and_loaded_right(
    engines: Engines, gemma3: Path, place: Answer, gemma_prompts: Prompts, gemma_expected: list[Answer],
    tmp_path: Path,
) -> None:  # fmt: skip
    job = {"model": str(gemma3), "kvass": place | {"disk_bytes": 0}}
    groups = [gemma_prompts[:1], gemma_prompts]
    first = engines.ask("answers", tmp_path, **job, groups=groups)["groups"]
    assert_all_same(first[0], gemma_expected[:1])
    assert_all_same(first[1], gemma_expected)
    assert [answer["cached"] for answer in first[1]] == [HIT] * 4
    sharing = {"enable_prefix_caching": True, "max_num_batched_tokens": 300}
    again = engines.ask("answers", tmp_path, **job, engine=sharing, groups=[gemma_prompts])
    assert_all_same(again["groups"][0], gemma_expected)
    assert [answer["cached"] for answer in again["groups"][0]] == [HIT] * 4
    assert again["counts"]["kvass_loads"] == 1, "requests that share a beginning load it once"
    corrupt(place)
    damaged = engines.ask("answers", tmp_path, **job, groups=[gemma_prompts[:2], gemma_prompts[2:]])
    assert damaged["counts"]["kvass_failed_loads"]
    assert_all_same(damaged["groups"][0] + damaged["groups"][1], gemma_expected)


def test_two_tensor_parallel_ranks_store_and_load_their_parts(
    engines: Engines, gemma3: Path, place: Answer, gemma_prompts: Prompts, gemma_expected: list[Answer],
    tmp_path: Path,
) -> None:  # fmt: skip
    job = {
        "model": str(gemma3), "kvass": place | {"disk_bytes": 0}, "engine": {"tensor_parallel_size": 2},
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }  # fmt: skip
    found = engines.ask("answers", tmp_path, **job, groups=[gemma_prompts[:1], gemma_prompts[:2]])["groups"]
    assert_all_same(found[0] + found[1], [gemma_expected[0], *gemma_expected[:2]])
    assert [answer["cached"] for answer in found[0] + found[1]] == [0, HIT, HIT]

"""vLLM answers with kvass what it answers without, however its KV came about."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from same import assert_all_same, assert_same

from harness.vllm_server import Engines

Answer = dict[str, Any]
Prompts = list[list[int]]
HIT = 384
"""Tokens in the whole blocks that the prompts share."""


def test_cold_and_warm_answers_are_those_without_kvass_and_each_block_is_stored_once(
    engines: Engines, smollm2: Path, place: Answer, prompts: Prompts, expected: list[Answer], tmp_path: Path
) -> None:
    groups = [prompts[:1], prompts[:1], prompts]
    found = engines.ask("answers", tmp_path, model=str(smollm2), kvass=place, groups=groups)["groups"]
    assert_same(found[0][0], expected[0])
    assert_same(found[1][0], expected[0])
    assert_all_same(found[2], expected)
    assert [answer["cached"] for group in found for answer in group] == [0] + [HIT] * 9
    own = len(prompts)  # the block in which each asks something else, and is answered
    assert len(objects(place)) == HIT // 128 + own


def test_what_is_stored_is_told_in_vllms_own_events(
    engines: Engines, shallow: Path, place: Answer, prompts: list[list[int]], tmp_path: Path
) -> None:
    job = {"model": str(shallow), "kvass": place, "prompts": prompts[:1]}
    (event,) = engines.ask("told", tmp_path, **job)["events"]
    assert event == {"blocks": 3, "tokens": prompts[0][:384], "medium": "CPU", "follows": False}


def test_a_restarted_process_hits_what_the_first_stored(
    engines: Engines, smollm2: Path, place: Answer, prompts: Prompts, expected: list[Answer], tmp_path: Path
) -> None:
    job = {"model": str(smollm2), "kvass": place}
    engines.ask("answers", tmp_path, **job, groups=[prompts[:1]])
    sharing = {"enable_prefix_caching": True}
    found = engines.ask("answers", tmp_path, **job, engine=sharing, groups=[prompts[1:2], prompts])["groups"]
    assert_same(found[0][0], expected[1])
    assert_all_same(found[1], expected)
    assert all(answer["cached"] == HIT for answer in found[1])


def test_chunked_and_preempted_requests_are_answered_right_and_resume_from_what_was_stored(
    engines: Engines, shallow: Path, place: Answer, prompts: Prompts, answered: list[Answer], tmp_path: Path
) -> None:
    small = {
        "max_num_batched_tokens": 320, "max_num_seqs": 4, "num_gpu_blocks_override": 14,
        "max_model_len": 1024,
    }  # fmt: skip
    job = {"model": str(shallow), "kvass": place, "engine": small, "prompts": prompts}
    found = engines.ask("preempted", tmp_path, **job)
    assert found["preemptions"]
    assert_all_same(found["answers"], answered)


def test_an_abort_in_mid_load_leaves_nothing_behind(
    engines: Engines, shallow: Path, place: Answer, prompts: Prompts, answered: list[Answer], tmp_path: Path
) -> None:
    job = {"model": str(shallow), "kvass": place}
    engines.ask("answers", tmp_path, **job, groups=[prompts[:1]])
    found = engines.ask("aborted", tmp_path, **job, prompts=prompts[:2])
    assert_all_same(found["answers"], answered[:1])
    assert found["kept"] == {"requests": 0, "loading": 0, "leases": 0}
    assert_all_same(found["after"], answered[:2])


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_corrupt_objects_are_recomputed(
    engines: Engines, shallow: Path, place: Answer, prompts: Prompts, answered: list[Answer], tmp_path: Path,
    policy: str,
) -> None:  # fmt: skip
    job = {"model": str(shallow), "kvass": place | {"disk_bytes": 0}}
    engines.ask("answers", tmp_path, **job, groups=[prompts[:1]])
    corrupt(place)
    sharing = {"enable_prefix_caching": True}
    found = engines.ask(
        "answers",
        tmp_path,
        **job,
        policy=policy,
        late=True,
        engine=sharing,
        groups=[prompts[:4], prompts[4:]],
    )
    counts, found = found["counts"], found["groups"]
    assert counts["kvass_hit_tokens"] == (HIT if policy == "recompute" else 128)
    assert counts.get("kvass_failed_loads", 0) == (1 if policy == "recompute" else 0)
    assert_all_same(found[0] + found[1], answered)
    assert {answer["reason"] for group in found for answer in group} == {"length"}
    again = engines.ask("answers", tmp_path, **job, groups=[prompts])["groups"]
    assert_all_same(again[0], answered)
    assert all(answer["cached"] == HIT for answer in again[0])


def objects(place: Answer) -> list[Path]:
    """The objects in the host tier."""
    return [one for one in Path(place["host_path"]).glob("objects/**/*") if one.is_file()]


def corrupt(place: Answer) -> None:
    """Overwrite some bytes of every stored object but a sequence's first."""
    first = b'\\"position\\":0,'
    files = [one for one in objects(place) if first not in one.read_bytes()[: 64 << 10]]
    assert 0 < len(files) < len(objects(place))
    for file in files:
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(random.Random(7).randbytes(64))


def test_kill_9_in_mid_store_leaves_only_right_state(
    engines: Engines, shallow: Path, place: Answer, prompts: Prompts, answered: list[Answer], tmp_path: Path
) -> None:
    job = {"model": str(shallow), "kvass": place}
    running = engines.begin("killed", tmp_path, **job, prompts=prompts[:1], objects=2)
    assert engines.wait(running.pid) == -signal.SIGKILL
    found = engines.ask("answers", tmp_path, **job, groups=[prompts[:1], prompts[:1]])["groups"]
    assert_same(found[0][0], answered[0])
    assert_same(found[1][0], answered[0])
    assert found[0][0]["cached"] < HIT
    assert found[1][0]["cached"] == HIT


def test_two_engines_at_once_share_one_tier(
    engines: Engines, shallow: Path, place: Answer, prompts: Prompts, answered: list[Answer], tmp_path: Path
) -> None:
    job = {"model": str(shallow), "kvass": place, "groups": [prompts[:4], prompts[4:]]}
    running = [engines.begin("answers", tmp_path / name, **job) for name in "ab"]
    for one in running:
        found = one.result()["groups"]
        assert_all_same(found[0] + found[1], answered)

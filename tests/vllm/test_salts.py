"""Requests of other tenants and adapters never share KV; what a request permits is kept to."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from same import assert_same

from harness.vllm_server import Engines

Answer = dict[str, Any]
Prompts = list[list[int]]
HIT = 384


def test_salts_and_permissions_are_kept_to(
    engines: Engines, shallow: Path, place: Answer, prompts: Prompts, answered: list[Answer], tmp_path: Path
) -> None:
    other = [prompts[1][1:]]
    asked: list[tuple[str, Prompts, Answer, int]] = [
        ("nothing is stored", prompts[:1], {}, 0),
        ("stored without a salt", prompts[:1], {}, HIT),
        ("another tenant", prompts[:1], {"salt": "one"}, 0),
        ("the same tenant", prompts[:1], {"salt": "one"}, HIT),
        ("a third tenant", prompts[:1], {"salt": "two"}, 0),
        ("may not load", prompts[:1], {"transfer": {"kvass": {"load": False}}}, 0),
        ("may not store", other, {"transfer": {"kvass": {"store": False}}}, 0),
        ("nothing was stored", other, {}, 0),
        ("malformed wishes", prompts[:1], {"transfer": {"kvass": {"load": "no", "segments": [[3, 1]]}}}, HIT),
        ("no such state", prompts[:1], {"transfer": {"kvass": {"approximate": True}}}, HIT),
    ]
    job = {"model": str(shallow), "kvass": place | {"tenant_salt": "operator"}}
    groups, hows = [group for _, group, _, _ in asked], [how for _, _, how, _ in asked]
    found = engines.ask("answers", tmp_path, **job, groups=groups, ask=hows)["groups"]
    assert {what: answer["cached"] for (what, *_), (answer,) in zip(asked, found, strict=True)} == {
        what: cached for what, _, _, cached in asked
    }
    for (_, group, *_), (answer,) in zip(asked, found, strict=True):
        if group == prompts[:1]:
            assert_same(answer, answered[0])


def adapter(path: Path, seed: int, model: Path) -> str:
    """A LoRA adapter that changes what the model computes."""
    path.mkdir()
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        for name, wide in (("q_proj", 576), ("v_proj", 192)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = random.normal(0, 0.05, (8, 576)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = random.normal(0, 0.05, (wide, 8)).astype(np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
        "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "smollm2",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def test_adapters_never_share_kv_and_one_that_changed_is_not_trusted(
    engines: Engines, shallow: Path, place: Answer, prompts: Prompts, answered: list[Answer], tmp_path: Path
) -> None:
    one, two = (
        ["one", 1, adapter(tmp_path / "one", 1, shallow)],
        ["two", 2, adapter(tmp_path / "two", 2, shallow)],
    )
    renamed = ["other", 3, one[2]]
    hows: list[Answer] = [
        {}, {"lora": one}, {"lora": one}, {"lora": two}, {"lora": renamed}, {},
        {"lora": one, "spoil": f"{one[2]}/adapter_config.json"}, {"lora": two},
    ]  # fmt: skip
    job = {
        "model": str(shallow),
        "kvass": place,
        "engine": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3},
    }
    found = engines.ask("answers", tmp_path, **job, groups=[prompts[:1]] * len(hows), ask=hows)["groups"]
    flat = [answer for (answer,) in found]
    assert [answer["cached"] for answer in flat] == [0, 0, HIT, 0, HIT, HIT, 0, HIT]
    for base in (flat[0], flat[5]):
        assert_same(base, answered[0])
    for answer in (flat[2], flat[4], flat[6]):
        assert_same(answer, flat[1])
    assert_same(flat[7], flat[3])
    assert flat[1]["top"][0] != flat[3]["top"][0] != flat[0]["top"][0]

"""Every Python block of the README and the docs runs, against a real model and a store of its own."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs" / "lab.md")  # it runs as a whole: test_lab.py
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.model
@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(
    block: str, smollm2_fp32: Any, models_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from kvass import KVCache
    from kvass.engines.transformers import attach, detach

    monkeypatch.setenv("KVASS_HOST_BYTES", "0")
    monkeypatch.setenv("KVASS_DISK_PATH", str(tmp_path / "objects"))
    model = smollm2_fp32.model
    prompt_ids = torch.tensor([smollm2_fp32.tokenizer("The capital of France is a city called").input_ids])
    with attach(model, KVCache.open()):
        model.generate(prompt_ids, max_new_tokens=2, do_sample=False)
    detach(model)
    path = next((tmp_path / "objects" / "objects").glob("*/*"))
    try:
        exec(block, {"model": model, "prompt_ids": prompt_ids, "models_path": models_path, "path": path})
    finally:
        detach(model)


def test_the_two_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.M):
        assert f"\n{command}:" in makefile

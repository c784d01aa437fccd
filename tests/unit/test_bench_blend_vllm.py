"""The benchmark of repair in a real vLLM: what it counts, and the certificate that it brings."""

from pathlib import Path

import pytest

from kvass.bench.blend_vllm import _own_models, _summed_up
from kvass.engines.transformers.load import certified_namespace
from kvass.quality import Budget, Gate

pytestmark = pytest.mark.model


def test_only_prompts_that_were_loaded_whole_are_hits() -> None:
    found = _summed_up({"plain": [8.0, 9.0, 2.0], "blended": [2.0, 2.0, 4.0]}, [3200, 3200, 640])
    assert found["vllm_speedup"] == 4.0
    told = found["vllm_setting"]
    assert (told["hits"], told["rounds"], told["cached_tokens"]) == (2, 3, [3200, 3200, 640])
    assert told["interval95"] == [0.5, 4.5]


def test_its_certificate_is_for_its_own_models_folder(models_path: Path, tmp_path: Path) -> None:
    own = _own_models(models_path, tmp_path / "models", "smollm2-135m")
    space = certified_namespace("smollm2-135m", own)
    assert Gate(own).blend(space, "query", 0.1, Budget()).allowed
    assert len(list((own / "calibrated").iterdir())) == 1
    assert not (own / "calibrated").is_symlink()

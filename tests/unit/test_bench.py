"""The benchmarks: their JSON keys are a contract, and small runs of them work."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvass.bench.report import interleaved, interval, ratios
from kvass.bench.scratch import scratch
from kvass.errors import ConfigError


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "kvass", "bench", *arguments, "--disk", str(tmp_path), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["machine"]["cores"] >= 1
    return found


def test_store_emits_its_ratios(tmp_path: Path) -> None:
    found = bench(tmp_path, "store", "--rounds", "3")
    for name in (
        "host_load_vs_floor", "disk_load_vs_floor", "host_store_vs_floor", "load_vs_torch_load",
        "load_vs_safetensors", "store_vs_torch_save",
    ):  # fmt: skip
        assert found[name] > 0 and found["smollm2-135m"][name] > 0
    assert found["chunk_bytes"] >= 4_000_000 and found["smollm2-135m"]["chunk_bytes"] >= 4_000_000
    assert set(found["host_load_gbps"]) == {"kvass", "floor"}
    assert set(found["others_load_gbps"]) == {"kvass", "torch_load", "safetensors"}


def test_index_emits_its_ratios(tmp_path: Path) -> None:
    found = bench(tmp_path, "index", "--objects", "1500", "--rounds", "3")
    assert found["objects"] == 1500
    assert found["lookup_vs_raw"] > 0 and found["lookup_tokens_vs_raw"] > 0


@pytest.mark.model
def test_overhead_stores_everything_and_emits_its_ratios(
    tmp_path: Path, models_path: Path, smollm2_bf16: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASS_MODELS_PATH", str(models_path))
    found = bench(tmp_path, "overhead", "--pairs", "2", "--lengths", "64")
    assert found["no_reuse_host"] > 0 and found["no_reuse_ssd"] > 0
    # 64 prompt tokens and three of the four decoded ones, 23,040 bytes each, and the header
    assert found["by_length"]["64"]["costs"]["ssd"]["bytes_stored"] >= 2 * 67 * 23_040
    low, high = found["by_length"]["64"]["host"]["interval95"]
    assert low <= found["by_length"]["64"]["host"]["ratio"] <= high


@pytest.mark.model
def test_ttft_emits_rows_and_where_loading_wins(
    tmp_path: Path, models_path: Path, smollm2_bf16: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASS_MODELS_PATH", str(models_path))
    found = bench(tmp_path, "ttft", "--rounds", "1", "--lengths", "300")
    assert [row["context_tokens"] for row in found["seconds"]][-1] == 300
    assert set(found["seconds"][-1]) == {"context_tokens", "plain", "cold", "host", "disk"}
    assert set(found["loading_wins_from_tokens"]) == {"host", "disk"}


def test_sides_take_turns() -> None:
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}  # type: ignore[misc]
    seconds = interleaved(sides, 3)
    assert order == list("abcbcacab")
    assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3, "c": [1.0] * 3}


def test_intervals_hold_the_median_and_are_reproducible() -> None:
    values = ratios([float(n) for n in range(1, 41)], [20.0] * 40)
    low, high = interval(values)
    assert low < 1.025 < high and interval(values) == (low, high)


def test_a_disk_that_is_no_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match="--disk"), scratch(Path("/dev/shm")):
        pass

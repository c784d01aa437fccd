"""`kvass recode` on a store of its own, and what `ls` and `show` say of what it left."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fixtures.coders import calibrate, measured
from kvass import KVCache, KVSpec, LayerGroup, Namespace, Pool, Settings
from kvass.cli import app
from kvass.keys import lossy_namespace

GROUP = LayerGroup(kind="attention", layers=(0, 1), kv_heads=2, head_dim=32, v_head_dim=32, dtype="bfloat16")
TOKENS = np.arange(600)


def space(model: str) -> Namespace:
    return Namespace(
        model=model, weights=model, config="c", adapter="", spec=KVSpec(groups=(GROUP,)), tenant="",
        numerics="test",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """600 tokens, in three objects, of two models; the first is certified for int8."""
    host = Path(f"/dev/shm/kvass-test-cli-recode-{os.getpid()}")
    for name, value in (
        ("KVASS_HOST_PATH", str(host)),
        ("KVASS_DISK_PATH", str(tmp_path / "disk")),
        ("KVASS_MODELS_PATH", str(tmp_path / "models")),
        ("COLUMNS", "220"),
    ):
        monkeypatch.setenv(name, value)
    calibrate(tmp_path / "models", space("known-model"), [measured("int8")])
    with KVCache.open(Settings.load()) as cache:
        for model in ("known-model", "other-model"):
            pool = Pool(space(model).spec, TOKENS.size)
            for number, array in enumerate(pool.arrays(0, 0, TOKENS.size).values()):
                array[:] = np.random.default_rng(number).normal(size=array.shape).astype(array.dtype)
            cache.store(TOKENS, space(model), pool).wait()
    yield tmp_path
    shutil.rmtree(host, ignore_errors=True)


def kvass(*arguments: str, code: int = 0) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvass", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def recode(*arguments: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kvass("recode", "--json", *arguments, code=code)[0])
    return found


def rows(tier: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kvass("ls", "--json", "--tier", tier)[0])
    return found


def test_what_matches_is_recoded_and_another_run_finds_it_done(store: Path) -> None:
    done = recode("--to", "lossless", "--tier", "disk", "--match", "known")
    assert (done["objects"], done["recoded"], done["left"], done["failed"]) == (6, 3, 3, 0)
    assert done["bytes_after"] < done["bytes_before"]
    assert {(row["model"], row["codec"], row["provenance"]) for row in rows("disk")} == {
        ("known-model", "lossless", "exact"), ("other-model", "raw", "exact"),
    }  # fmt: skip
    assert {row["codec"] for row in rows("host")} == {"raw"}
    assert recode("--to", "lossless", "--tier", "disk", "--match", "known")["already"] == 3
    address = rows("host")[0]["address"]
    assert recode("--to", "lossless", "--tier", "host", "--match", address[:40])["recoded"] == 1


def test_a_lossy_codec_needs_the_certificate_and_says_so(store: Path) -> None:
    done = recode("--to", "int8", "--tier", "disk", code=1)
    assert (done["recoded"], done["left"], done["failed"]) == (3, 3, 0)
    assert len(done["refused"]) == 1 and "other-model" in done["refused"][0]
    assert "kvass calibrate" in done["refused"][0]
    lossy = next(row for row in rows("disk") if row["codec"] == "int8" and row["position"] == 0)
    assert lossy["provenance"] == "lossy-int8" and 1.5 < lossy["ratio"] < 2
    shown, _ = kvass("show", lossy["address"])
    assert "int8" in shown and "times smaller than raw" in shown and "lossy-int8, by the tables" in shown
    assert recode("--to", "int8", "--tier", "disk", "--match", "known")["already"] == 3
    text, error = kvass("recode", "--to", "int8", "--tier", "disk", code=1)
    assert "3 were int8 already" in text
    assert "int8 is refused: no certificate for this KV of other-model" in error
    with KVCache.open(Settings.load(host_bytes=0)) as cache:
        assert cache.lookup(TOKENS, space("known-model")).length == 0
        assert cache.lookup(TOKENS, lossy_namespace(space("known-model"), "int8")).length == TOKENS.size


def test_what_nothing_here_decodes_is_shown_without_its_arrays(store: Path) -> None:
    recode("--to", "int8", "--tier", "disk", "--match", "known")
    shutil.rmtree(store / "models")
    lossy = next(row for row in rows("disk") if row["codec"] == "int8")
    shown = json.loads(kvass("show", "--json", lossy["address"])[0])
    assert shown["verified"] is True and shown["bytes_per_layer"] == {}
    assert "nothing here decodes it" in kvass("show", lossy["address"])[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--to", "q9", "--tier", "disk"], "q9"),
        (["--to", "lossless", "--tier", "moon"], "moon"),
    ],
)
def test_unknown_codecs_and_tiers_are_one_line(store: Path, arguments: list[str], word: str) -> None:
    error = kvass("recode", *arguments, code=2)[1]
    assert word in error and error.count("\n") == 1


def test_an_interrupted_run_says_that_another_goes_on(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = KVCache.recode

    def interrupted(self: KVCache, *arguments: Any) -> None:
        whole(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(KVCache, "recode", interrupted)
    done = CliRunner().invoke(app, ["recode", "--to", "lossless", "--tier", "disk"])
    assert done.exit_code == 130
    assert "another run goes on" in done.output
    assert recode("--to", "lossless", "--tier", "disk")["already"] == 6

"""Documents in another order: a worker repairs them for a vLLM that knows nothing of it, which loads them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.servers import end, environment
from harness.vllm_server import Engines
from kvass.cache import KVCache
from kvass.config import Settings
from kvass.engines.transformers import LoadedModel, shared_with
from kvass.engines.vllm.blending import tenant_of
from kvass.provenance import APPROXIMATE_SALT, is_blend
from kvass.quality import BlendMeasured, certify_blends, keep_blends

Answer = dict[str, Any]
CHUNK = 128
TRIES = 8
"""On a busy machine a worker is late at first; what it makes serves the next request."""
ROW = BlendMeasured(
    method="query", chosen=0.1, fraction=0.15, kl_mean=0.02, kl_low=0.01, kl_high=0.03, top1=0.9,
    facts_tried=200, facts_lost=0, facts_lost_high=0.015,
)  # fmt: skip
ANYWHERE = {"kvass": {"reuse": "anywhere", "max_fraction": 0.5, "budget": {"kl": 0.1}}}


@pytest.fixture
def models(models_path: Path, tmp_path: Path) -> Path:
    """The converted models of all tests, and certificates of this one's own."""
    folder = tmp_path / "models"
    folder.mkdir()
    for path in models_path.iterdir():
        if path.name != "calibrated":
            (folder / path.name).symlink_to(path)
    return folder


def test_vllm_loads_what_a_worker_repaired(
    engines: Engines, smollm2: Path, smollm2_fp32: LoadedModel, place: Answer, models: Path,
    encode: Callable[[str], list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    own = {
        **place, "models_path": str(models), "chunk_tokens": CHUNK, "shared_numerics": "tests",
        "jobs_path": str(tmp_path / "jobs"), "jobs_wait_share": 1.0,
    }  # fmt: skip
    settings = Settings.load(**own)
    space = shared_with(smollm2_fp32, settings, "")
    assert space is not None
    keep_blends(models, space, certify_blends(space, 50, 1.0, [ROW]))
    system = encode("Answer from these notes.\n" * 20)[:CHUNK]
    one = encode("Rivers run to the sea, and boats go out at dawn with nets of blue rope. " * 40)[:400]
    two = encode("The mill is painted green; its keeper counts the sacks every evening. " * 40)[:420]
    question = encode("\nWhat colour is the mill?")
    prompt = system + two + one + question
    marked = {"salt": APPROXIMATE_SALT, "transfer": ANYWHERE}
    asked: list[tuple[str, list[int], Answer]] = [
        ("read", system + one, {}),
        ("read", system + two, {}),
        ("no mark", prompt, {"transfer": {"kvass": {**ANYWHERE["kvass"], "store": False}}}),
        *[("asked", prompt, marked)] * TRIES,
        ("exact", prompt, {"transfer": {"kvass": {"store": False}}}),
        ("marked, but no wish", prompt, {"salt": APPROXIMATE_SALT}),
    ]
    worker = subprocess.Popen(
        [sys.executable, "-m", "kvass", "worker", "--model", "smollm2-135m", "--dtype", "float32"],
        env=environment(tmp_path, **{name: str(value) for name, value in own.items()}),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        assert "takes jobs" in worker.stdout.readline()
        found = engines.ask(
            "answers", tmp_path, model=str(smollm2), kvass=own,
            groups=[[tokens] for _, tokens, _ in asked], ask=[how for *_, how in asked],
        )["groups"]  # fmt: skip
    finally:
        end(worker)
    cached = [answer["cached"] for (answer,) in found]
    exact = (len(system) + len(two)) // CHUNK * CHUNK
    whole = (len(prompt) - 1) // CHUNK * CHUNK
    assert cached[0] == 0
    assert cached[2] == exact, "approximate state is for marked salts alone"
    tries, others = cached[3 : 3 + TRIES], cached[3 + TRIES :]
    assert tries[-1] == whole, f"repaired by then at the latest: {cached}"
    assert sorted(tries) == tries
    assert set(tries) <= {exact, whole}
    assert others == [exact, exact], "nothing of it is for who asks for exact state"
    with KVCache.open(settings) as cache:
        states = {one.header().namespace.state for one in cache.entries()}
    assert len([state for state in states if is_blend(state)]) == 1


def test_the_mark_ends_a_salt() -> None:
    assert tenant_of(None) == (None, False)
    assert tenant_of("") == ("", False)
    assert tenant_of("acme") == ("acme", False)
    assert tenant_of(APPROXIMATE_SALT) == (None, True)
    assert tenant_of(f"acme/{APPROXIMATE_SALT}") == ("acme/", True)
    assert tenant_of(f"{APPROXIMATE_SALT}/acme") == (f"{APPROXIMATE_SALT}/acme", False)

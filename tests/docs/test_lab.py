"""The lab runs as it is written: every command in its order, and what it prints is what the page says."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.ports import free_ports

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lab.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.S | re.M)
_MARK = "@@@"


def _script() -> str:
    """All blocks as one shell script; the first one only installs."""
    lines = ["set -eu"]
    assert "pip install" in BLOCKS[0][1]
    for number, (kind, block) in enumerate(BLOCKS[1:], 1):
        lines.append(f"echo {_MARK}{number}{_MARK}")
        if kind == "bash":
            lines.append(block)
        elif kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, "a Python block must say which file it is"
            lines.append(f"cat > {name[1]} <<'LAB_END'\n{block}LAB_END")
    return "\n".join(lines).replace("8000", str(free_ports(1)[0]))


@pytest.mark.model
def test_the_lab_does_what_it_says(models_path: Path, tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVASS_")}
    settings = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KVASS_HOST_PATH": f"/dev/shm/kvass-lab-{os.getpid()}",
        "KVASS_DISK_PATH": str(tmp_path / "objects"),
        "KVASS_STATE_PATH": str(tmp_path / "state"),
        "KVASS_MODELS_PATH": str(models_path),
        "COLUMNS": "160",
    }
    (tmp_path / "lab").mkdir()
    shell = subprocess.Popen(
        ["bash", "-c", _script()], cwd=tmp_path / "lab", env=plain | settings,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        printed_all, _ = shell.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # servers that a step that failed left behind
        shell.wait()
        shutil.rmtree(settings["KVASS_HOST_PATH"], ignore_errors=True)
    assert shell.returncode == 0, printed_all[-3000:]
    outputs = dict(re.findall(rf"{_MARK}(\d+){_MARK}\n(.*?)(?={_MARK}|\Z)", printed_all, re.S))
    for number, (kind, wanted) in enumerate(BLOCKS[1:], 1):
        if kind == "text":
            printed = outputs[str(number - 1)]
            for line in wanted.splitlines():
                pattern = ".*".join(re.escape(part) for part in line.split("…"))
                assert re.search(pattern, printed), f"{line!r} is not in:\n{printed}"
    times = [float(one) for one in re.findall(r"first token after ([\d.]+) s", printed_all)]
    (without,) = (float(one) for one in re.findall(r"without kvass: ([\d.]+) s", printed_all))
    assert len(times) == 4 and max(times) < without
    late = [int(hit) for hit in re.findall(r"in front: (\d+) of", printed_all)]
    assert len(late) == 2 and max(late) < 100
    loaded = [tuple(map(int, pair)) for pair in re.findall(r"s; (\d+) of (\d+) loaded", printed_all)]
    assert loaded[1] == (loaded[1][1] - 1, loaded[1][1])
    assert all(hit > 0.9 * prompt for hit, prompt in loaded)

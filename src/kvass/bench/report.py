"""What a benchmark ran on, and how its figures are summed up."""

import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("kvass", "numpy", "torch", "transformers", "xxhash", "lmdb", "safetensors")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel and versions."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := installed(name))},
    }


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return "unknown"


def installed(name: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def interleaved(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    progress: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Run every side once a round, in an order that rotates; the seconds of each, round by round."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for at in range(len(names)):
            name = names[(at + number) % len(names)]
            seconds[name].append(sides[name]())
            if progress is not None:
                progress()
    return seconds


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Pair by pair."""
    return [one / other for one, other in zip(numerator, denominator, strict=True)]


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Bootstrap confidence interval of the median; the same for the same values."""
    return _bootstrap(lambda draw: _drawn_median(draw, values), level)


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap confidence interval of the ratio of two medians; the same for the same values."""
    return _bootstrap(lambda draw: _drawn_median(draw, numerator) / _drawn_median(draw, denominator), level)


def _drawn_median(draw: random.Random, values: Sequence[float]) -> float:
    return statistics.median(draw.choices(values, k=len(values)))


def _bootstrap(figure: Callable[[random.Random], float], level: float) -> tuple[float, float]:
    draw = random.Random(0)
    found = sorted(figure(draw) for _ in range(2000))
    cut = int(len(found) * (1 - level) / 2)
    return found[cut], found[-cut - 1]


def drop_pages(folder: Path) -> None:
    """Drop a directory tier's object files from the page cache, so that the next read comes from the disk."""
    for path in folder.glob("objects/*/*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not yet written would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

"""The Pareto picture of `kvass bench codec`, as a PNG file."""

import math
from collections.abc import Sequence
from pathlib import Path

from kvass.bench.codec_pareto import Point, height_at, hull
from kvass.errors import InputError, ModelFilesError
from kvass.quality import Measured

_LEAST_KL = 1e-6
"""Where the logarithmic axis ends: what is less stands there."""


def on_the_line(baselines: Sequence[Measured]) -> list[Measured]:
    """The baselines that no other baselines, nor mixtures of them, beat."""
    line = set(hull([Point(one.bits, one.kl_mean) for one in baselines]))
    return [one for one in baselines if Point(one.bits, one.kl_mean) in line]


def check_plottable(path: Path) -> None:
    """Raises ModelFilesError where matplotlib is not there, InputError where there is no folder for the file:
    known before anything is measured for the plot's sake."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ModelFilesError("a PNG plot needs matplotlib: pip install 'kvass[plot]'") from error
    if not path.absolute().parent.is_dir():
        raise InputError(f"cannot write --plot {path}: there is no such folder")


def write_png(path: Path, ours: Sequence[Measured], baselines: Sequence[Measured], title: str) -> None:
    """kvass' codecs with the intervals of their KL, the baselines, and the line through their lower hull.

    Raises InputError where the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    line = hull([Point(one.bits, one.kl_mean) for one in baselines])
    if len(line) > 1:
        ends = [line[0].bits, *(point.bits for point in line[1:])]
        axes.plot(ends, [math.exp(height_at(line, bits)) for bits in ends], color="tab:gray", linewidth=1)
    for some, colour, marker, size in ((baselines, "tab:gray", "s", 6.5), (ours, "tab:blue", "o", 8.5)):
        for one in some:
            middle = max(one.kl_mean, _LEAST_KL)
            low, high = max(one.kl_low, _LEAST_KL), max(one.kl_high, _LEAST_KL)
            ends_of = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
            axes.errorbar(
                [one.bits], [middle], yerr=ends_of, fmt=marker, color=colour, capsize=2, markersize=4
            )
            axes.annotate(
                one.codec, (one.bits, middle), xytext=(5, 3), textcoords="offset points", fontsize=size,
                color=colour,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlim(0, 1.1 * max(one.bits for one in (*ours, *baselines)))
    axes.set_xlabel("stored bits per element")
    axes.set_ylabel("KL per token (nats), 95% interval")
    axes.set_title(title)
    axes.grid(visible=True, which="major", alpha=0.3)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise InputError(f"cannot write --plot {path}: {error}") from error

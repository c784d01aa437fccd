"""Pictures of what codecs store and what that costs, as PNG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvass.errors import InputError, ModelFilesError
from kvass.quality import Measured

LEAST_KL: Final = 1e-6
"""Where a logarithmic axis ends: what is less stands there."""


class Drawn(NamedTuple):
    """Codecs that look alike."""

    measured: Sequence[Measured]
    colour: str = "tab:blue"
    marker: str = "o"
    fontsize: float = 8.5


def check_plottable(path: Path, option: str) -> None:
    """Raises ModelFilesError where matplotlib is not there, InputError where there is no folder for the file
    that the option of that name says: known before anything is measured for the picture's sake."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ModelFilesError("a PNG plot needs matplotlib: pip install 'kvass[plot]'") from error
    if not path.absolute().parent.is_dir():
        raise InputError(f"cannot write {option} {path}: there is no such folder")


def write_png(
    path: Path, option: str, title: str, drawn: Sequence[Drawn], line: Sequence[tuple[float, float]] = ()
) -> None:
    """Bits per element against KL with its interval, and a line through points of both.

    Raises ModelFilesError and InputError as `check_plottable`, and InputError where the file cannot be
    written.
    """
    check_plottable(path, option)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if line:
        axes.plot(*zip(*line, strict=True), color="tab:gray", linewidth=1)
    for some in drawn:
        for one in some.measured:
            middle = max(one.kl_mean, LEAST_KL)
            low, high = max(one.kl_low, LEAST_KL), max(one.kl_high, LEAST_KL)
            ends = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
            axes.errorbar(
                [one.bits], [middle], yerr=ends, fmt=some.marker, color=some.colour, capsize=2, markersize=4
            )
            axes.annotate(
                one.codec if one.kl_mean else f"{one.codec} (no loss)", (one.bits, middle),
                xytext=(5, 3), textcoords="offset points", fontsize=some.fontsize, color=some.colour,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlim(0, 1.1 * max((one.bits for some in drawn for one in some.measured), default=1.0))
    axes.set_xlabel("stored bits per element")
    axes.set_ylabel(f"KL per token (nats), 95% interval; what is below {LEAST_KL:g} is drawn there")
    axes.set_title(title)
    axes.grid(visible=True, which="major", alpha=0.3)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise InputError(f"cannot write {option} {path}: {error}") from error

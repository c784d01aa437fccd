"""The Pareto picture of `kvass bench codec`, as a PNG file."""

import math
from collections.abc import Sequence
from pathlib import Path

from kvass.bench.codec_pareto import Point, height_at, hull
from kvass.calibrate import picture
from kvass.calibrate.picture import Drawn
from kvass.quality import Measured


def on_the_line(baselines: Sequence[Measured]) -> list[Measured]:
    """The baselines that no other baselines, nor mixtures of them, beat."""
    line = set(hull([Point(one.bits, one.kl_mean) for one in baselines]))
    return [one for one in baselines if Point(one.bits, one.kl_mean) in line]


def write_png(path: Path, ours: Sequence[Measured], baselines: Sequence[Measured], title: str) -> None:
    """kvass' codecs, the baselines, and the line through their lower hull; see `picture.write_png`."""
    line = hull([Point(one.bits, one.kl_mean) for one in baselines])
    ends = [(point.bits, math.exp(height_at(line, point.bits))) for point in line] if len(line) > 1 else []
    picture.write_png(path, "--plot", title, [Drawn(baselines, "tab:gray", "s", 6.5), Drawn(ours)], ends)

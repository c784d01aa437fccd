"""Whether codecs are beaten by others: points of stored bits and KL, and the line that bounds them."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_LEAST_KL = 1e-12
"""What less counts as: the logarithm of nothing is no number."""


class Point(NamedTuple):
    """Bits stored an element, and KL a token in nats."""

    bits: float
    kl: float

    @property
    def height(self) -> float:
        """The logarithm of the KL."""
        return math.log(max(self.kl, _LEAST_KL))


def hull(points: Sequence[Point]) -> list[Point]:
    """The lower hull of the points in bits against log KL, by ascending bits, as far as it descends.

    No point, and no line between two of them, lies below it.
    """
    found: list[Point] = []
    for point in sorted(points):
        if found and point.height >= found[-1].height:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-2], point):
            found.pop()
        found.append(point)
    return found


def height_at(line: Sequence[Point], bits: float) -> float:
    """The log KL of a hull at so many bits.

    Its first and its last edge are extended beyond its ends, which asks more of a level than any of the
    points there does. A hull of one point is level.
    """
    if len(line) == 1:
        return line[0].height
    at = next((at for at in range(1, len(line) - 1) if bits <= line[at].bits), len(line) - 1)
    first, second = line[at - 1], line[at]
    return first.height + (bits - first.bits) * _slope(first, second)


def bits_at(line: Sequence[Point], kl: float) -> float | None:
    """The bits of a hull at that KL, by interpolation in log KL; beyond its ends as `height_at`.

    None where the hull has no edge to follow.
    """
    if len(line) < 2:
        return None
    height = Point(0.0, kl).height
    at = next((at for at in range(1, len(line) - 1) if height >= line[at].height), len(line) - 1)
    first, second = line[at - 1], line[at]
    return max(0.0, first.bits + (height - first.height) / _slope(first, second))


def dominates(levels: Sequence[Point], others: Sequence[Point]) -> bool:
    """Whether none of `others` has at most a level's bits and at most its KL, and each level lies below the
    line through the lower hull of `others`."""
    if not others:
        return True
    line = hull(others)
    return all(
        level.height < height_at(line, level.bits)
        and not any(other.bits <= level.bits and other.kl <= level.kl for other in others)
        for level in levels
    )


def compared(levels: Mapping[str, Point], others: Sequence[Point]) -> dict[str, float | bool | None]:
    """`pareto_dominates` (None without levels or others), and of each level `best_baseline_<level>_bits`:
    what the best of the others needs for that level's KL, mixtures of two of them included."""
    line = hull(others)
    found: dict[str, float | bool | None] = {
        "pareto_dominates": dominates(list(levels.values()), others) if levels and others else None
    }
    for name, level in levels.items():
        needed = bits_at(line, level.kl)
        found[f"best_baseline_{name}_bits"] = None if needed is None else round(needed, 4)
    return found


def _slope(first: Point, second: Point) -> float:
    return (second.height - first.height) / (second.bits - first.bits)

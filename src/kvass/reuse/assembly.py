"""Putting KV of segments that were read elsewhere to where they stand in a prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvass.container import Array
from kvass.errors import InputError
from kvass.ropes import frequencies, moved
from kvass.runner import KV, Workspace
from kvass.spec import KVSpec


class Segment(NamedTuple):
    """A passage of a prompt whose KV is there: `start` in the prompt, `read_at` where it stood when the
    model read it; `kv` of its tokens, canonical arrays."""

    start: int
    read_at: int
    kv: KV

    @property
    def tokens(self) -> int:
        """How long it is."""
        return int(self.kv[0]["k"].shape[1])

    @property
    def stop(self) -> int:
        """Where the prompt goes on behind it."""
        return self.start + self.tokens


Rates = np.ndarray[tuple[int], np.dtype[np.float64]]
"""How fast keys turn, radians a token, `[rotary_dim / 2]`."""


def turning(spec: KVSpec) -> list[Rates]:
    """How fast keys turn, by layer group, `[rotary_dim / 2]`; empty where they do not.

    Raises UnsupportedModelError for a RoPE whose keys cannot be moved, by name.
    """
    return [np.empty(0) if group.rope is None else frequencies(group.rope) for group in spec.groups]


def put(workspace: Workspace, segments: Sequence[Segment]) -> None:
    """Write segments to their places: keys turned in float32 by each group's own RoPE, rounded once.

    Raises InputError where they overlap or do not fit the workspace.
    """
    check_apart([(segment.start, segment.stop) for segment in segments])
    rates = turning(workspace.spec)
    for number, group in enumerate(workspace.spec.groups):
        for segment in segments:
            target = workspace.arrays(number, segment.start, segment.stop)
            for layer in range(len(group.layers)):
                for name, array in target.items():
                    found = segment.kv[number][name][layer]
                    lay(array[layer], found, name, rates[number], segment.start - segment.read_at)


def check_apart(places: Sequence[tuple[int, int]]) -> None:
    """Raises InputError where segments overlap."""
    end = 0
    for start, stop in sorted(places):
        if start < end:
            raise InputError(f"the segment at {start} overlaps the one before it, up to {end}")
        end = stop


def lay(target: Array, found: Array, name: str, rates: Rates, distance: int) -> None:
    """Write one layer's `k` or `v` of a segment, `[tokens, heads, dim]`, to its place: keys turned by the
    distance."""
    if name == "k" and distance:
        found = moved(found.astype(np.float32), rates, distance)
    target[:] = found.astype(target.dtype, copy=False)

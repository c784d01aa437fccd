"""Putting KV of segments that were read elsewhere to where they stand in a prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvass.errors import InputError
from kvass.ropes import frequencies, moved
from kvass.runner import KV, Workspace
from kvass.spec import KVSpec, numpy_dtype


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


def turning(spec: KVSpec) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """How fast keys turn, by layer group, `[rotary_dim / 2]`; empty where they do not.

    Raises UnsupportedModelError for a RoPE whose keys cannot be moved, by name.
    """
    return [np.empty(0) if group.rope is None else frequencies(group.rope) for group in spec.groups]


def put(workspace: Workspace, segments: Sequence[Segment]) -> None:
    """Write segments to their places: keys turned in float32 by each group's own RoPE, rounded once.

    Raises InputError where they overlap or do not fit the workspace.
    """
    rates = turning(workspace.spec)
    end = 0
    for segment in sorted(segments, key=lambda one: one.start):
        if segment.start < end:
            raise InputError(f"the segment at {segment.start} overlaps the one before it, up to {end}")
        end = segment.stop
    for number, group in enumerate(workspace.spec.groups):
        dtype = numpy_dtype(group.dtype)
        for segment in segments:
            target = workspace.arrays(number, segment.start, segment.stop)
            found = segment.kv[number]
            distance = segment.start - segment.read_at
            for layer in range(len(group.layers)):
                keys = found["k"][layer].astype(np.float32)
                target["k"][layer] = moved(keys, rates[number], distance) if distance else keys
                target["v"][layer] = found["v"][layer].astype(dtype, copy=False)

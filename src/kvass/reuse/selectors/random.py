"""Selector `random`: any tokens, the same for the same prompt."""

import numpy as np
from blake3 import blake3

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice, affordable, layers_of
from kvass.runner import Workspace


class Random:
    """The baseline that any choice must beat."""

    name = "random"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        count = affordable(prompt, layers_of(workspace), fraction, 0)
        seed = blake3(np.asarray(prompt.tokens, "<i4").tobytes()).digest(length=8)
        draw = np.random.default_rng(int.from_bytes(seed))
        return Choice(np.sort(draw.permutation(prompt.reused)[:count]))

"""Selector `boundary`: the first tokens of each segment."""

import numpy as np

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice, affordable, layers_of
from kvass.runner import Workspace


class Boundary:
    """EPIC's LegoLink (Hu et al., ICML 2025): the same number of each segment, whose beginning had nothing
    before it when it was read."""

    name = "boundary"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        count = affordable(prompt, layers_of(workspace), fraction, 0)
        return Choice(np.sort(prompt.reused[np.argsort(prompt.depth, kind="stable")[:count]]))

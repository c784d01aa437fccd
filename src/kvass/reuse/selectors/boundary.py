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
        # by how far into its segment a token stands, so that all segments get as many
        depth = np.concatenate([np.empty(0, np.int64), *(np.arange(b - a) for a, b in prompt.segments)])
        return Choice(np.sort(prompt.reused[np.argsort(depth, kind="stable")[:count]]))

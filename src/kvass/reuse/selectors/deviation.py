"""Selector `deviation`: the tokens whose values in one early layer change most when all are computed anew."""

import numpy as np

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice, layers_of
from kvass.runner import Workspace

CHECKED_LAYER = 1


class Deviation:
    """CacheBlend (Yao et al., EuroSys 2025), as its released code chooses: once, by the squared distance of
    values in layer 1, for which the layers before and this layer's keys and values are computed of all tokens
    and stay."""

    name = "deviation"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        rows = np.sort(np.concatenate([prompt.reused, prompt.new]))
        layers = layers_of(workspace)
        checked = min(CHECKED_LAYER, layers - 1)
        held = workspace.layer(checked)["v"]
        before = held[prompt.reused].astype(np.float32)
        workspace.recompute(prompt.rows(rows), rows, layers=checked)
        apart = np.square(held[prompt.reused].astype(np.float32) - before).sum(axis=(1, 2))
        # the chosen ones' first layers are computed here and not again
        token_layers = (checked + 1) * len(prompt.reused)
        rest = max(1, layers - checked - 1)  # where none is left, nothing is affordable
        count = max(0, int((fraction * layers * len(prompt.reused) - token_layers) / rest + 1e-9))
        return Choice(
            np.sort(prompt.reused[np.argsort(-apart, kind="stable")[:count]]),
            token_layers - (checked + 1) * count,
        )

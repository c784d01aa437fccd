"""Repairing a prompt whose segments were read elsewhere: a chosen part of them is computed anew."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.reuse.prompt import Positions, Prompt
from kvass.reuse.selectors.base import Selector, layers_of
from kvass.runner import Workspace


class Repaired(NamedTuple):
    """What was done: positions computed anew; of the reused tokens' layers the share that was computed,
    choosing included; log-probabilities `[vocabulary]` of the token that follows on the prompt."""

    positions: Positions
    fraction: float
    log: npt.NDArray[np.float32]


def repair(prompt: Prompt, workspace: Workspace, selector: Selector, fraction: float) -> Repaired:
    """Compute chosen and new tokens in one pass, all layers, upon the segments that `assembly.put` put there.

    Each sees the tokens before it, as they are in the workspace or come out of the same pass, and none after
    it.
    """
    chosen = selector.choose(prompt, workspace, fraction)
    rows = np.sort(np.concatenate([chosen.positions, prompt.new]))
    log = workspace.recompute(prompt.rows(rows), rows)[0]
    layers, reused = layers_of(workspace), len(prompt.reused)
    computed = chosen.token_layers + layers * len(chosen.positions)
    return Repaired(chosen.positions, computed / (layers * reused) if reused else 0.0, log)

"""Selector `query`: what the question looks at, of that rather what stands early in its segment."""

import numpy as np
import numpy.typing as npt

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice, affordable, layers_of
from kvass.runner import Workspace

PROBE_TOKENS = 16
"""Of the question, its last so many are asked: they know what it is about."""

_FADING = 0.6
"""How far KV of a segment is from what full prefill computes falls with how much of the segment comes before
it: its square about as the power of -0.6 (measured on SmolLM2, see docs/reuse.md)."""


class Query:
    """What an error costs is the attention that it gets, times how large it is. The first is measured: by
    the question's attention over KV as it was put together (as in ProphetKV, arXiv 2602.02579), each layer
    counting the same. The second is expected, from how far into its segment a token stands."""

    name = "query"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        mass = workspace.attention(prompt.rows(prompt.new), prompt.new, judged=PROBE_TOKENS)
        token_layers = len(prompt.new) * len(mass)
        count = affordable(prompt, layers_of(workspace), fraction, token_layers)
        return Choice(looked_at(prompt, mass, count), token_layers)


def looked_at(prompt: Prompt, mass: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """So many positions of reused tokens, rising: by attention `[layers, heads, tokens]`, of which each layer
    and head counts as much, times expected error."""
    seen = mass[:, :, prompt.reused]
    seen /= np.maximum(seen.sum(axis=-1, keepdims=True), 1e-30)
    score = seen.mean(axis=(0, 1)) * (1.0 + prompt.depth) ** -_FADING
    return np.sort(prompt.reused[np.argsort(-score, kind="stable")[:count]])

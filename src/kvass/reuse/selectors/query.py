"""Selector `query`: what the question looks for, of that rather what stands early in its segment."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice, affordable, layers_of
from kvass.runner import Workspace
from kvass.spec import KVSpec

PROBE_TOKENS = 16
"""Of the question, its last so many are asked: they know what it is about."""

_FADING = 0.6
"""How far KV of a segment is from what full prefill computes falls with how much of the segment comes before
it: its square about as the power of -0.6 (measured on SmolLM2, see docs/reuse.md)."""

_HEIGHTS = (4 / 15, 7 / 15, 10 / 15)
"""Where in the model the layers stand that are asked: layers 8, 14 and 20 of SmolLM2's 30."""


class Query:
    """What an error costs is the attention that it gets, times how large it is.

    The first is measured: the question is read behind the exact prefix alone, as if there were no segments;
    what it then looks for is held against their keys in three layers, which is all that must be loaded by
    then. It is hardly another than with the segments in view (see `view`). The second is expected, from how
    far into its segment a token stands.
    """

    name = "query"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        layers, asking = asked_layers(workspace.spec), prompt.question
        token_layers = self.price(prompt, workspace.spec)
        count = affordable(prompt, layers_of(workspace), fraction, token_layers)
        mass = workspace.attention(
            prompt.rows(asking), asking, layers=layers, judged=PROBE_TOKENS, exact=prompt.exact
        )
        return Choice(looked_at(prompt, mass, count), token_layers)

    @staticmethod
    def price(prompt: Prompt, spec: KVSpec) -> int:
        """Token-layers that choosing computes."""
        return len(prompt.question) * (asked_layers(spec)[-1] + 1)


def asked_layers(spec: KVSpec) -> Sequence[int]:
    """The layers nearest to three heights of a model, rising; of those without a window, if there are any."""
    total = sum(len(group.layers) for group in spec.groups)
    whole = [layer for group in spec.groups if group.window is None for layer in group.layers]
    among = sorted(whole) or range(total)
    return sorted({min(among, key=lambda one: abs(one - height * total)) for height in _HEIGHTS})


def looked_at(prompt: Prompt, mass: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """So many positions of reused tokens, rising: by attention `[layers, heads, tokens]`, of which each layer
    and head counts as much, times expected error."""
    seen = mass[:, :, prompt.reused]
    seen /= np.maximum(seen.sum(axis=-1, keepdims=True), 1e-30)
    score = seen.mean(axis=(0, 1)) * (1.0 + prompt.depth) ** -_FADING
    return np.sort(prompt.reused[np.argsort(-score, kind="stable")[:count]])

"""Selector `glance`: chooses as `query`, of the keys of three layers, before anything else need be loaded."""

from collections.abc import Sequence

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice, affordable, layers_of
from kvass.reuse.selectors.query import PROBE_TOKENS, looked_at
from kvass.runner import Workspace
from kvass.spec import KVSpec

_HEIGHTS = (4 / 15, 7 / 15, 10 / 15)
"""Where in the model the layers stand that are asked: layers 8, 14 and 20 of SmolLM2's 30."""


class Glance:
    """The question is read behind the exact prefix alone, as if there were no segments; what it then asks for
    is held against their keys. It is hardly another than with them in view: what a token looks for, it mostly
    knows by itself."""

    name = "glance"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        layers, asking = asked_layers(workspace.spec), prompt.question
        token_layers = len(asking) * (layers[-1] + 1)
        count = affordable(prompt, layers_of(workspace), fraction, token_layers)
        mass = workspace.attention(
            prompt.rows(asking), asking, layers=layers, judged=PROBE_TOKENS, exact=prompt.exact
        )
        return Choice(looked_at(prompt, mass, count), token_layers)


def asked_layers(spec: KVSpec) -> Sequence[int]:
    """The layers nearest to three heights of a model, rising; of those without a window, if there are any."""
    total = sum(len(group.layers) for group in spec.groups)
    whole = [layer for group in spec.groups if group.window is None for layer in group.layers]
    among = sorted(whole) or range(total)
    return sorted({min(among, key=lambda one: abs(one - height * total)) for height in _HEIGHTS})

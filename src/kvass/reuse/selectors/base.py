"""What a selector is: it says which tokens of reused segments are computed anew."""

from typing import NamedTuple, Protocol

from kvass.reuse.prompt import Positions, Prompt
from kvass.runner import Workspace


class Choice(NamedTuple):
    """Positions to compute anew, rising; and what choosing them has computed, in token-layers, beyond what
    repairing them computes."""

    positions: Positions
    token_layers: int = 0


class Selector(Protocol):
    """One way to choose. It may run the model over the workspace, and write to it what it so computes."""

    name: str

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        """Tokens of `prompt.reused` such that, with what the choice costs, no more than `fraction` of the
        reused tokens' layers are computed, or none where the choice alone costs more."""


def layers_of(workspace: Workspace) -> int:
    """How many layers the model keeps KV of."""
    return sum(len(group.layers) for group in workspace.spec.groups)


def affordable(prompt: Prompt, layers: int, fraction: float, token_layers: int) -> int:
    """How many tokens a fraction leaves for, when the choice cost so many token-layers."""
    return max(0, int((fraction * layers * len(prompt.reused) - token_layers) / layers + 1e-9))

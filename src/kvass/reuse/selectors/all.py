"""Selector `all`: everything is computed anew, whatever the fraction."""

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice
from kvass.runner import Workspace


class Everything:
    """What full prefill computes, from the same rows: the bound that repair nears."""

    name = "all"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        return Choice(prompt.reused)

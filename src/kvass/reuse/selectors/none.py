"""Selector `none`: nothing is computed anew."""

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice
from kvass.runner import Workspace


class Nothing:
    """Keys are turned to their places, and that is all."""

    name = "none"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        return Choice(prompt.reused[:0])

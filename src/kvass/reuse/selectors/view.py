"""Selector `view`: as `query`, with the segments in the question's view, so that all must be loaded first."""

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice, affordable, layers_of
from kvass.reuse.selectors.query import PROBE_TOKENS, looked_at
from kvass.runner import Workspace


class View:
    """By the question's attention over KV as it was put together (as in ProphetKV, arXiv 2602.02579), each
    layer counting the same: a little better than `query`, where nothing has to be loaded."""

    name = "view"

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        mass = workspace.attention(prompt.rows(prompt.new), prompt.new, judged=PROBE_TOKENS)
        token_layers = len(prompt.new) * len(mass)
        count = affordable(prompt, layers_of(workspace), fraction, token_layers)
        return Choice(looked_at(prompt, mass, count), token_layers)

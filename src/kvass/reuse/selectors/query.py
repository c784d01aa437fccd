"""Selector `query`: the tokens that the question attends to, over the KV as it was put together."""

import numpy as np

from kvass.reuse.prompt import Prompt
from kvass.reuse.selectors.base import Choice, affordable, layers_of
from kvass.runner import Workspace

PROBE_TOKENS = 16
"""Of the question, its last so many are asked: they know what it is about."""


class Query:
    """Attention mass of the question's tokens, each layer counting the same."""

    name = "query"

    def __init__(self, layers: int | None = None, probe_tokens: int = PROBE_TOKENS):
        """`layers`: of the model's first layers, how many are looked at; all without."""
        self._layers, self._tokens = layers, probe_tokens

    def choose(self, prompt: Prompt, workspace: Workspace, fraction: float) -> Choice:
        rows = prompt.question[-self._tokens :]
        mass = workspace.attention(prompt.rows(rows), rows, layers=self._layers)
        token_layers = len(rows) * len(mass)
        count = affordable(prompt, layers_of(workspace), fraction, token_layers)
        seen = mass[:, :, prompt.reused].mean(axis=1)
        score = (seen / np.maximum(seen.sum(axis=1, keepdims=True), 1e-30)).mean(axis=0)
        return Choice(np.sort(prompt.reused[np.argsort(-score, kind="stable")[:count]]), token_layers)

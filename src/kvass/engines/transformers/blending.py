"""Answering from passages that were read elsewhere: found, moved into a request's pool, and repaired."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kvass.chunks import Tokens
from kvass.engines.transformers.hosting import Host
from kvass.engines.transformers.pool_cache import PoolCache
from kvass.engines.transformers.workspace import TransformersWorkspace
from kvass.keys import Namespace
from kvass.provenance import Blended
from kvass.quality import Budget
from kvass.reuse import arriving
from kvass.reuse.fraction import hidden_fraction
from kvass.reuse.plan import Reuse, planned
from kvass.reuse.prompt import Positions, Prompt
from kvass.reuse.selectors import DEFAULT, selector
from kvass.reuse.stored import joined, segments
from kvass.spec import KVSpec


class Blend(NamedTuple):
    """A prompt whose KV is whole: how it was made, the prompt with its segments, which positions of these
    were computed anew, and the logits `[vocabulary]` behind it."""

    made: Blended
    prompt: Prompt
    recomputed: Positions
    logits: torch.Tensor
    seconds: float


def blend(
    host: Host, held: PoolCache, tokens: Tokens, exact: int, namespace: Namespace, reuse: Reuse,
    budget: Budget | None, given_up: Callable[[], bool],
) -> Blend | None:  # fmt: skip
    """Complete the KV of a prompt of which the first `exact` tokens are in the pool. None, and what lies
    behind these is not to be used, where nothing is found, no certificate covers it, or it was given up.
    """
    cache = host.cache
    if cache is None or not host.movable():
        return None
    certified = cache.repairs(namespace, DEFAULT, budget)
    if not certified:
        return None
    began, spec = time.perf_counter(), held.pool.spec
    seconds = host.pace.seconds(tokens.size - exact)
    with segments(cache, namespace, tokens, exact, seconds, reuse.within) as found:
        if not found:
            return None
        prompt = Prompt(tokens.tolist(), exact, joined(found))
        plan = planned(prompt, spec, certified, reuse.max_fraction, _hidden(host, prompt, spec, reuse))
        if plan is None:
            return None
        workspace = TransformersWorkspace(host.model, held.pool)
        for group in range(len(spec.groups)):
            workspace.arrays(group, 0, exact)
        left = began + seconds - time.perf_counter()
        done = arriving.blend(prompt, workspace, found, selector(plan.method), plan.fraction, left, given_up)
    chosen = 0.0 if done is None else len(done.positions) / len(prompt.reused)
    if done is None or chosen < plan.least:
        return None
    made = Blended(method=plan.method, chosen=min(1.0, chosen), fraction=done.fraction)
    logits = torch.from_numpy(np.asarray(done.log))
    return Blend(made, prompt, done.positions, logits, time.perf_counter() - began)


def _hidden(host: Host, prompt: Prompt, spec: KVSpec, reuse: Reuse) -> float:
    """The fraction that is computed while the segments are being loaded, as far as speeds are known."""
    layers, reused = sum(len(group.layers) for group in spec.groups), len(prompt.reused)
    layer_seconds = host.pace.known(1) / layers
    if not layer_seconds:
        return 0.0
    return hidden_fraction(
        host.loads.known(reused), layer_seconds, reused, layers, floor=0.0, ceiling=reuse.max_fraction
    )

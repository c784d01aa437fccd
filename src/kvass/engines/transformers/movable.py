"""Whether a live model's KV can be moved, and computed in part: tried, since families differ."""

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvass.engines.transformers.pool_cache import TorchPool
from kvass.engines.transformers.workspace import TransformersWorkspace
from kvass.errors import KvassError, UnsupportedModelError
from kvass.reuse.assembly import turning
from kvass.ropes import moved
from kvass.spec import KVSpec

_TOKENS = 9
_FAR = 37
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 5e-2
"""Of dtypes with 16 bits: a turn of another kind is further off than their rounding by far."""


def refuse_unmovable(model: Any, spec: KVSpec) -> None:
    """Raises UnsupportedModelError for a model whose keys do not turn as `kvass.ropes.moved` turns them, or
    that does not compute the same KV when rows of it are computed anew. `spec`: in the dtype of the model."""
    name = model.config.model_type
    fine = all(group.dtype == "float32" for group in spec.groups)
    near_enough = _TOLERANCE if fine else _COARSE_TOLERANCE
    ids = torch.arange(_TOKENS) % min(7, model.config.vocab_size) + 1
    with torch.inference_mode():
        near, far = _alone(model, ids[:1], 0), _alone(model, ids[:1], _FAR)
        whole = DynamicCache(config=model.config)
        logits = model(input_ids=ids[None], past_key_values=whole, use_cache=True).logits[0, -1]
    for group, rates in zip(spec.groups, turning(spec), strict=True):
        for layer in group.layers:
            (keys, values), (keys_far, values_far) = near[layer], far[layer]
            if not (
                _near(moved(keys.numpy(), rates, _FAR), keys_far, near_enough)
                and _near(values, values_far, near_enough)
            ):
                raise UnsupportedModelError(
                    f"keys of {name} do not turn with their positions in a way that kvass knows; its KV can "
                    "be reused as a prefix only"
                )
    pool = TorchPool(spec, _TOKENS)
    pool.fill(0)
    workspace = TransformersWorkspace(model, pool)
    try:
        workspace.recompute(ids.tolist(), range(_TOKENS))
        before = [
            {n: a.copy() for n, a in workspace.arrays(g, 0, _TOKENS).items()} for g in range(len(spec.groups))
        ]
        rows = [1, 4, 5, _TOKENS - 1]
        log = workspace.recompute(ids[rows].tolist(), rows)[0]
        workspace.attention(ids[rows].tolist(), rows)
    except (TypeError, ValueError, RuntimeError, AttributeError, KvassError) as error:
        raise UnsupportedModelError(f"kvass cannot compute rows of KV anew in {name}: {error}") from error
    same = all(
        _near(a, workspace.arrays(g, 0, _TOKENS)[n], near_enough)
        for g, arrays in enumerate(before)
        for n, a in arrays.items()
    )
    if not same or not _near(log, torch.log_softmax(logits.float(), -1).numpy(), near_enough):
        raise UnsupportedModelError(f"{name} computes other KV when only rows of it are computed anew")


def _alone(model: Any, ids: torch.Tensor, position: int) -> list[tuple[Any, Any]]:
    """Keys and values `[heads, dim]` of a lone token at a position, by layer."""
    cache: Any = DynamicCache(config=model.config)
    model(input_ids=ids[None], position_ids=torch.tensor([[position]]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0, :, 0].float(), layer.values[0, :, 0].float()) for layer in cache.layers]


def _near(one: Any, other: Any, tolerance: float) -> bool:
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    return bool(np.linalg.norm(one - other) <= tolerance * max(1e-6, float(np.linalg.norm(one))))

"""How rows that lie scattered over a prompt attend: in blocks, each to no more keys than it may see."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvass.errors import UnsupportedModelError

_NAME = "kvass_rows"
_BLOCK = 64
"""Rows that attend together: so few that their scores stay in the processor's cache, so many that a product
is worth its start (32 to 64 take as long as each other, 16 a fifth more, all of 470 twice that)."""

_NOT_KNOWN = ("softcap", "position_bias", "s_aux")
"""What some models add to plain softmax attention."""

_running = threading.local()

Watch = Callable[[int, torch.Tensor, float], None]
"""Told of each layer, once its rows have attended: number, queries `[heads, rows, dim]`, scale of scores."""


class _Block(NamedTuple):
    """Rows `start` to `stop`: no keys but `first` to `last` are seen, those before `certain` by each."""

    start: int
    stop: int
    first: int
    certain: int
    last: int


class Sight:
    """Which keys each row of a pass may see, in the layers of one group."""

    def __init__(self, rows: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], window: int | None):
        """`rows`, `keys`: where in the prompt they stand, both rising, each row among the keys."""
        at, key_at = torch.from_numpy(rows)[:, None], torch.from_numpy(keys)
        seen = key_at <= at
        if window is not None:
            seen &= key_at > at - window
        self.mask = seen[None, None]
        """An explicit one, `[1, 1, rows, keys]`: what aligns a mask to the end of the keys would let rows
        that lie scattered see what comes after them."""
        self._hidden = ~seen
        self._blocks = []
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            certain, last = np.searchsorted(keys, [block[0], block[-1]], "right").tolist()
            first = 0
            if window is not None:
                first = certain = int(np.searchsorted(keys, block[0] - window, "right"))
            self._blocks.append(_Block(start, start + len(block), first, certain, last))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of `query` `[heads, rows, dim]` over `key` and `value` `[kv_heads, keys, dim]`, as
        `[rows, heads, v_dim]`. Query heads of one key head are rows of one matrix: no key is repeated."""
        (heads, rows, dim), groups = query.shape, key.shape[0]
        scaled, turned = query * scaling, key.transpose(1, 2)
        most = heads * min(rows, _BLOCK) * max(one.last - one.first for one in self._blocks)
        scores, weights = query.new_empty(most), query.new_empty(most)
        found = query.new_empty((rows, heads, value.shape[2]))
        for start, stop, first, certain, last in self._blocks:
            shape = (heads, stop - start, last - first)
            score, weight = (one[: shape[0] * shape[1] * shape[2]].view(shape) for one in (scores, weights))
            flat = (groups, -1, last - first)
            asking = scaled[:, start:stop].reshape(groups, -1, dim)
            torch.bmm(asking, turned[:, :, first:last], out=score.view(flat))
            hidden = self._hidden[start:stop, certain:last]
            score[:, :, certain - first :].masked_fill_(hidden, -torch.inf)
            torch.softmax(score, -1, out=weight)
            mixed = torch.bmm(weight.view(flat), value[:, first:last])
            found[start:stop] = mixed.view(heads, stop - start, -1).transpose(0, 1)
        return found


class _Pass(NamedTuple):
    sights: Mapping[int, Sight]
    watch: Watch | None


@contextmanager
def attending(model: Any, sights: Mapping[int, Sight], watch: Watch | None) -> Iterator[None]:
    """What the model computes meanwhile, in this thread, it computes with these sights of its layers."""
    before = model.config._attn_implementation
    model.config._attn_implementation, _running.now = _NAME, _Pass(sights, watch)
    try:
        yield
    finally:
        model.config._attn_implementation, _running.now = before, None


def _rows(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kwargs: Any
) -> Any:
    for name in _NOT_KNOWN:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"kvass does not compute attention with {name!r} in rows: not yet")
    now: _Pass | None = getattr(_running, "now", None)
    if now is None:  # another thread's call of the same model
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    sight = now.sights[module.layer_idx]
    if attention_mask is None or attention_mask.shape != sight.mask.shape:
        raise UnsupportedModelError("the model puts another mask in place of the one it was given")
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    found = sight.attend(query[0], key[0], value[0], scaling)[None]
    if now.watch is not None:
        now.watch(module.layer_idx, query[0], scaling)
    return found, None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _rows)


def weights(query: torch.Tensor, key: torch.Tensor, scaling: float, seen: torch.Tensor) -> torch.Tensor:
    """How much attention each key gets, a mean over rows, float32 `[heads, keys]`: of queries
    `[heads, rows, dim]` over keys `[kv_heads, keys, dim]`, of which each row sees some, `[rows, keys]`."""
    (heads, rows, dim), groups = query.shape, key.shape[0]
    scores = (query.reshape(groups, -1, dim) @ key.transpose(1, 2)).float().view(heads, rows, -1) * scaling
    return torch.softmax(scores.masked_fill_(~seen, -torch.inf), -1).mean(1)

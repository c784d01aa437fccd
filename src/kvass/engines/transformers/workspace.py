"""One prompt's KV in memory, over which a model runs in part: what it looks at, and rows computed anew."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvass.container import Array
from kvass.engines.transformers.pool_cache import TorchPool
from kvass.errors import InputError, UnsupportedModelError
from kvass.runner import Positions
from kvass.spec import KVSpec, LayerGroup

Floats = npt.NDArray[np.float32]

_WEIGHING = "kvass_weighing"
_watched = threading.local()


class TransformersWorkspace:
    """A `kvass.runner.Workspace` over a live transformers model. One thread at a time."""

    def __init__(self, model: Any, pool: TorchPool):
        """`pool`: in the dtype that the model computes KV in."""
        self._model = model
        self._pool = pool
        self._there = np.zeros(pool.capacity, bool)

    @property
    def spec(self) -> KVSpec:
        return self._pool.spec

    def arrays(self, group: int, start: int, stop: int) -> Mapping[str, Array]:
        found = self._pool.arrays(group, start, stop)
        self._there[start:stop] = True
        return found

    @torch.inference_mode()
    def recompute(
        self, tokens: Sequence[int], positions: Positions, *, layers: int | None = None, judged: int = 1
    ) -> npt.NDArray[np.float32]:
        logits = self._run(tokens, positions, layers, judged)
        if logits is None:
            return np.empty((0, self._model.config.vocab_size), np.float32)
        return np.asarray(torch.log_softmax(logits[0].float(), -1).numpy())

    @torch.inference_mode()
    def attention(
        self, tokens: Sequence[int], positions: Positions, *, layers: int | None = None, judged: int = 1
    ) -> Floats:
        rows: list[torch.Tensor] = []
        _watched.rows, _watched.judged = rows, judged
        try:
            with _implementation(self._model, _WEIGHING):
                self._run(tokens, positions, layers, 1)
        finally:
            _watched.rows = None
        return np.stack([one.float().numpy() for one in rows])

    def _run(self, tokens: Sequence[int], positions: Positions, layers: int | None, judged: int) -> Any:
        """Logits of the last rows; None where the model was left before its last layer."""
        place = np.asarray(positions, np.int64)
        ids = np.asarray(tokens, np.int64)
        if not len(place) or place.shape != ids.shape or (np.diff(place) <= 0).any() or place[0] < 0:
            raise InputError("rows to compute need a token each, and positions that rise")
        if place[-1] >= self._pool.capacity:
            raise InputError(f"position {place[-1]} is outside of a workspace of {self._pool.capacity}")
        self._there[place] = True
        if not self._there[: place[-1]].all():
            raise InputError(
                f"token {self._there.argmin()} before position {place[-1]} is neither in the workspace nor "
                "among the rows to compute"
            )
        rows = torch.from_numpy(place)
        cache = _RowsCache(self._pool, rows, layers)
        mask = as_taken(self.spec, [self._mask(group, rows) for group in self.spec.groups])
        try:
            return self._model(
                input_ids=torch.from_numpy(ids)[None], attention_mask=mask, position_ids=rows[None],
                past_key_values=cache, use_cache=True, logits_to_keep=judged,
            ).logits  # fmt: skip
        except _Enough:
            return None

    def _mask(self, group: LayerGroup, rows: torch.Tensor) -> torch.Tensor:
        """Which of all tokens up to the last row each row may see: an explicit one, since rows lie scattered
        and what aligns a mask to the end would let them see what comes after them."""
        keys = torch.arange(int(rows[-1]) + 1)
        mask = keys <= rows[:, None]
        if group.window is not None:
            mask &= keys > rows[:, None] - group.window
        return mask[None, None]


def as_taken(spec: KVSpec, masks: Sequence[torch.Tensor]) -> Any:
    """A mask for each layer group as models take them: by kind of layer, or where there is but one, alone."""
    made = {
        "full_attention" if group.window is None else "sliding_attention": mask
        for group, mask in zip(spec.groups, masks, strict=True)
    }
    return made if len(made) > 1 else masks[0]


class _Enough(Exception):
    """All layers that were asked for have their KV."""


class _RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values: new ones are written to their rows of a pool."""

    def __init__(self, pool: TorchPool, group: int, number: int, rows: torch.Tensor, enough: bool):
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys, self._values = pool.layer(group, number)
        self._rows, self._enough = rows, enough
        self._end = int(rows[-1]) + 1
        self.is_initialized = True
        self.dtype, self.device = self._keys.dtype, self._keys.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows; all keys and values up to the last of them."""
        self._keys[self._rows] = key_states[0].transpose(0, 1).to(self.dtype)
        self._values[self._rows] = value_states[0].transpose(0, 1).to(self.dtype)
        if self._enough:
            raise _Enough
        return (
            self._keys[: self._end].transpose(0, 1)[None],
            self._values[: self._end].transpose(0, 1)[None],
        )

    def get_seq_length(self) -> int:
        """Tokens before the first row that is computed."""
        return int(self._rows[0])


class _RowsCache(Cache):
    def __init__(self, pool: TorchPool, rows: torch.Tensor, layers: int | None):
        super().__init__(
            layers=[
                _RowsLayer(pool, *place, rows, layer == layers) for layer, place in pool.spec.places.items()
            ]
        )


def _weighing(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention as SDPA computes it; how much of it each key gets is noted, a mean over the last queries."""
    rows = getattr(_watched, "rows", None)
    if rows is not None:
        if kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
            raise UnsupportedModelError("kvass does not weigh attention with a soft cap or a bias: not yet")
        asking = query[:, :, -_watched.judged :]
        batch, heads, count, dim = asking.shape
        scaling = kwargs.get("scaling")
        grouped = asking.reshape(batch, key.shape[1], heads // key.shape[1] * count, dim)
        scores = (grouped @ key.transpose(2, 3)).float() * (dim**-0.5 if scaling is None else scaling)
        scores = scores.reshape(heads, count, -1).masked_fill(~attention_mask[0, :, -count:], -torch.inf)
        rows.append(torch.softmax(scores, -1).mean(1))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(_WEIGHING, _weighing)


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    """Run the model with that attention function."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before

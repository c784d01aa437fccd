"""One prompt's KV in memory, over which a model runs in part: what it looks at, and rows computed anew."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvass.container import Array
from kvass.engines.transformers.attending import Sight, Watch, attending, weights
from kvass.engines.transformers.pool_cache import TorchPool
from kvass.errors import InputError
from kvass.runner import Positions, Wait
from kvass.spec import KVSpec

Floats = npt.NDArray[np.float32]


class TransformersWorkspace:
    """A `kvass.runner.Workspace` over a live transformers model. One thread at a time computes over it."""

    def __init__(self, model: Any, pool: TorchPool):
        """`pool`: in the dtype that the model computes KV in."""
        self._model = model
        self._pool = pool
        self._there = np.zeros(pool.capacity, bool)
        self._wait: Wait | None = None

    @property
    def spec(self) -> KVSpec:
        return self._pool.spec

    def arrays(self, group: int, start: int, stop: int) -> Mapping[str, Array]:
        found = self._pool.arrays(group, start, stop)
        self._there[start:stop] = True
        return found

    def layer(self, number: int) -> Mapping[str, Array]:
        self._in_place(number, "k", "v")
        group, place = self.spec.places[number]
        held = self._pool.arrays(group, 0, self._pool.capacity)
        return {name: array[place] for name, array in held.items()}

    def arriving(self, wait: Wait | None) -> None:
        self._wait = wait

    def _in_place(self, layer: int, *names: str) -> None:
        if self._wait is not None:
            self._wait(layer, names)

    @torch.inference_mode()
    def recompute(
        self, tokens: Sequence[int], positions: Positions, *, layers: int | None = None, judged: int = 1
    ) -> npt.NDArray[np.float32]:
        logits = self._run(tokens, positions, last=layers, judged=judged)
        if logits is None:
            return np.empty((0, self._model.config.vocab_size), np.float32)
        return np.asarray(torch.log_softmax(logits[0].float(), -1).numpy())

    @torch.inference_mode()
    def attention(
        self,
        tokens: Sequence[int],
        positions: Positions,
        *,
        layers: Sequence[int] | None = None,
        judged: int = 1,
        exact: int | None = None,
    ) -> Floats:
        asked = list(self.spec.places) if layers is None else sorted(layers)
        found = []

        def watch(layer: int, query: torch.Tensor, scaling: float) -> None:
            if layer in asked:
                self._in_place(layer, "k")
                group, place = self.spec.places[layer]
                at = np.asarray(positions, np.int64)[-judged:]
                keys = np.arange(at[-1] + 1)
                seen = Sight(at, keys, self.spec.groups[group].window).mask[0, 0]
                seen &= torch.from_numpy(self._there[: len(keys)])
                held = self._pool.layer(group, place)[0][: len(keys)].transpose(0, 1)
                found.append(weights(query[:, -judged:], held, scaling, seen).numpy())
            if layer == asked[-1]:
                raise _Enough

        self._run(tokens, positions, watch=watch, exact=exact)
        return np.stack(found)

    def _run(
        self,
        tokens: Sequence[int],
        positions: Positions,
        *,
        last: int | None = None,
        judged: int = 1,
        watch: Watch | None = None,
        exact: int | None = None,
    ) -> Any:
        """Logits of the last rows; None where the model was left before its last layer."""
        place = np.asarray(positions, np.int64)
        ids = np.asarray(tokens, np.int64)
        if not len(place) or place.shape != ids.shape or (np.diff(place) <= 0).any() or place[0] < 0:
            raise InputError("rows to compute need a token each, and positions that rise")
        if place[-1] >= self._pool.capacity:
            raise InputError(f"position {place[-1]} is outside of a workspace of {self._pool.capacity}")
        keys = np.arange(place[-1] + 1)
        if exact is not None:
            keys = np.concatenate([keys[: min(exact, place[0])], place])
        self._there[place] = True
        if not self._there[keys].all():
            raise InputError(
                f"token {keys[self._there[keys].argmin()]} before position {place[-1]} is neither in the "
                "workspace nor among the rows to compute"
            )
        sights = [Sight(place, keys, group.window) for group in self.spec.groups]
        by_layer = {layer: sights[group] for layer, (group, _) in self.spec.places.items()}
        rows = torch.from_numpy(place)
        layers: list[Any] = [
            _RowsLayer(
                self._pool.layer(*at), rows, None if exact is None else len(keys) - len(rows),
                partial(self._in_place, layer, "k", "v"), layer == last,
            )
            for layer, at in self.spec.places.items()
        ]  # fmt: skip
        try:
            with attending(self._model, by_layer, watch):
                return self._model(
                    input_ids=torch.from_numpy(ids)[None],
                    attention_mask=as_taken(self.spec, [one.mask for one in sights]),
                    position_ids=rows[None], past_key_values=Cache(layers=layers), use_cache=True,
                    # indexes, not a number: a slice of the hidden states would have the head's weights copied
                    logits_to_keep=torch.arange(max(0, len(rows) - judged), len(rows)),
                ).logits  # fmt: skip
        except _Enough:
            return None


def as_taken(spec: KVSpec, masks: Sequence[torch.Tensor]) -> Any:
    """A mask for each layer group as models take them: by kind of layer, or where there is but one, alone."""
    made = {
        "full_attention" if group.window is None else "sliding_attention": mask
        for group, mask in zip(spec.groups, masks, strict=True)
    }
    return made if len(made) > 1 else masks[0]


class _Enough(Exception):
    """All that was asked for is there."""


class _RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values: new ones are written to their rows of a pool."""

    def __init__(
        self,
        held: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        exact: int | None,
        wait: Callable[[], None],
        enough: bool,
    ):
        """`held`: of all tokens, `[capacity, kv_heads, dim]`; `exact`: only so many of the first are seen."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._held, self._rows, self._exact, self._enough = held, rows, exact, enough
        self._wait = wait
        self.is_initialized = True
        self.dtype, self.device = held[0].dtype, held[0].device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows; all keys and values that any of them may see."""
        if self._exact is None:
            self._wait()  # before the rows are written: what arrives would come to lie over them
        seen = []
        for held, new in zip(self._held, (key_states[0], value_states[0]), strict=True):
            held[self._rows] = new.transpose(0, 1).to(held.dtype)
            if self._exact is None:
                found = held[: int(self._rows[-1]) + 1]
            else:
                found = torch.cat([held[: self._exact], held[self._rows]])
            seen.append(found.transpose(0, 1)[None])
        if self._enough:
            raise _Enough
        return seen[0], seen[1]

    def get_seq_length(self) -> int:
        """Tokens before the first row that is computed."""
        return int(self._rows[0])

"""A request's blocks as K and V by token and head: what engines share, translated on the way in and out."""

import numpy as np
import torch

from kvass.container import Array
from kvass.engines.vllm.blocks import Memory, first_written, request_blocks
from kvass.engines.vllm.canonical import pack, unpack
from kvass.engines.vllm.meta import BlockIds
from kvass.spec import numpy_dtype


class Canonical:
    """Reads blocks of host memory as `k` and `v`, and packs what was loaded. Both load and store."""

    def __init__(self, memory: Memory, blocks: BlockIds, fill: tuple[int, int] | None = None):
        """`fill`: a load fills tokens from the one to the other, and `finish` takes them over; None: the
        arrays hold what the engine has."""
        self._memory = memory
        self._blocks = blocks
        self._fill = fill
        self._held: dict[tuple[int, int, int], dict[str, Array]] = {}

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        if self._fill is None:
            return self._read(group, start, stop)
        spec = self._memory.plan.spec.groups[group]
        held = self._held.get((group, start, stop))
        if held is None:
            for layer in range(len(spec.layers)):  # raises where the engine has no place for it
                self._ids(group, layer, self._begin(group, start), stop)
            dtype = numpy_dtype(spec.dtype)
            held = {name: np.empty(spec.shape(name, stop - start), dtype) for name in ("k", "v")}
            self._held[group, start, stop] = held
        return held

    def _ids(self, group: int, layer: int, start: int, stop: int) -> list[int]:
        plan = self._memory.plan
        return request_blocks(plan, self._blocks, plan.engine_groups[group][layer], start, stop)

    def _begin(self, group: int, start: int) -> int:
        assert self._fill is not None
        return first_written(self._memory.plan, group, start, *self._fill)

    def _read(self, group: int, start: int, stop: int) -> dict[str, Array]:
        plan = self._memory.plan
        spec = plan.spec.groups[group]
        rows = [
            self._memory.groups[group][layer][self._ids(group, layer, start, stop)]
            for layer in range(len(spec.layers))
        ]
        count = (stop - start) // plan.block_tokens
        raw = torch.stack(rows).numpy().view(numpy_dtype(spec.dtype))
        packed = raw.reshape(len(rows), count, spec.kv_heads, 2, plan.block_tokens * spec.head_dim)
        k, v = unpack(plan.isa, packed, plan.block_tokens)
        return {"k": k, "v": v}

    def finish(self, tokens: int) -> None:
        """Pack what was loaded of the first `tokens` tokens into the engine's blocks."""
        plan = self._memory.plan
        for (group, start, stop), held in self._held.items():
            if stop > tokens:
                continue
            first = self._begin(group, start)
            k, v = (held[name][:, first - start :] for name in ("k", "v"))
            packed = pack(plan.isa, k, v, plan.block_tokens)
            raw = torch.from_numpy(packed.reshape(*packed.shape[:2], -1).view(np.uint8))
            for layer in range(len(raw)):
                self._memory.groups[group][layer][self._ids(group, layer, first, stop)] = raw[layer]

"""vLLM's KV memory as arrays: whole blocks in the engine's own packing, in place or through host memory."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Protocol

import torch

from kvass.container import Array
from kvass.engines.vllm.meta import BlockIds
from kvass.engines.vllm.plan import Plan
from kvass.errors import InputError, UnsupportedModelError
from kvass.spec import numpy_dtype


class LoadView(Protocol):
    """Where a load puts a request's KV."""

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]: ...

    def finish(self, tokens: int) -> None:
        """Bring what was loaded of the first `tokens` tokens into the engine's blocks."""


class Memory:
    """The blocks of every layer group, `[layers, blocks, bytes]`; a block of a layer is one run of bytes."""

    def __init__(self, plan: Plan, kv_caches: Mapping[str, torch.Tensor]):
        """Raises UnsupportedModelError where a layer's tensor is not what the plan says."""
        self.plan = plan
        self.groups: list[torch.Tensor | list[torch.Tensor]] = []
        for group, names in zip(plan.spec.groups, plan.names, strict=True):
            width = group.kv_heads * (group.head_dim + group.v_head_dim)
            size = plan.block_tokens * width * numpy_dtype(group.dtype).itemsize
            rows = [_rows(name, kv_caches.get(name), group.dtype, size) for name in names]
            self.groups.append(_joined(rows) if rows[0].device.type == "cpu" else rows)

    @property
    def in_place(self) -> bool:
        """Whether a chunk is one block of host memory, which needs no copy on its way."""
        one = self.plan.chunk_tokens == self.plan.block_tokens and not self.plan.canonical
        return one and all(isinstance(rows, torch.Tensor) for rows in self.groups)

    @property
    def on_host(self) -> bool:
        """Whether the engine computes in host memory."""
        return all(rows[0].device.type == "cpu" for rows in self.groups)

    def gather(self, group: int, blocks: list[int]) -> torch.Tensor:
        """Bytes `[layers, len(blocks), bytes]` of those blocks, on the device where they are."""
        rows = self.groups[group]
        if isinstance(rows, torch.Tensor):
            return rows[:, blocks]
        return torch.stack([row[blocks] for row in rows])

    def scatter(self, group: int, blocks: list[int], source: torch.Tensor) -> None:
        """Write what `gather` reads; `source` may lie on the host."""
        rows = self.groups[group]
        for layer, part in enumerate(source):
            row = rows[layer]
            row[blocks] = part.to(row.device, non_blocking=True)


def _rows(name: str, tensor: torch.Tensor | None, dtype: str, size: int) -> torch.Tensor:
    """A layer's tensor as bytes `[blocks, bytes]` on the same memory. Raises UnsupportedModelError."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedModelError(f"vLLM gives no single tensor for the KV of {name}: not yet")
    if str(tensor.dtype) != f"torch.{dtype}" or tensor.dim() < 2:
        raise UnsupportedModelError(f"the KV of {name} is {tensor.dtype} {tuple(tensor.shape)}: not yet")
    block = tensor[0]
    extent = 1 + sum((n - 1) * step for n, step in zip(block.shape, block.stride(), strict=True))
    if not extent == block.numel() == size // block.element_size():
        raise UnsupportedModelError(
            f"a block of {name} is not one run of {size} bytes (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): kvass does not know this layout"
        )
    start = tensor.storage_offset() * tensor.element_size()
    stride = tensor.stride(0) * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), start, (tensor.shape[0], size), (stride, 1))


def _joined(rows: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Layers as one tensor where they lie at equal distances in one allocation."""
    steps = {after.storage_offset() - before.storage_offset() for before, after in pairwise(rows)}
    bases = {row.untyped_storage().data_ptr() for row in rows}
    if len(bases) > 1 or len(steps) > 1 or any(step <= 0 for step in steps):
        return rows
    first, step = rows[0], steps.pop() if steps else 0
    shape, stride = (len(rows), *first.shape), (step, *first.stride())
    raw = torch.empty(0, dtype=torch.uint8)
    return raw.set_(first.untyped_storage(), first.storage_offset(), shape, stride)


def request_blocks(plan: Plan, blocks: BlockIds, number: int, start: int, stop: int) -> list[int]:
    """Ids of the blocks of tokens `start` to `stop` in a vLLM group.

    Raises InputError where one of them is not in the engine (any more).
    """
    found = blocks[number][start // plan.block_tokens : -(-stop // plan.block_tokens)]
    if len(found) * plan.block_tokens < stop - start or not all(found):  # block 0 stands for none
        raise InputError(f"tokens {start}..{stop} of KV group {number} are not in the engine's memory")
    return found


def first_written(plan: Plan, group: int, chunk: int, start: int, length: int) -> int:
    """The first token of a chunk whose block a load of tokens `start` to `length` may and must write."""
    needed = plan.spec.groups[group].first_needed(length) // plan.block_tokens * plan.block_tokens
    return max(chunk, start, needed)


class InPlace:
    """A request's blocks as arrays on the engine's own memory: one block a chunk. Both load and store."""

    def __init__(self, memory: Memory, blocks: BlockIds):
        self._memory = memory
        self._blocks = blocks
        self._raw = [rows.numpy() for rows in memory.groups if isinstance(rows, torch.Tensor)]

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        plan = self._memory.plan
        (block,) = request_blocks(plan, self._blocks, plan.engine_groups[group][0], start, stop)
        spec = plan.spec.groups[group]
        rows = self._raw[group][:, block].view(numpy_dtype(spec.dtype))
        return {"kv": rows.reshape(spec.shape("kv", stop - start))}

    def finish(self, tokens: int) -> None:
        """Nothing: what was loaded is in place."""


class Staged:
    """A request's blocks through host memory, several to a chunk. On a GPU (not tested): pinned."""

    def __init__(self, memory: Memory, blocks: BlockIds, start: int, length: int):
        """The load fills tokens `start` to `length`; blocks before them are others' or outside a window."""
        self._memory = memory
        self._blocks = blocks
        self._start = start
        self._length = length
        self._held: dict[tuple[int, int, int], torch.Tensor] = {}

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        plan = self._memory.plan
        rows = self._held.get((group, start, stop))
        if rows is None:
            self._ids(group, start, stop)  # raises where the engine has no place for it
            first = self._memory.groups[group][0]
            shape = (len(plan.names[group]), (stop - start) // plan.block_tokens, first.shape[-1])
            rows = torch.empty(shape, dtype=torch.uint8, pin_memory=first.device.type == "cuda")
            self._held[group, start, stop] = rows
        return _typed(plan, group, rows)

    def _ids(self, group: int, start: int, stop: int) -> list[int]:
        plan = self._memory.plan
        begin = first_written(plan, group, start, self._start, self._length)
        return request_blocks(plan, self._blocks, plan.engine_groups[group][0], begin, stop)

    def finish(self, tokens: int) -> None:
        """Copy into the engine what was loaded; waits until the device has it."""
        device = None
        for (group, start, stop), rows in self._held.items():
            if stop <= tokens:
                wanted = self._ids(group, start, stop)
                self._memory.scatter(group, wanted, rows[:, rows.shape[1] - len(wanted) :])
                device = self._memory.groups[group][0].device
        if device is not None:
            _wait_for(device)


class Copied:
    """Whole chunks of a request, copied out of the engine when this is made: what a store reads from."""

    def __init__(self, memory: Memory, blocks: BlockIds, start: int, stop: int):
        """Chunks from `start` on. Those before, and those that are not in the engine, raise InputError."""
        self._memory = memory
        self._held: dict[tuple[int, int], torch.Tensor] = {}
        plan = memory.plan
        device = None
        for group, begin in _chunks(plan, start, stop):
            try:
                wanted = request_blocks(
                    plan, blocks, plan.engine_groups[group][0], begin, begin + plan.chunk_tokens
                )
            except InputError:
                continue
            rows = memory.gather(group, wanted)  # a copy: of its own where it already lies on the host
            device = rows.device
            if device.type != "cpu":
                host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
                rows = host.copy_(rows, non_blocking=True)
            self._held[group, begin] = rows
        if device is not None:
            _wait_for(device)

    def arrays(self, group: int, start: int, stop: int) -> dict[str, Array]:
        rows = self._held.get((group, start))
        if rows is None:
            raise InputError(f"tokens {start}..{stop} of group {group} are not in the engine's memory")
        return _typed(self._memory.plan, group, rows)


def _typed(plan: Plan, group: int, rows: torch.Tensor) -> dict[str, Array]:
    """Blocks `[layers, blocks, bytes]` as the array of one chunk."""
    spec = plan.spec.groups[group]
    typed = rows.numpy().reshape(len(rows), -1).view(numpy_dtype(spec.dtype))
    return {"kv": typed.reshape(spec.shape("kv", rows.shape[1] * plan.block_tokens))}


def _chunks(plan: Plan, start: int, stop: int) -> Iterator[tuple[int, int]]:
    for group in range(len(plan.spec.groups)):
        for begin in range(start, stop, plan.chunk_tokens):
            yield group, begin


def _wait_for(device: torch.device) -> None:
    """Until the copies asked for on a GPU's stream are done; host copies are done already."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).record_event().synchronize()

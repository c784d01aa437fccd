"""How vLLM's CPU kernels pack a block, and how to get K and V by token and head out of it and back.

A block of one layer holds for each head its K plane, then its V plane, `block * head_dim` elements each.
Measured with the kernel that fills them, for `vec` (AVX-512 without AMX) and `vec16` in all dtypes, and for
`amx` in 16-bit dtypes; `check_packing` measures again whenever an engine starts.
"""

from typing import Final

import numpy as np
import torch

from kvass.container import Array
from kvass.errors import UnsupportedModelError
from kvass.spec import LayerGroup

ISAS: Final = ("vec", "vec16", "amx")
"""Those whose packing is known."""

_TILE = 16


def pack(isa: str, k: Array, v: Array, block: int) -> Array:
    """Blocks `[layers, blocks, heads, 2, block * dim]` of `k` and `v` `[layers, tokens, heads, dim]`."""
    layers, tokens, heads, dim = k.shape
    count = tokens // block
    if isa == "amx":
        keys = k.reshape(layers, count, block // _TILE, _TILE, heads, dim // 2, 2)
        values = v.reshape(layers, count, block // 2, 2, heads, dim // _TILE, _TILE)
        planes = keys.transpose(0, 1, 4, 2, 5, 3, 6), values.transpose(0, 1, 4, 5, 2, 6, 3)
    else:
        keys, values = (one.reshape(layers, count, block, heads, dim) for one in (k, v))
        planes = keys.transpose(0, 1, 3, 4, 2), values.transpose(0, 1, 3, 2, 4)
    packed = np.empty((layers, count, heads, 2, block * dim), k.dtype)
    for place, plane in enumerate(planes):
        packed[:, :, :, place] = plane.reshape(layers, count, heads, block * dim)
    return packed


def unpack(isa: str, packed: Array, block: int) -> tuple[Array, Array]:
    """What `pack` was given: `k` and `v`, each C-contiguous."""
    layers, count, heads, _, size = packed.shape
    dim = size // block
    k, v = packed[:, :, :, 0], packed[:, :, :, 1]
    if isa == "amx":
        k = k.reshape(layers, count, heads, block // _TILE, dim // 2, _TILE, 2).transpose(0, 1, 3, 5, 2, 4, 6)
        v = v.reshape(layers, count, heads, dim // _TILE, block // 2, _TILE, 2).transpose(0, 1, 4, 6, 2, 3, 5)
    else:
        k = k.reshape(layers, count, heads, dim, block).transpose(0, 1, 4, 2, 3)
        v = v.reshape(layers, count, heads, block, dim).transpose(0, 1, 3, 2, 4)
    shape = (layers, count * block, heads, dim)
    return np.ascontiguousarray(k).reshape(shape), np.ascontiguousarray(v).reshape(shape)


def check_packing(isa: str, group: LayerGroup, block: int) -> None:
    """Have vLLM's kernel fill a block, and see whether it packs as we believe.

    Raises UnsupportedModelError where it does not: this vLLM, or this machine, packs another way.
    """
    from vllm import _custom_ops as ops

    heads, dim, dtype = group.kv_heads, group.head_dim, getattr(torch, group.dtype)
    if group.v_head_dim != dim:
        raise UnsupportedModelError("KV shared with other engines, with K and V of different widths: not yet")
    random = torch.Generator().manual_seed(7)
    k, v = (torch.rand((block, heads, dim), generator=random).to(dtype) for _ in range(2))
    cache = torch.zeros((2, heads, 2 * block, dim), dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    slots = torch.arange(block, 2 * block)
    ops.cpu_attn_reshape_and_cache(
        k, v, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    filled = cache[1:].reshape(1, 1, heads, 2, block * dim)
    wanted = pack(isa, _bits(k, bits), _bits(v, bits), block)
    if not np.array_equal(filled.view(bits).numpy(), wanted):
        raise UnsupportedModelError(
            f"vLLM packs {group.dtype} KV for {isa} in a way that kvass does not know, so it cannot be "
            "shared with other engines; leave shared_numerics out"
        )


def _bits(tensor: torch.Tensor, bits: torch.dtype) -> Array:
    found: Array = tensor.contiguous().view(bits).numpy()[None]
    return found

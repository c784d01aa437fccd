"""What KV this vLLM keeps, where and in which layout: from its configuration, equal in every process."""

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import vllm.envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVQuantMode,
    SlidingWindowSpec,
)

from kvass.config import Settings
from kvass.engines.vllm.canonical import ISAS
from kvass.errors import ConfigError, UnsupportedModelError
from kvass.spec import KVSpec, LayerGroup

_LEAST_CHUNK: Final = 64
"""Blocks of fewer tokens are stored several to a chunk."""

_LAYER_NUMBER: Final = re.compile(r"\.(\d+)\.")
_DTYPES: Final = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Plan:
    """The layers by vLLM's KV cache group, and how their blocks are stored.

    `names[i]`: vLLM's names of the layers of `spec.groups[i]`; `engine_groups[i]`: for each of these layers
    the index of the vLLM group whose block table it uses. `isa`: how the CPU kernel packs a block, empty
    elsewhere. A chunk is `chunk_tokens // block_tokens` whole blocks.
    """

    spec: KVSpec
    names: tuple[tuple[str, ...], ...]
    engine_groups: tuple[tuple[int, ...], ...]
    block_tokens: int
    chunk_tokens: int
    layout: str
    numerics: str
    isa: str
    ranks: int

    @property
    def canonical(self) -> bool:
        """Whether KV is stored as K and V by token and head, and not as the engine packs it."""
        return self.layout == "canonical"

    @property
    def windowed(self) -> bool:
        """Whether a shorter hit needs other blocks than a longer one: vLLM cannot recompute a part then."""
        return len(set(sum(self.engine_groups, ()))) > 1 or any(g.window for g in self.spec.groups)


def make_plan(config: VllmConfig, kv: KVCacheConfig, settings: Settings) -> Plan:
    """Look at what vLLM is about to allocate, and settle how it is stored: `chunk_tokens` says what a chunk
    should have about; with `shared_numerics`, the layout is the one that engines share.

    Raises UnsupportedModelError for anything that is not plain attention KV, by name, and ConfigError where
    chunks that engines share are not whole blocks.
    """
    _refuse_parallel(config)
    _refuse_features(config)
    found = _groups(kv)
    blocks = {spec.block_size for spec, *_ in found}
    if len(blocks) > 1:
        raise UnsupportedModelError(f"KV groups with blocks of different sizes ({sorted(blocks)}): not yet")
    block = blocks.pop()
    first = found[0][0]
    backend, device = _backend(config, first), current_platform.device_type
    isa = _isa(config, first) if current_platform.is_cpu() else ""
    ranks = config.parallel_config.tensor_parallel_size
    where = isa or str(current_platform.get_device_capability())
    chunk_tokens, shared = settings.chunk_tokens, settings.shared_numerics
    if shared:
        _refuse_shared(config, isa, block, chunk_tokens)
        merged: dict[Any, list[tuple[int, str, int]]] = {}
        for spec, names, number in found:
            alike = msgspec.structs.replace(_layer_group(spec, names), layers=())
            merged.setdefault(alike, []).extend((_number(name), name, number) for name in names)
        parts = [(group, sorted(layers)) for group, layers in merged.items()]
    else:
        parts = [
            (_layer_group(spec, names), [(_number(name), name, number) for name in names])
            for spec, names, number in found
        ]
    parts.sort(key=lambda part: (part[0].window is not None, part[1]))
    groups = [msgspec.structs.replace(group, layers=tuple(n for n, *_ in layers)) for group, layers in parts]
    layout = f"vllm/{device}/{isa or backend}/{kv.kv_cache_layout}/block{block}/tp{ranks}"
    whole = block if block >= _LEAST_CHUNK else max(1, round(chunk_tokens / block)) * block
    return Plan(
        spec=KVSpec(groups=tuple(groups)),
        names=tuple(tuple(name for _, name, _ in layers) for _, layers in parts),
        engine_groups=tuple(tuple(number for *_, number in layers) for _, layers in parts),
        block_tokens=block,
        chunk_tokens=chunk_tokens if shared else whole,
        layout="canonical" if shared else layout,
        numerics=f"shared:{shared}"
        if shared
        else f"vllm/{backend}/{groups[0].dtype}/{device}/{where}{_precision()}",
        isa=isa,
        ranks=ranks,
    )


def _groups(kv: KVCacheConfig) -> list[tuple[Any, tuple[str, ...], int]]:
    """vLLM's KV groups: spec, names of the layers that have KV of their own, and number."""
    allocated = {name for tensor in kv.kv_cache_tensors for name in tensor.layers}
    found = []
    for number, group in enumerate(kv.kv_cache_groups):
        names = tuple(name for name in group.layer_names if name in allocated)
        if not names:
            raise UnsupportedModelError(f"KV group {number} has no layers with KV of their own: not yet")
        if group.is_eagle_group or group.host_resident or group.role != KVCacheGroupRole.DEFAULT:
            raise UnsupportedModelError(f"the KV group of {names[0]} has a role of its own: not yet")
        found.append((group.kv_cache_spec, names, number))
    if not found:
        raise UnsupportedModelError("this model keeps no KV in vLLM")
    return found


def _refuse_shared(config: VllmConfig, isa: str, block: int, chunk_tokens: int) -> None:
    model = config.model_config
    if isa not in ISAS:
        raise UnsupportedModelError(
            f"how vLLM packs KV for {isa or 'this device'} is not known, so it cannot be shared with other "
            "engines; leave shared_numerics out"
        )
    if config.parallel_config.tensor_parallel_size > 1:
        raise UnsupportedModelError("KV shared with other engines, and tensor parallelism: not yet")
    if model.quantization is not None or model.hf_overrides:
        raise UnsupportedModelError("KV shared with other engines, of a model that vLLM alters: not yet")
    if chunk_tokens % block:
        raise ConfigError(
            f"chunk_tokens is {chunk_tokens}, no multiple of vLLM's block of {block} tokens; engines share "
            "whole blocks, so choose one that is, in all of them"
        )


def _refuse_parallel(config: VllmConfig) -> None:
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedModelError(f"{name} above 1: not yet")


def _refuse_features(config: VllmConfig) -> None:
    model = config.model_config
    if model.is_encoder_decoder or model.runner_type != "generate":
        raise UnsupportedModelError("kvass keeps the KV of decoders that generate text, not of this model")
    cache_dtype = str(config.cache_config.cache_dtype)
    if cache_dtype not in ("auto", *_DTYPES):
        raise UnsupportedModelError(f"kv_cache_dtype {cache_dtype}, whose scales lie elsewhere: not yet")
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        raise UnsupportedModelError(f"speculative decoding with {speculative.method}: not yet")


def _layer_group(spec: Any, names: tuple[str, ...]) -> LayerGroup:
    """One vLLM group as a layer group. Exact types: a subclass may mean anything by its blocks."""
    kind = type(spec).__name__
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        raise UnsupportedModelError(f"layers of kind {kind} (such as {names[0]}): not yet")
    odd = {
        "quantised KV": spec.kv_quant_mode != KVQuantMode.NONE,
        "chunked attention": getattr(spec, "attention_chunk_size", None) is not None,
        "attention to later tokens": getattr(spec, "non_causal", False),
        "more than one token a state": spec.tokens_per_state != 1,
        "state beside K and V": spec.state_content_bytes is not None or spec.num_head_slots is not None,
    }
    for what, is_so in odd.items():
        if is_so:
            raise UnsupportedModelError(f"{what} (in {names[0]}): not yet")
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"KV of dtype {dtype} (in {names[0]}): not yet")
    window = spec.sliding_window if type(spec) is SlidingWindowSpec else None
    return LayerGroup(
        kind="sliding" if window else "attention", layers=tuple(map(_number, names)), dtype=dtype,
        kv_heads=spec.num_kv_heads, head_dim=spec.head_size, v_head_dim=spec.head_size_v, window=window,
    )  # fmt: skip


def _number(name: str) -> int:
    found = _LAYER_NUMBER.findall(name)
    if len(found) != 1:
        raise UnsupportedModelError(f"kvass cannot tell which layer {name!r} is")
    return int(found[0])


def _backend(config: VllmConfig, spec: Any) -> str:
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        chosen = get_attn_backend(spec.head_size, model.dtype, config.cache_config.cache_dtype)
    return str(chosen.get_name())


def _precision() -> str:
    """The precision of fp32 products, where less than all of it was asked for."""
    asked = vllm.envs.VLLM_FLOAT32_MATMUL_PRECISION
    return "" if asked == "highest" else f"/{asked}"


def _isa(config: VllmConfig, spec: Any) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError as error:
        raise UnsupportedModelError(f"this vLLM does not say how it packs KV: {error}") from error
    cache_dtype = config.cache_config.cache_dtype
    return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache_dtype))

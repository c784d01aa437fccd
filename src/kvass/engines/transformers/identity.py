"""What a live transformers model is: its KV spec, and the namespace in which its KV may be reused."""

import json
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvass.errors import UnsupportedModelError
from kvass.keys import Namespace, tenant_digest
from kvass.spec import KVSpec, LayerGroup, RopeSpec

_REFUSED_ROPES = ("dynamic", "longrope")
"""Their keys depend on the length of the call that computed them."""

_NOT_IDENTITY = {
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype",
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id",
    "problem_type",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chunk_size_feed_forward",
    "attn_implementation", "_attn_implementation", "tokenizer_class",
}  # fmt: skip


_HANDLED = (DynamicLayer, DynamicSlidingWindowLayer)


class Identity(NamedTuple):
    """The namespace of a model in its present state, and what was looked at to find it."""

    namespace: Namespace
    fingerprint: tuple[object, ...]


def identify(
    model: PreTrainedModel, *, tenant_salt: str = "", epoch: str = "", known: Identity | None = None
) -> Identity:
    """The model's namespace. Cheap when nothing changed since `known`; else the weights are hashed anew.

    `epoch` must change when weights are overwritten behind PyTorch's version counters (`tensor.data`).
    Raises UnsupportedModelError, naming the layer kind, RoPE or device that is not handled yet.
    """
    fingerprint = (*_fingerprint(model), epoch, tenant_salt)
    if known is not None and known.fingerprint == fingerprint:
        return known
    config = _text_config(model)
    spec = kv_spec(model)
    namespace = Namespace(
        model=str(getattr(config, "_name_or_path", "") or type(model).__name__),
        weights=_weights_digest(model, epoch),
        config=_config_digest(config),
        adapter=_adapter_digest(model),
        spec=spec,
        tenant=tenant_digest(tenant_salt),
        numerics=_numerics(model, spec),
    )
    return Identity(namespace, fingerprint)


def kv_spec(model: PreTrainedModel) -> KVSpec:
    """The spec, found by running two tokens and looking at the cache that the model fills.

    Raises UnsupportedModelError for layer kinds and RoPEs that are not handled yet, by name.
    """
    config = _text_config(model)
    _refuse_unsupported(config)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[0, 1]], device=model.device), past_key_values=cache, use_cache=True)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or type(layer) not in _HANDLED:
            raise UnsupportedModelError(
                f"layer {number} of {type(model).__name__} keeps its state in a {type(layer).__name__}; "
                "kvass handles full and sliding-window attention so far"
            )
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.dim() != 4 or keys.shape[0] != 1 or keys.shape[2] != 2:
            raise UnsupportedModelError(
                f"layer {number} of {type(model).__name__} does not keep its own keys and values "
                "(shared or empty KV); kvass does not handle that yet"
            )
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        rope = _rope(config, number, keys.shape[3])
        groups.setdefault(
            (window, keys.shape[1], keys.shape[3], values.shape[3], str(keys.dtype), json.dumps(rope)), []
        ).append(number)
    if not groups:
        raise UnsupportedModelError(f"{type(model).__name__} keeps no keys and values")
    made = []
    for (window, heads, dim, v_dim, dtype, rope), layers in sorted(groups.items(), key=_full_first):
        made.append(
            LayerGroup(
                kind="sliding" if window else "attention", layers=tuple(layers), kv_heads=heads, head_dim=dim,
                v_head_dim=v_dim, dtype=dtype.removeprefix("torch."), window=window,
                rope=RopeSpec(**json.loads(rope)) if rope != "null" else None,
            )
        )  # fmt: skip
    return KVSpec(groups=tuple(made))


def _full_first(item: tuple[tuple[Any, ...], list[int]]) -> tuple[bool, list[int]]:
    return item[0][0] is not None, item[1]


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _refuse_unsupported(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type} is an encoder-decoder; kvass handles causal models")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{config.model_type} uses multi-head latent attention (MLA): not yet")
    for kind in set(getattr(config, "layer_types", None) or ()):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{config.model_type} has layers of kind {kind!r}: not yet")
    for parameters in _rope_parameters(config).values():
        kind = parameters.get("rope_type", "default")
        if kind in _REFUSED_ROPES:
            raise UnsupportedModelError(
                f"{config.model_type} uses RoPE {kind!r}, whose keys depend on the call's length: not yet"
            )


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """RoPE parameters by layer type; a model with one RoPE has it under the empty name."""
    found = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in found.values()):
        return {name: value for name, value in found.items() if value}
    return {"": found} if found else {}


def _rope(config: Any, layer: int, head_dim: int) -> dict[str, Any] | None:
    by_type = _rope_parameters(config)
    types = getattr(config, "layer_types", None)
    parameters = by_type.get(types[layer] if types else "", by_type.get(""))
    if parameters is None:
        return None
    rest = {
        k: v for k, v in parameters.items() if k not in ("rope_type", "rope_theta", "partial_rotary_factor")
    }
    return {
        "kind": parameters.get("rope_type", "default"),
        "theta": float(parameters["rope_theta"]),
        "rotary_dim": int(head_dim * parameters.get("partial_rotary_factor", 1.0)),
        "parameters": rest,
    }


def _numerics(model: PreTrainedModel, spec: KVSpec) -> str:
    attention = getattr(_text_config(model), "_attn_implementation", None) or "eager"
    return f"transformers/{attention}/{spec.groups[0].dtype}/{model.device.type}"


def _config_digest(config: Any) -> str:
    kept = {k: v for k, v in config.to_dict().items() if k not in _NOT_IDENTITY}
    return blake3(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


# -- weights and adapters ---------------------------------------------------------------------------


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name or "lora_magnitude" in name


def _plain(name: str) -> str:
    """A weight's name as it was before peft wrapped the model."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _fingerprint(model: PreTrainedModel) -> tuple[object, ...]:
    seen: list[object] = [id(model), str(model.dtype), _text_config(model)._attn_implementation]
    for name, tensor in model.state_dict(keep_vars=True).items():
        version = 0 if tensor.is_inference() else tensor._version
        seen.append((name, tensor.data_ptr(), version, tuple(tensor.shape)))
    seen.append(json.dumps(_adapter_state(model), sort_keys=True))
    return tuple(seen)


def _hash_tensor(hasher: Any, name: str, tensor: torch.Tensor) -> None:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    label = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    hasher.update(len(label).to_bytes(4, "little") + label)
    hasher.update(raw.data)


def _weights_digest(model: PreTrainedModel, epoch: str) -> str:
    hasher = blake3(epoch.encode(), max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items(), key=lambda item: _plain(item[0])):
        if not _is_adapter(name):
            _hash_tensor(hasher, _plain(name), tensor)
    return hasher.hexdigest()


def _adapter_state(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Which adapters act, module by module, and how; empty when none does."""
    acting = []
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if not isinstance(active, list | tuple) or getattr(module, "disable_adapters", True) is True:
            continue
        merged = list(getattr(module, "merged_adapters", ()))
        names = [one for one in active if one in _adapter_names(module)]
        if names or merged:
            scaling = {one: getattr(module, "scaling", {}).get(one) for one in names}
            acting.append({"module": _plain(name), "active": names, "merged": merged, "scaling": scaling})
    return acting


def _adapter_names(module: torch.nn.Module) -> set[str]:
    found: set[str] = set()
    for kind in ("lora_A", "lora_embedding_A", "modules_to_save"):
        holder = getattr(module, kind, None)
        if holder is not None:
            found |= set(holder.keys())
    return found


def _adapter_digest(model: PreTrainedModel) -> str:
    state = _adapter_state(model)
    if not state:
        return ""
    acting = {name for entry in state for name in entry["active"]}
    hasher = blake3(json.dumps(state, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if _is_adapter(name) and acting & set(name.split(".")):
            _hash_tensor(hasher, _plain(name), tensor)
    return hasher.hexdigest()

"""What KV a live transformers model keeps: its layers, windows and RoPE, and which models are refused."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvass.engines.transformers.adapters import plain_model
from kvass.errors import UnsupportedModelError
from kvass.spec import KVSpec, LayerGroup, RopeSpec

_ROPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Those whose rotation of a token is a function of its position alone."""

_PROBE = 4
"""Tokens to run, the first two equal: see `_turns`."""


def kv_spec(model: torch.nn.Module) -> KVSpec:
    """The spec, found by running a few tokens and looking at the cache that the model fills.

    Raises UnsupportedModelError for layer kinds and RoPEs that are not handled yet, by name, and for models
    whose KV of a token is seen to depend on more than the tokens up to it.
    """
    model = plain_model(model)
    config = model.config
    refuse_unsupported(model)
    one, two, three = [token for token in range(4) if token != getattr(config, "pad_token_id", None)][:3]
    with _evaluating(model):
        whole, halves = _run(model, [one, one, two, three]), _run(model, [one, one], [two, three])
    if len(whole.layers) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{config.model_type} keeps KV for {len(whole.layers)} of its {config.num_hidden_layers} layers "
            "(the others share it); kvass does not handle that yet"
        )
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number in range(len(whole.layers)):
        layer = whole.layers[number]
        keys, values = _held(config, number, layer)
        again = _held(config, number, halves.layers[number])
        if not _alike(keys, again[0]) or not _alike(values, again[1]):
            raise UnsupportedModelError(
                f"layer {number} of {config.model_type} computes other KV when the same tokens come in two "
                "calls: its KV cannot be reused"
            )
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        rope = _rope(config, number, keys.shape[3]) if _turns(keys) else None
        groups.setdefault(
            (window, keys.shape[1], keys.shape[3], values.shape[3], str(keys.dtype), json.dumps(rope)), []
        ).append(number)
    made = []
    for (window, heads, dim, v_dim, dtype, rope), layers in sorted(groups.items(), key=_full_first):
        made.append(
            LayerGroup(
                kind="sliding" if window else "attention", layers=tuple(layers), kv_heads=heads, head_dim=dim,
                v_head_dim=v_dim, dtype=dtype.removeprefix("torch."), window=window,
                rope=_rope_spec(rope),
            )
        )  # fmt: skip
    return KVSpec(groups=tuple(made))


def _full_first(item: tuple[tuple[Any, ...], list[int]]) -> tuple[bool, list[int]]:
    return item[0][0] is not None, item[1]


# -- the probe --------------------------------------------------------------------------------------


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No dropout, gradients, autocast or random numbers, whatever the caller is in the middle of."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for module in training:
            module.training = True


def _run(model: PreTrainedModel, *calls: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for tokens in calls:
        ids = torch.tensor([tokens], device=model.device)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def _held(config: Any, number: int, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UnsupportedModelError(
            f"layer {number} of {config.model_type} keeps its state in a {type(layer).__name__}; "
            "kvass handles full and sliding-window attention so far"
        )
    rows = _PROBE
    if isinstance(layer, DynamicSlidingWindowLayer):
        rows = min(rows, layer.sliding_window - 1)
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.dim() != 4 or keys.shape[0] != 1 or keys.shape[2] != rows:
        raise UnsupportedModelError(
            f"layer {number} of {config.model_type} does not keep its own keys and values (shared or empty "
            "KV); kvass does not handle that yet"
        )
    return keys, values


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for what rounding does: another order of sums, through all layers."""
    apart = torch.linalg.vector_norm(one.double() - other.double())
    return bool(
        apart <= min(0.25, 1000 * torch.finfo(one.dtype).eps) * torch.linalg.vector_norm(one.double())
    )


def _turns(keys: torch.Tensor) -> bool:
    """Whether keys `[1, heads, tokens, dim]` of the probe depend on position.

    Its first two tokens are equal, so that attention over both gives what the first alone gives: their
    keys are equal in every layer, unless something turns them.
    """
    if keys.shape[2] < _PROBE:
        return True  # a window so short that the first two are gone
    first, second = keys[0, :, 0].double(), keys[0, :, 1].double()
    return bool(torch.linalg.vector_norm(first - second) > 1e-3 * torch.linalg.vector_norm(first))


# -- what is refused --------------------------------------------------------------------------------


def refuse_unsupported(model: PreTrainedModel) -> None:
    config = model.config
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; kvass handles causal models")
    if not model.can_generate():
        raise UnsupportedModelError(f"{type(model).__name__} does not generate text")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError(f"{kind} is made of several models (multimodal?): not yet")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{kind} attends in both directions; kvass handles causal models")
    if not {"past_key_values", "cache"} & inspect.signature(model.forward).parameters.keys():
        raise UnsupportedModelError(f"{kind} keeps no keys and values (a recurrent model?): not yet")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{kind} uses multi-head latent attention (MLA): not yet")
    for layer_kind in sorted(set(getattr(config, "layer_types", None) or ())):
        if layer_kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{kind} has layers of kind {layer_kind!r}: not yet")
    for parameters in _rope_parameters(config).values():
        rope = parameters.get("rope_type", "default")
        if rope not in _ROPES:
            raise UnsupportedModelError(
                f"{kind} uses RoPE {rope!r}, whose keys may depend on the length of a call: not yet"
            )
    if getattr(model, "is_quantized", False):
        raise UnsupportedModelError(f"{kind} is quantised; kvass handles plain weights so far")
    attention = config._attn_implementation or "eager"
    function = ALL_ATTENTION_FUNCTIONS.get(attention)
    if attention != "eager" and not ships(function):
        raise UnsupportedModelError(
            f"the attention implementation {attention!r} is not one of transformers' own: its name does not "
            "say what it computes"
        )


def ships(function: object) -> bool:
    """Whether a function is part of transformers, so that its name says what it does."""
    return str(getattr(function, "__module__", "")).startswith("transformers.")


# -- RoPE -------------------------------------------------------------------------------------------


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """RoPE parameters by layer type; a model with one RoPE has it under the empty name."""
    found = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in found.values()):
        return {name: value for name, value in found.items() if value}
    return {"": found} if found else {}


def _rope_spec(text: str) -> RopeSpec | None:
    """Checked and in one form, so that what is written is what is read again: `[1]` becomes `[1.0]`."""
    try:
        return msgspec.json.decode(text, type=RopeSpec | None)
    except msgspec.ValidationError as error:
        raise UnsupportedModelError(f"the model's RoPE parameters cannot be stored: {error}") from error


def _rope(config: Any, layer: int, head_dim: int) -> dict[str, Any] | None:
    by_type = _rope_parameters(config)
    types = getattr(config, "layer_types", None)
    parameters = by_type.get(types[layer] if types else "", by_type.get(""))
    if parameters is None:
        return None
    rest = {
        k: v
        for k, v in parameters.items()
        if v is not None and k not in ("rope_type", "rope_theta", "partial_rotary_factor")
    }
    return {
        "kind": parameters.get("rope_type", "default"),
        "theta": float(parameters["rope_theta"]),
        "rotary_dim": int(head_dim * parameters.get("partial_rotary_factor", 1.0)),
        "parameters": rest,
    }

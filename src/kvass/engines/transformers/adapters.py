"""What peft has put into a model: which adapters act on its weights, and which weights are still its own."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from kvass.errors import UnsupportedModelError

_HANDLED = ("peft.tuners.lora.", "peft.tuners.ia3.")
"""Adapters that are a function of one token's activations and of weights that can be hashed."""


class Acting(NamedTuple):
    """An adapter layer that acts: where, what it is, and its tensors in the order in which they act."""

    name: str
    state: tuple[object, ...]
    tensors: list[tuple[str, torch.Tensor]]


class Parts(NamedTuple):
    """A model's own modules under the names that they had before peft, the adapter layers that act, and
    the layers whose weights have adapters merged into them."""

    own: list[tuple[str, torch.nn.Module]]
    acting: list[Acting]
    merged: list[tuple[str, tuple[str, ...]]]


def plain_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model inside of what peft wraps around it.

    Raises UnsupportedModelError for other models, and for prompt tuning, where tokens do not determine KV.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        kind = model.active_peft_config
        if kind.is_prompt_learning:
            raise UnsupportedModelError(
                f"the adapter is {kind.peft_type}, which adds tokens of its own: not yet"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} is no transformers model")
    return model


def parts(model: PreTrainedModel) -> Parts:
    """Take the model apart. Raises UnsupportedModelError for adapters that are not handled yet, by name."""
    found = Parts([], [], [])
    peft = sys.modules.get("peft")
    if peft is None:  # then nothing of it can be in the model
        found.own.extend(model.named_modules())
        return found
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    seen: set[int] = set()

    def walk(name: str, module: torch.nn.Module | None) -> None:
        if module is None or id(module) in seen:
            return
        seen.add(id(module))
        children = module._modules
        tuner, wrapper = isinstance(module, BaseTunerLayer), isinstance(module, AuxiliaryTrainingWrapper)
        if tuner or wrapper:
            inner = children.get("base_layer") or children.get("original_module")
            if inner is None:
                raise _not_yet(name, type(module).__name__)
            found.acting.extend((_acting if tuner else _replacing)(name, module))
            if merged := vars(module).get("merged_adapters"):
                found.merged.append((name, tuple(merged)))
            walk(name, inner)
        else:
            found.own.append((name, module))
            for key, child in children.items():
                walk(f"{name}.{key}" if name else key, child)

    walk("", model)
    return found


def _not_yet(name: str, kind: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the adapter at {name} is a {kind}: not yet")


def _acting(name: str, layer: Any) -> Iterator[Acting]:
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if layer.disable_adapters:
        if layer.merged:
            raise UnsupportedModelError(
                f"the adapter at {name} is merged and disabled; the next forward changes the weights: "
                "call unmerge_adapter first"
            )
        return
    holders = {one: getattr(layer, one) for one in layer.adapter_layer_names if hasattr(layer, one)}
    names = [one for one in layer.active_adapters if any(one in holder for holder in holders.values())]
    if layer.merged or not names:  # merged: the weights say it all, and the layer adds nothing
        return
    held = getattr(layer, "lora_variant", {})
    variants = [type(held[one]).__name__ for one in names if one in held]
    strange = [one for one in variants if not one.startswith("Dora")]
    if strange or not kind.startswith(_HANDLED):
        raise _not_yet(name, ", ".join(strange) or kind)
    state: list[object] = [kind, *variants]
    tensors = []
    for place, one in enumerate(names):
        state.append(_settings(layer, one))
        for key, holder in holders.items():
            if one in holder:
                tensors += _tensors(f"{place}.{key}", holder[one])
    yield Acting(name, tuple(state), tensors)


def _replacing(name: str, wrapper: Any) -> Iterator[Acting]:
    """A module that an adapter brings a whole copy of."""
    if wrapper.disable_adapters or not wrapper.active_adapters:
        return
    kind = type(wrapper).__name__
    if kind != "ModulesToSaveWrapper":
        raise _not_yet(name, kind)
    copy = wrapper.modules_to_save[wrapper.active_adapters[0]]
    yield Acting(name, (kind,), _tensors("0", copy))


def _settings(layer: Any, adapter: str) -> tuple[tuple[str, object], ...]:
    """The numbers and flags of one adapter in its layer, such as `scaling`, and those of the layer itself."""
    found: list[tuple[str, object]] = []
    for key, value in sorted(vars(layer).items()):
        mine = value.get(adapter) if isinstance(value, dict) else value
        if isinstance(mine, int | float | str) and key != "training" and not key.startswith("_"):
            found.append((key, mine))
    return tuple(found)


def _tensors(name: str, held: torch.nn.Module | torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if isinstance(held, torch.Tensor):
        return [(name, held)]
    return [(f"{name}.{key}", tensor) for key, tensor in (*held.named_parameters(), *held.named_buffers())]

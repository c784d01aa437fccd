"""What a live transformers model is: its KV spec, and the namespace in which its KV may be reused."""

import ctypes
import json
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3
from transformers import PreTrainedModel

from kvass.engines.transformers.adapters import Parts, parts, plain_model
from kvass.engines.transformers.layers import kv_spec, ships
from kvass.errors import UnsupportedModelError
from kvass.keys import Namespace, tenant_digest
from kvass.models.shared import NOT_IDENTITY, digest_of

__all__ = ["Identity", "identify", "kv_spec"]

_SAME_IN_TRAINING = (
    torch.nn.Identity, torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleDict, torch.nn.ModuleList,
    torch.nn.ParameterDict,
)  # fmt: skip
"""What an adapter is made of that was added to a model in evaluation mode, and may stay in training mode."""

_SAMPLE = 64
"""Bytes at a tensor's start, middle and end that are looked at to see whether it was overwritten."""


class Identity(NamedTuple):
    """The namespace of a model in its present state, and what was looked at to find it."""

    namespace: Namespace
    own: tuple[object, ...]
    adapters: tuple[object, ...]
    seen: tuple["weakref.ref[torch.Tensor]", ...]


def identify(
    model: torch.nn.Module, *, tenant_salt: str = "", epoch: str = "", known: Identity | None = None
) -> Identity:
    """The model's namespace. Cheap when nothing changed since `known`; else the weights are hashed anew.

    `epoch` must change when single weights are overwritten behind PyTorch's version counters
    (`tensor.data`, fused optimizers); where most of a tensor is, the change is seen without.
    Raises UnsupportedModelError, naming the layer kind, RoPE, adapter, hook or state that is not handled.
    """
    model = plain_model(model)
    found = parts(model)
    _refuse_altered(model)
    config = model.config
    tensors = list(_own_tensors(found))
    own = (
        id(model), repr(vars(config)), _numerics(model, ""), epoch, tenant_salt,
        tuple(_traits(found)), _code(found), tuple(found.merged),
        tuple(_glance(name, tensor) for name, tensor in tensors),
    )  # fmt: skip
    adapters = tuple(
        (one.name, one.state, tuple(_glance(*item) for item in one.tensors)) for one in found.acting
    )
    if known is not None and (known.own != own or any(ref() is None for ref in known.seen)):
        known = None
    if known is not None and known.adapters == adapters:
        return known
    if known is None:
        _refuse_foreign(found)
        spec = kv_spec(model)
        namespace = Namespace(
            model=str(getattr(config, "_name_or_path", "") or type(model).__name__),
            weights=_digest_of(tensors, epoch.encode()),
            config=_config_digest(config, found),
            adapter=_adapter_digest(found),
            spec=spec,
            tenant=tenant_digest(tenant_salt),
            numerics=_numerics(model, spec.groups[0].dtype),
        )
    else:
        namespace = msgspec.structs.replace(known.namespace, adapter=_adapter_digest(found))
    seen = [tensor for _, tensor in tensors] + [tensor for one in found.acting for _, tensor in one.tensors]
    return Identity(namespace, own, adapters, tuple(weakref.ref(tensor) for tensor in seen))


def _refuse_altered(model: PreTrainedModel) -> None:
    """Refuse what changes a forward and cannot be part of a key: hooks, replaced methods, dropout."""
    method = getattr(type(model), "prepare_inputs_for_generation", None)
    replaced = vars(model).get("prepare_inputs_for_generation")
    if replaced is not None and getattr(replaced, "__func__", None) is not method:
        # prompt tuning does so; peft puts the model's own back, bound, where it was replaced
        raise UnsupportedModelError("the model's prepare_inputs_for_generation was replaced")
    hooked = torch.nn.modules.module
    if hooked._global_forward_hooks or hooked._global_forward_pre_hooks:
        raise UnsupportedModelError("there are forward hooks on all modules, which may change anything")
    for name, module in model.named_modules():
        where = name or "the model"
        if module.training and type(module) not in _SAME_IN_TRAINING:
            raise UnsupportedModelError(f"{where} is in training mode; call eval()")
        if "forward" in vars(module) or module._compiled_call_impl is not None:
            raise UnsupportedModelError(f"the forward of {where} was replaced or compiled")
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not ships(hook):
                raise UnsupportedModelError(f"{where} has a forward hook, which may change what it computes")


def _refuse_foreign(found: Parts) -> None:
    """Refuse modules of which the class's name does not say what they compute."""
    for name, module in found.own:
        for code in (type(module), type(module).forward):
            if not ships(code) and not str(getattr(code, "__module__", "")).startswith("torch.nn."):
                what = getattr(code, "__qualname__", repr(code))
                raise UnsupportedModelError(
                    f"{name or 'the model'} runs {what}, which is foreign code: not yet"
                )


def _code(found: Parts) -> tuple[object, ...]:
    """The functions that the modules run: a patched class keeps its name."""
    return tuple(dict.fromkeys(type(module).forward for _, module in found.own))


# -- digests ----------------------------------------------------------------------------------------


def _numerics(model: PreTrainedModel, dtype: str) -> str:
    """Attention kernel, dtype and device; and the precision of fp32 products where less was asked for."""
    attention = model.config._attn_implementation or "eager"
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    precision = matmul.fp32_precision if matmul is not None else torch.get_float32_matmul_precision()
    reduced = "" if precision in ("none", "ieee", "highest") else f"/{precision}"
    return f"transformers/{attention}/{dtype}/{model.device.type}{reduced}"


def _traits(found: Parts) -> Iterator[tuple[str, str, tuple[tuple[str, float], ...]]]:
    """Each module's class and its float attributes, such as the scale of an attention or a norm's epsilon."""
    for name, module in found.own:
        kind = type(module)
        held = {} if kind is torch.nn.Linear else vars(module)
        floats = tuple((key, value) for key, value in held.items() if type(value) is float)
        yield name, f"{kind.__module__}.{kind.__qualname__}", floats


def _config_digest(config: Any, found: Parts) -> str:
    kept = {k: v for k, v in config.to_dict().items() if k not in NOT_IDENTITY}
    return digest_of([kept, list(_traits(found))])


def _own_tensors(found: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, saved with the model or not; tied ones once."""
    seen: set[int] = set()
    for module_name, module in found.own:
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = f"{module_name}.{key}"
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized:
                raise UnsupportedModelError(f"{name} is a {type(tensor).__name__} (quantised?): not yet")
            if tensor.is_meta:
                raise UnsupportedModelError(f"{name} is not in memory (offloaded?): not yet")
            yield name, tensor


def _glance(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """What tells, without reading all of a tensor, that it may have been overwritten.

    Fused optimizers and `tensor.data` leave the version counter alone, hence the look at its bytes.
    """
    start, size = tensor.data_ptr(), tensor.nbytes
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        sample = b""
    elif size <= 3 * _SAMPLE:
        sample = ctypes.string_at(start, size)
    else:
        places = (start, start + (size - _SAMPLE) // 2, start + size - _SAMPLE)
        sample = b"".join(ctypes.string_at(place, _SAMPLE) for place in places)
    version = 0 if tensor.is_inference() else tensor._version
    return name, id(tensor), start, version, tensor.shape, sample


def _hash_tensor(hasher: Any, name: str, tensor: torch.Tensor) -> None:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    label = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    hasher.update(len(label).to_bytes(4, "little") + label)
    hasher.update(raw.data)


def _digest_of(tensors: list[tuple[str, torch.Tensor]], salt: bytes) -> str:
    hasher = blake3(salt, max_threads=blake3.AUTO)
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        _hash_tensor(hasher, name, tensor)
    return hasher.hexdigest()


def _adapter_digest(found: Parts) -> str:
    if not found.acting:
        return ""
    hasher = blake3(json.dumps([(one.name, one.state) for one in found.acting]).encode())
    for one in found.acting:
        for name, tensor in one.tensors:
            _hash_tensor(hasher, f"{one.name}.{name}", tensor)
    return hasher.hexdigest()

"""The namespace of a vLLM's KV: its weights, configuration, adapter, tenant, numerics and layout."""

import os
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3
from vllm.config import VllmConfig

from kvass.engines.vllm.options import Options
from kvass.engines.vllm.plan import Plan
from kvass.errors import ModelFilesError, UnsupportedModelError
from kvass.keys import Namespace, tenant_digest
from kvass.models.digests import file_digest, weights_digest
from kvass.models.shared import NOT_IDENTITY, digest_of, shared_namespace

_LENGTH_FREE_ROPES: Final = ("default", "linear", "llama3", "yarn", "proportional")
"""Those whose rotation does not depend on how long a context the engine was started for."""

_ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def base_namespace(config: VllmConfig, plan: Plan, options: Options) -> Namespace:
    """The namespace of requests without adapter or salt of their own.

    Raises ModelFilesError where the weights are not in a directory of safetensors files, and
    UnsupportedModelError where something else changes them.
    """
    model = config.model_config
    load_format = str(config.load_config.load_format)
    if load_format not in ("auto", "safetensors"):
        raise UnsupportedModelError(f"load_format {load_format}: kvass knows weights by their safetensors")
    settings = options.settings
    directory = _directory(config)
    if model.trust_remote_code and next(directory.glob("*.py"), None) is not None:
        raise UnsupportedModelError(f"{directory} brings code of its own, which no key would tell: not yet")
    if settings.shared_numerics:
        return shared_namespace(
            directory, plan.spec, settings.shared_numerics, models_path=settings.models_path,
            tenant_salt=settings.tenant_salt,
        )  # fmt: skip
    return Namespace(
        model=str(model.model),
        weights=weights_digest(directory, settings.models_path),
        config=_config_digest(config),
        adapter="",
        spec=plan.spec,
        tenant=tenant_digest(settings.tenant_salt),
        numerics=plan.numerics,
        layout=plan.layout,
    )


def for_tenant(base: Namespace, cache_salt: str | None) -> Namespace:
    """The namespace of a request with a `cache_salt` of its own, beside the operator's."""
    if not cache_salt:
        return base
    return msgspec.structs.replace(base, tenant=tenant_digest(f"cache_salt\0{base.tenant}\0{cache_salt}"))


class Adapters:
    """Digests of LoRA adapters by vLLM's number; one that changes while vLLM runs has none any more."""

    def __init__(self, models_path: Path):
        self._models_path = models_path
        self._seen: dict[int, str] = {}

    def digest(self, lora: Any) -> str | None:
        """Digest of a LoRARequest's files; None where it is unknown: its KV is neither loaded nor stored."""
        found = self._files_digest(Path(str(lora.lora_path)))
        if getattr(lora, "load_inplace", False):
            found = None
        first = self._seen.setdefault(lora.lora_int_id, found or "")
        if found is None or found != first:
            # vLLM may hold either version: whichever it is, this number is of no use any more
            self._seen[lora.lora_int_id] = ""
            return None
        return found

    def _files_digest(self, directory: Path) -> str | None:
        files = [directory / name for name in _ADAPTER_FILES if (directory / name).is_file()]
        if len(files) < 2:
            return None
        hasher = blake3(b"kvass.vllm.adapter.v1")
        try:
            for file in files:
                for part in (os.fsencode(file.name), bytes.fromhex(file_digest(file, self._models_path))):
                    hasher.update(len(part).to_bytes(8, "little") + part)
        except ModelFilesError:
            return None
        return hasher.hexdigest()


def _directory(config: VllmConfig) -> Path:
    model = config.model_config
    if config.load_config.download_dir is None and Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=config.load_config.download_dir,
            local_files_only=True,
        )  # fmt: skip
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelFilesError(f"kvass cannot find the weights of {model.model}: {error}") from error
    return Path(found)


def _config_digest(config: VllmConfig) -> str:
    """Digest of all that changes what the model computes, beside its weights."""
    model = config.model_config
    kept = {key: value for key, value in _hf_config(config).items() if key not in NOT_IDENTITY}
    described: dict[str, Any] = {
        "model": kept,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "architectures": list(model.architectures),
        "implementation": str(model.model_impl),
        "sliding_window": not model.disable_sliding_window,
    }
    if any(kind not in _LENGTH_FREE_ROPES for kind in _rope_kinds(kept)):
        described["max_model_len"] = model.max_model_len
    return digest_of(described)


def _hf_config(config: VllmConfig) -> dict[str, Any]:
    text = config.model_config.hf_text_config
    found: dict[str, Any] = text.to_dict()
    return found


def _rope_kinds(config: dict[str, Any]) -> list[str]:
    """All RoPE kinds that a configuration names, however deep."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += _rope_kinds(value)
        elif key in ("rope_type", "type") and isinstance(value, str):
            found.append(value)
    return found

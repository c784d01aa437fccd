"""What KV a model keeps, told from its config alone: a model without weights runs a few tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvass.engines.transformers.layers import refuse_unsupported
from kvass.errors import ModelFilesError, UnsupportedModelError
from kvass.models.bundled import BUNDLED, bundled_gguf, no_such_model
from kvass.spec import KVSpec, LayerGroup

_AutoModel: Any = AutoModelForCausalLM  # from_config is untyped


def spec_of_config(name_or_path: str, dtype: str, models_path: Path) -> KVSpec:
    """The layer groups of a bundled model, a .gguf file or a model directory, as run in `dtype`, less RoPE.

    No weights are read. Raises ModelFilesError where there is no such model, UnsupportedModelError where
    kvass does not handle it, or its shape shows only once it runs.
    """
    with _source(name_or_path, models_path) as source:
        try:
            config = AutoConfig.from_pretrained(**source, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ModelFilesError(
                f"transformers cannot read the config of {name_or_path}: {error}"
            ) from error
    if hasattr(config, "quantization_config"):  # says how weights are stored, not what KV they make
        del config.quantization_config
    try:
        with torch.device("meta"), torch.no_grad():
            model = _AutoModel.from_config(config, dtype=torch.bfloat16).eval()
            refuse_unsupported(model)
            cache = DynamicCache(config=model.config)
            model(input_ids=torch.zeros((1, 2), dtype=torch.long), past_key_values=cache, use_cache=True)
    except (ValueError, RuntimeError, NotImplementedError, ImportError, TypeError) as error:
        raise UnsupportedModelError(
            f"the shape of {name_or_path} shows only once it runs ({error}); give --layers, --kv-heads and "
            "--head-dim instead"
        ) from error
    return _spec(cache, dtype, config.model_type)


@contextmanager
def _source(name_or_path: str, models_path: Path) -> Iterator[dict[str, Any]]:
    """Where transformers is to read the config, as its arguments."""
    path = Path(name_or_path).expanduser()
    if name_or_path in BUNDLED:
        made = sorted(models_path.glob(f"{name_or_path}-*/config.json"))
        path = made[-1].parent if made else bundled_gguf(name_or_path, models_path)
    if (path / "config.json").is_file():
        yield {"pretrained_model_name_or_path": str(path)}
    elif path.suffix == ".gguf" and path.is_file():
        # Alone in a folder: a config.json that lies beside a GGUF would be read instead.
        with TemporaryDirectory() as folder:
            (Path(folder) / "model.gguf").symlink_to(path.absolute())
            yield {"pretrained_model_name_or_path": folder, "gguf_file": "model.gguf"}
    else:
        raise no_such_model(name_or_path)


def _spec(cache: DynamicCache, dtype: str, kind: str) -> KVSpec:
    groups: dict[tuple[int | None, int, int, int], list[int]] = {}
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or keys is None or values is None:
            raise UnsupportedModelError(
                f"layer {number} of {kind} keeps its state in a {type(layer).__name__}; kvass handles full "
                "and sliding-window attention so far"
            )
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        groups.setdefault((window, keys.shape[1], keys.shape[3], values.shape[3]), []).append(number)
    made = [
        LayerGroup(
            kind="sliding" if window else "attention", layers=tuple(layers), kv_heads=heads, head_dim=dim,
            v_head_dim=v_dim, dtype=dtype, window=window,
        )
        for (window, heads, dim, v_dim), layers in groups.items()
    ]  # fmt: skip
    return KVSpec(groups=tuple(sorted(made, key=lambda group: (group.window is not None, group.layers))))

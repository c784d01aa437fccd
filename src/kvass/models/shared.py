"""The namespace that several engines share of which the operator says that their numerics are equal.

Needs no engine. Each engine comes to it by itself: from the files of the model, and the shape of its KV.
"""

import json
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from kvass.errors import ModelFilesError
from kvass.keys import Namespace, tenant_digest
from kvass.models.digests import weights_digest
from kvass.spec import KVSpec

NOT_IDENTITY: Final = frozenset(
    {
        "_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype",
        "use_cache", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id",
        "problem_type", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "chunk_size_feed_forward", "attn_implementation", "_attn_implementation", "tokenizer_class",
    }
)  # fmt: skip
"""Fields of a model's configuration that say nothing about what it computes."""


def shared_namespace(
    directory: Path, spec: KVSpec, name: str, *, models_path: Path, tenant_salt: str = ""
) -> Namespace:
    """The namespace of a model's KV among engines that share numerics called `name`.

    `directory`: the model's Hugging Face directory; `spec`: its KV (the RoPE in it is left out, since it
    follows from the configuration). Raises ModelFilesError where the directory is not readable.
    """
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"cannot read the configuration of {directory}: {error}") from error
    if not isinstance(config, dict):
        raise ModelFilesError(f"the configuration of {directory} is not a JSON object")
    groups = tuple(msgspec.structs.replace(group, rope=None) for group in spec.groups)
    return Namespace(
        model=directory.name,
        weights=weights_digest(directory, models_path),
        config=digest_of({key: value for key, value in config.items() if key not in NOT_IDENTITY}),
        adapter="",
        spec=KVSpec(groups=groups),
        tenant=tenant_digest(tenant_salt),
        numerics=f"shared:{name}",
    )


def digest_of(described: Any) -> str:
    """BLAKE3 of a description, in hex."""
    return blake3(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()

"""Turns a GGUF file into a normal model directory, once, so that every later load is quick."""

import copy
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvass.errors import ModelFilesError, UnsupportedModelError
from kvass.models import build_once

_log = logging.getLogger(__name__)
_AutoModel: Any = AutoModelForCausalLM  # its stated return type leaves out the loading report

# GGUF names the splitting of text and transformers knows only some names. It takes GPT-2's for this one,
# which leaves spaces before a digit in other tokens than the model was trained with.
_SPLITS: Final[dict[str, Any]] = {
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
}


def convert_gguf(gguf: Path, target: Path, *, add_bos: bool, chat_template: str | None) -> None:
    """Write the model of a GGUF file to the directory `target`, unless it is there; takes about a minute.

    The weights become float32, exactly as the file's blocks dequantise, so that one directory serves every
    dtype. With `add_bos`, the saved tokenizer puts BOS before plain text, and a chat template has to write
    it itself (as everywhere in transformers). `chat_template` replaces the file's own. `target` appears
    whole or not at all, and processes that convert at once end with the same directory.

    Raises ModelFilesError where the file cannot be converted, and UnsupportedModelError where transformers
    would leave out what the file says about RoPE.
    """
    build_once(target, lambda draft: _convert(gguf, draft, add_bos, chat_template), ready=Path.is_dir)


def gguf_adds_bos(gguf: Path) -> bool:
    """Return whether a GGUF file wants BOS before plain text. Raises ModelFilesError if it is unreadable."""
    reader = _read_header(gguf)
    stated = _field(reader, "tokenizer.ggml.add_bos_token")
    return bool(stated) if stated is not None else _field(reader, "tokenizer.ggml.model") == "llama"


def _convert(gguf: Path, draft: Path, add_bos: bool, chat_template: str | None) -> None:
    _log.info("converting %s, once; this takes about a minute", gguf)
    reader = _read_header(gguf)
    _check_rope(gguf, reader)
    # Alone in a folder: what lies beside a GGUF (a tokenizer_config.json, say) would be read with it.
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(gguf.absolute())
        source: dict[str, Any] = {
            "pretrained_model_name_or_path": folder,
            "gguf_file": "model.gguf",
            "local_files_only": True,
        }
        try:
            model, report = _AutoModel.from_pretrained(
                **source, dtype=torch.float32, output_loading_info=True
            )
            tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelFilesError(f"transformers cannot read {gguf}: {error}") from error
    if report["missing_keys"]:
        lacking = ", ".join(sorted(report["missing_keys"])[:5])
        raise ModelFilesError(f"{gguf} lacks weights that the model needs: {lacking}")
    draft.mkdir()
    _serializable(model).save_pretrained(draft)
    _save_tokenizer(tokenizer, draft, _field(reader, "tokenizer.ggml.pre"), add_bos, chat_template)


def _serializable(model: Any) -> PreTrainedModel:
    # A model that was loaded from GGUF refuses to be saved; one that holds the same tensors does not.
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _save_tokenizer(
    tokenizer: Any, draft: Path, split: Any, add_bos: bool, chat_template: str | None
) -> None:
    backend = tokenizer.backend_tokenizer
    if split in _SPLITS:
        backend.pre_tokenizer = _SPLITS[split]
    if add_bos and tokenizer.bos_token_id is None:
        raise ModelFilesError("the model wants BOS before a text, but its file names no BOS token")
    tokenizer.add_bos_token = add_bos
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    for how_it_was_loaded in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(how_it_was_loaded, None)
    tokenizer.save_pretrained(draft)
    # Again without the blanks: for Gemma's 262,144 tokens they take a second of every load.
    backend.save(str(draft / "tokenizer.json"), pretty=False)


def _check_rope(gguf: Path, reader: Any) -> None:
    scaling = [name for name in reader.fields if ".rope.scaling." in name]
    scaled = any(_field(reader, name) != "none" for name in scaling if name.endswith(".type"))
    if scaled or any(tensor.name.startswith("rope_freqs") for tensor in reader.tensors):
        raise UnsupportedModelError(
            f"{gguf} scales its RoPE, which is lost in its conversion; use the model's own directory instead"
        )


def _read_header(gguf: Path) -> Any:
    try:
        return GGUFReader(gguf)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelFilesError(f"{gguf} is not a readable GGUF file: {error}") from error


def _field(reader: Any, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()

"""Loads a model and its tokenizer by name or path, and turns text into tokens with exactly one BOS."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvass.config import Settings
from kvass.engines.transformers.convert import convert_gguf, gguf_adds_bos
from kvass.engines.transformers.layers import kv_spec
from kvass.engines.transformers.shapes import spec_of_config
from kvass.errors import InputError, ModelFilesError
from kvass.keys import Namespace
from kvass.models.bundled import BUNDLED, bundled_gguf, no_such_model
from kvass.models.digests import file_digest
from kvass.models.shared import shared_namespace

_AutoModel: Any = AutoModelForCausalLM  # its stated return type leaves out the loading report
_progress: Any = transformers_logging  # untyped

Dtype = Literal["bfloat16", "float32", "float16"]

# Raised when a conversion comes to write other bytes than before, so that old directories are left alone.
_CONVERSION: Final = "v1"
_DTYPES: Final[dict[str, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run (eval mode, no gradients), its tokenizer, and where both came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    directory: Path


def load_model(name_or_path: str, *, dtype: Dtype = "bfloat16", models_path: str | Path) -> LoadedModel:
    """Load a bundled model by name, a .gguf file, or a Hugging Face directory; nothing is downloaded.

    A GGUF file is converted once, to a directory under `models_path` that is named after its digest.
    Raises ModelFilesError where there is no such model or its files are missing or unreadable,
    UnsupportedModelError where a GGUF file cannot be converted faithfully, and InputError for a dtype that
    is none of the three.
    """
    if dtype not in _DTYPES:
        raise InputError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    name, directory = find_model(name_or_path, Path(models_path))
    try:
        with _undisturbed():
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            model, report = _AutoModel.from_pretrained(
                directory,
                dtype=_DTYPES[dtype],
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,  # anything else may run code when it is opened
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelFilesError(f"transformers cannot load {directory}: {error}") from error
    if report["missing_keys"]:
        lacking = ", ".join(sorted(report["missing_keys"])[:5])
        raise ModelFilesError(f"{directory} lacks weights that the model needs: {lacking}")
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, name, directory)


def shared_with(loaded: LoadedModel, settings: Settings, tenant_salt: str) -> Namespace | None:
    """Where other engines keep this model's KV too, if the operator declared their numerics equal."""
    if not settings.shared_numerics:
        return None
    return shared_namespace(
        loaded.directory, kv_spec(loaded.model), settings.shared_numerics,
        models_path=settings.models_path, tenant_salt=tenant_salt,
    )  # fmt: skip


def certified_namespace(model: str, models_path: Path) -> Namespace:
    """As much of a model's namespace as a certificate is bound to; no weights are loaded."""
    _, directory = find_model(model, models_path)
    spec = spec_of_config(str(directory), "bfloat16", models_path)
    return shared_namespace(directory, spec, "", models_path=models_path)


def encode_text(loaded: LoadedModel, text: str) -> list[int]:
    """Return the tokens of plain text: after exactly one BOS where the model wants one, else with none.

    A text that already begins with the BOS token, such as a rendered chat template, gets no second one.
    """
    return with_one_bos(loaded.tokenizer, loaded.tokenizer(text)["input_ids"])


def encode_chat(
    loaded: LoadedModel, messages: list[dict[str, str]], add_generation_prompt: bool = True
) -> list[int]:
    """Return the tokens of a chat, as the model's template writes it, with BOS as in `encode_text`.

    With `add_generation_prompt`, the tokens end where the assistant's answer is to begin. Raises InputError
    where the model has no chat template, or the template refuses the messages.
    """
    text = render_chat(loaded, messages, add_generation_prompt=add_generation_prompt)
    # A template writes its special tokens itself; only a forgotten BOS is made up for.
    return with_one_bos(loaded.tokenizer, loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


def render_chat(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Any = None,
) -> str:
    """Return a chat as the model's template writes it. Raises InputError as `encode_chat` does."""
    if loaded.tokenizer.chat_template is None:
        raise InputError(f"the model {loaded.name} has no chat template; give it plain text")
    try:
        text = loaded.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise InputError(f"the chat template of {loaded.name} refuses these messages: {error}") from error
    return str(text)


def with_one_bos(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Return the tokens after exactly one BOS where the model wants one, else as they are."""
    bos = tokenizer.bos_token_id
    # Not `add_bos_token`: once loaded, that says False although the tokenizer's post-processor adds one.
    if tokenizer("")["input_ids"][:1] != [bos]:
        return tokens
    after = next((at for at, token in enumerate(tokens) if token != bos), len(tokens))
    return [bos, *tokens[after:]]


def find_model(name_or_path: str, models_path: Path) -> tuple[str, Path]:
    """A model's name and its Hugging Face directory, converted where need be. Raises as `load_model`."""
    bundled = BUNDLED.get(name_or_path)
    if bundled is not None:
        gguf = bundled_gguf(bundled.name, models_path)
        target = _converted(bundled.name, gguf, models_path)
        convert_gguf(gguf, target, add_bos=bundled.add_bos, chat_template=bundled.chat_template)
        return bundled.name, target
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        # The suffix stays in the name, so that no file can take a bundled model's directory.
        target = _converted(path.name, path, models_path)
        if not target.is_dir():
            convert_gguf(path, target, add_bos=gguf_adds_bos(path), chat_template=None)
        return path.name, target
    if (path / "config.json").is_file():
        return path.resolve().name, path.absolute()
    raise no_such_model(name_or_path)


def _converted(name: str, gguf: Path, models_path: Path) -> Path:
    return models_path / f"{name}-{file_digest(gguf, models_path)[:16]}-{_CONVERSION}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No progress bars, and no garbage collector walking a vocabulary that is only just being read."""
    bars, collecting = _progress.is_progress_bar_enabled(), gc.isenabled()
    gc.disable()
    _progress.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            _progress.enable_progress_bar()
        if collecting:
            gc.enable()

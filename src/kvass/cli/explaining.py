"""kvass explain: how much of a prompt is stored, where it parts from what is, and the usual cause."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.markup import escape

from kvass.cache import KVCache
from kvass.cache.causes import cause_of
from kvass.cli.output import AsJson, Model, Tenant, needs_transformers, out, print_json
from kvass.config import Settings
from kvass.errors import InputError
from kvass.serve.schemas import Message
from kvass.serve.tenants import tenant_salt

_LOOKED_AT = 1024
"""Tokens of both texts in which a cause is looked for; a turn that was left out has to fit in."""

_SHOWN = 16


def explain(
    prompt: Annotated[str | None, typer.Argument(help="The prompt's text; - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: Model = "smollm2-135m",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32, as the prompt was run.")
    ] = "bfloat16",
    chat: Annotated[bool, typer.Option(help="The text is a user's message, alone in a chat.")] = False,
    messages: Annotated[
        Path | None, typer.Option(help="JSON file with a chat's messages, as a client sends them.")
    ] = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Say how much of a prompt is stored, where it first differs from what is, and the usual cause and fix.

    Example: kvass explain --messages chat.json
    """
    asked = _asked(prompt, file, messages)
    if chat and isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    needs_transformers()
    from kvass.engines.transformers import Engine, load_model
    from kvass.engines.transformers.hosting import kept_under
    from kvass.serve.answers import Answers
    from kvass.serve.prompts import ChatEncoder

    settings = Settings.load()
    salt = tenant_salt(settings, tenant)
    loaded = load_model(model, dtype=dtype, models_path=settings.models_path)  # type: ignore[arg-type]
    engine = Engine(loaded.model, None, tenant_salt=salt, shared=kept_under(loaded, settings, salt))
    namespace = engine.namespace
    encoder = ChatEncoder(loaded, Answers(settings.state_path))  # as a server would
    if isinstance(asked, str):
        tokens = encoder.text(asked, special=True)
    else:
        tokens = encoder.encode(asked, root=namespace.root())
    with KVCache.open(settings) as cache:
        allowed = cache.approximations(namespace) if settings.allow_lossy else []
        found = cache.explain(tokens, namespace, context=_LOOKED_AT, approximate=allowed)
    difference, cause = None, None
    if found.difference is not None:
        at, mine, other = found.difference
        before, tokenizer = tokens[:at], loaded.tokenizer
        mine_text, other_text = (_behind(tokenizer, before, side) for side in (mine, other))
        cause = cause_of(_decoded(tokenizer, before), mine_text, other_text)
        difference = {
            "position": at,
            "prompt": _behind(tokenizer, before, mine[:_SHOWN]),
            "stored": _behind(tokenizer, before, other[:_SHOWN]),
            "prompt_tokens": mine[:_SHOWN],
            "stored_tokens": other[:_SHOWN],
        }
    if as_json:
        print_json(
            {
                "tokens": found.tokens,
                "hit_tokens": found.hit,
                "reason": found.reason,
                "difference": difference,
                "cause": cause.name if cause else None,
                "fix": cause.fix if cause else None,
                "lossy": {name: verdict._asdict() for name, verdict in found.verdicts.items()},
            }
        )
        return
    out.print(f"{found.hit} of {found.tokens} tokens are stored: {found.reason}")
    if difference is not None:
        out.print(f"  prompt: {escape(repr(difference['prompt']))}")
        out.print(f"  stored: {escape(repr(difference['stored']))}")
    if cause is not None:
        out.print(f"  cause:  {escape(cause.name)}\n  fix:    {escape(cause.fix)}")
    for name, verdict in found.verdicts.items():
        said = "may be used" if verdict.allowed else "is not used"
        out.print(f"  {name} {said}: {escape(verdict.reason)}", soft_wrap=True)


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    return text


def _behind(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Tokens as they read behind others: some tokenizers leave out a space at a text's start."""
    lead = before[-8:]
    start, whole = _decoded(tokenizer, lead), _decoded(tokenizer, [*lead, *tokens])
    return whole[len(start) :] if whole.startswith(start) else _decoded(tokenizer, tokens)


def _asked(prompt: str | None, file: Path | None, messages: Path | None) -> str | list[dict[str, Any]]:
    """A prompt's text, or a chat's messages."""
    if sum(given is not None for given in (prompt, file, messages)) != 1:
        raise InputError("give the prompt's text, or --file, or --messages")
    try:
        if messages is not None:
            read = TypeAdapter(list[Message]).validate_json(messages.read_bytes())
            return [message.for_template() for message in read]
        if file is not None:
            return file.read_text()
        return sys.stdin.read() if prompt == "-" else str(prompt)
    except ValidationError as error:
        raise InputError(f"{messages} is no JSON list of messages: {error.errors()[0]['msg']}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompt: {error}") from error

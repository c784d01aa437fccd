"""kvass explain: how much of a prompt is stored, where it parts from what is, and the usual cause."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pydantic import TypeAdapter, ValidationError
from rich.markup import escape

from kvass.cache import KVCache
from kvass.cache.causes import cause_of
from kvass.cli.output import AsJson, Model, Tenant, needs_transformers, out, print_json
from kvass.cli.strip import kinds, strip
from kvass.config import Settings
from kvass.errors import InputError
from kvass.keys import Namespace
from kvass.quality import Budget, Gate
from kvass.reuse.plan import Reuse
from kvass.reuse.selectors import DEFAULT
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
    anywhere: Annotated[
        bool, typer.Option("--anywhere", help="Show, too, what could be reused that was read elsewhere.")
    ] = False,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Say how much of a prompt is stored, where it first differs from what is, and the usual cause and fix.

    With --anywhere (or the setting reuse) the prompt is drawn as a strip: its exact beginning, passages that
    were read elsewhere, what of these is computed anew, and what is new; this runs the model over them.
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
    shared = kept_under(loaded, settings, salt)
    engine = Engine(loaded.model, None, tenant_salt=salt, shared=shared)
    namespace = engine.namespace
    encoder = ChatEncoder(loaded, Answers(settings.state_path))  # as a server would
    if isinstance(asked, str):
        tokens = encoder.text(asked, special=True)
    else:
        tokens = encoder.encode(asked, root=namespace.root())
    with KVCache.open(settings) as cache:
        allowed = cache.approximations(namespace) if settings.allow_lossy else []
        found = cache.explain(tokens, namespace, context=_LOOKED_AT, approximate=allowed)
        pieces = None
        if anywhere or settings.reuse == "anywhere":
            reading = Engine(loaded.model, cache, tenant_salt=salt, shared=shared)
            pieces = _pieces(reading.start(tokens, scope=_looking(settings, salt)), namespace, settings)
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
                **({"anywhere": pieces} if pieces is not None else {}),
            }
        )
        return
    out.print(f"{found.hit} of {found.tokens} tokens are stored: {found.reason}")
    if difference is not None:
        out.print(f"  prompt: {escape(repr(difference['prompt']))}")
        out.print(f"  stored: {escape(repr(difference['stored']))}")
    if cause is not None:
        out.print(f"  cause:  {escape(cause.name)}\n  fix:    {escape(cause.fix)}")
    if pieces is not None:
        _draw(pieces, found.tokens, found.hit)
    for name, verdict in found.verdicts.items():
        said = "may be used" if verdict.allowed else "is not used"
        out.print(f"  {name} {said}: {escape(verdict.reason)}", soft_wrap=True)


def _looking(settings: Settings, salt: str) -> Any:
    """What a request may load by the settings, keeping nothing."""
    from kvass.engines.transformers import Scope

    return Scope(salt, keep=False, budget=Budget.of(settings), reuse=Reuse(settings.reuse_max_fraction))


def _pieces(answering: Any, namespace: Namespace, settings: Settings) -> dict[str, Any]:
    """What a request would reuse of what was read elsewhere; and why, where that is nothing."""
    try:
        answering.begin()
        blend = answering.blended
    finally:
        answering.close(keep=False)
    if blend is None:
        verdict = Gate(settings.models_path).blend(namespace, DEFAULT, 1.0, Budget.of(settings))
        reason = "nothing of it that is long enough was read elsewhere, or repairing it would cost too much"
        return {"segments": [], "recomputed": [], "reason": reason if verdict.allowed else verdict.reason}
    return {
        "segments": [list(one) for one in blend.prompt.segments],
        "recomputed": blend.recomputed.tolist(),
        "recomputed_fraction": round(blend.made.fraction, 4),
        "reason": "",
    }


def _draw(pieces: dict[str, Any], tokens: int, exact: int) -> None:
    if pieces["reason"]:
        out.print(f"  anywhere: {escape(pieces['reason'])}", soft_wrap=True)
        return
    recomputed = np.asarray(pieces["recomputed"], np.int64)
    for line in strip(kinds(tokens, exact, pieces["segments"], recomputed), out.width):
        out.print(line)
    for start, stop in pieces["segments"]:
        inside = int(((recomputed >= start) & (recomputed < stop)).sum())
        out.print(
            f"  {start:,} to {stop - 1:,}: {stop - start:,} tokens read elsewhere, {inside:,} computed anew"
        )


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

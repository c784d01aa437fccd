"""kvass warm: reads files into the cache, so that a first question about them is answered at once."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kvass.cache import KVCache
from kvass.cli.output import AsJson, Model, Tenant, err, needs_transformers, out, print_json, progress_to
from kvass.config import Settings
from kvass.errors import InputError

if TYPE_CHECKING:
    from kvass.serve.warm import Report, Warmer


def warm(
    paths: Annotated[list[Path], typer.Argument(help="Files, and directories with all below them.")],
    template: Annotated[
        Path | None, typer.Option(help="File with the system message; {files} stands where the files go.")
    ] = None,
    model: Model = "smollm2-135m",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32, as questions will be run.")
    ] = "bfloat16",
    reserve: Annotated[
        int, typer.Option(min=1, help="Tokens of the model's length to leave to question and answer.")
    ] = 1024,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Directory for the system messages: context-001.txt, ...")
    ] = None,
    tenant: Tenant = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on: read again when files change.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read files into the cache, so that a first question about them is answered at once.

    Only what is not stored is read: where a file changed, its context from there on.

    Example: kvass warm src docs --out .contexts --watch
    """
    needs_transformers()
    from kvass.serve.gather import Sources
    from kvass.serve.pack import read_template

    settings = Settings.load()
    sources = Sources(paths, folder)
    sources.gather()  # what is wrong is said before the seconds that a model takes to load
    read_template(template)

    from kvass.engines.transformers import Engine, load_model
    from kvass.engines.transformers.hosting import kept_under
    from kvass.serve.tenants import tenant_salt
    from kvass.serve.warm import Warmer

    salt = tenant_salt(settings, tenant)
    loaded = load_model(model, dtype=dtype, models_path=settings.models_path)  # type: ignore[arg-type]
    with KVCache.open(settings) as cache:
        engine = Engine(
            loaded.model, cache, tenant_salt=salt, shared=kept_under(loaded, settings, salt),
            allow_lossy=settings.allow_lossy,
        )  # fmt: skip
        warmer = Warmer(loaded, engine, cache, sources, reserve=reserve, template=template, out=folder)
        seen = warmer.signature()
        _once(warmer, as_json, watch)
        while watch:
            err.print("watching; Ctrl-C ends")
            warmer.wait_for_change(seen)
            seen = warmer.signature()
            try:
                _once(warmer, as_json, watch)
            except InputError as error:  # files may be gone, or half a template there, for a moment
                err.print(f"[red]kvass: {escape(str(error))}[/red]")


def _once(warmer: "Warmer", as_json: bool, watch: bool) -> None:
    with _interruptible() as cancelled, progress_to("reading") as progress:
        report = warmer.warm(cancelled, progress)
    if not as_json:
        _show(report)
    elif watch:  # a line each time
        print(json.dumps(_jsonable(report)), flush=True)
    else:
        print_json(_jsonable(report))
    if report.interrupted:
        raise KeyboardInterrupt


def _jsonable(report: "Report") -> dict[str, Any]:
    return {**asdict(report), "skipped": [one._asdict() for one in report.skipped]}


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that what was read is stored; a second one ends at once."""
    cancelled = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt
        cancelled.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield cancelled
    finally:
        signal.signal(signal.SIGINT, before)


def _show(report: "Report") -> None:
    for number, one in enumerate(report.contexts, 1):
        first, last = one.files[0], one.files[-1]
        named = first if first == last else f"{len(one.files)} files, {first} to {last}"
        written = f" > {escape(one.text)}" if one.text else ""
        out.print(f"{number}. {escape(named)}{written}", soft_wrap=True)
        out.print(
            f"   {one.tokens:,} tokens: {one.hit_tokens:,} were stored, {one.read_tokens:,} were read, "
            f"{one.seconds:.1f} s"
        )
        if one.saves_seconds is not None:
            out.print(f"   {_saves(one.saves_seconds)}")
    for name, reason in report.skipped:
        out.print(f"skipped {escape(name)}: {escape(reason)}", soft_wrap=True)
    out.print(
        f"{report.read_tokens:,} of {report.tokens:,} tokens were read ({report.read_share:.1%}), "
        f"in all {report.seconds:.1f} s"
    )
    lost = sum(one.stored_tokens < one.hit_tokens + one.read_tokens for one in report.contexts)
    if lost:
        err.print(
            f"[red]kvass: {lost} contexts are not stored whole; if `kvass stats` shows full tiers, raise "
            "KVASS_DISK_BYTES and KVASS_HOST_BYTES[/red]"
        )


def _saves(seconds: float) -> str:
    if seconds < 0.05:
        return "a first question over this context starts no sooner: it is read as fast as it is loaded"
    return f"a first question over this context starts about {seconds:.1f} s sooner"

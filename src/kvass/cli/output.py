"""What all commands print with: the two consoles, JSON, sizes, times, progress, and options they share."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvass.errors import ModelFilesError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="Of this tenant of a server; without, of KVASS_TENANT_SALT.")
]
Model = Annotated[str, typer.Option(help="A bundled model, a .gguf file, or a model directory.")]


def print_json(value: Any) -> None:
    """A command's whole answer under --json."""
    print(json.dumps(value, indent=2))


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on standard error; gives what advances it by one."""
    with _bar(label, total) as (shown, task):
        yield lambda: shown.advance(task)


@contextmanager
def progress_to(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error; gives what says how much is done, and of how much."""
    with _bar(label, None) as (shown, task):
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def _bar(label: str, total: int | None) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as shown:
        yield shown, shown.add_task(label, total=total)


def size(count: float) -> str:
    """Bytes for people, in powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def when(seconds: float) -> str:
    """A time since the epoch for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"


def needs_transformers() -> None:
    """Raises ModelFilesError, with what to install, where the engine is not there."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ModelFilesError("this needs the transformers engine: pip install 'kvass[transformers]'")


def needs_server() -> None:
    """Raises ModelFilesError, with what to install, where the engine or the server is not there."""
    needs_transformers()
    needs_http("fastapi", "uvicorn")


def needs_http(*packages: str) -> None:
    """Raises ModelFilesError, with what to install, where one of the server's packages is not there."""
    if any(find_spec(package) is None for package in packages):
        raise ModelFilesError("this needs the server: pip install 'kvass[serve]'")

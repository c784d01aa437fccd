"""kvass doctor: prints what was found on this machine, and what to do about what is not well."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kvass.cli.findings import examine
from kvass.cli.output import AsJson, out, print_json

_SIGNS = {"ok": "ok", "warning": "[yellow]warning[/yellow]", "problem": "[red]problem[/red]"}


def doctor(
    vllm: Annotated[
        str | None, typer.Option(help="Also ask the vLLM server at this address, http://HOST:PORT.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for what is not well with tiers, engines, models, limits and settings. Exit 1 on a problem.

    Example: kvass doctor
    """
    found = examine(vllm)
    problems = sum(one.status == "problem" for one in found)
    if as_json:
        print_json({"problems": problems, "findings": [asdict(one) for one in found]})
        raise typer.Exit(1 if problems else 0)
    table = Table("", "", "", "found")
    area = ""
    for one in found:
        text = escape(one.text) + (f"\n→ {escape(one.fix)}" if one.fix else "")
        table.add_row(one.area if one.area != area else "", escape(one.name), _SIGNS[one.status], text)
        area = one.area
    out.print(table)
    warnings = sum(one.status == "warning" for one in found)
    out.print(f"{problems} problems, {warnings} warnings")
    raise typer.Exit(1 if problems else 0)

"""kvass quality: what a model's certificate says of each codec, as a table and as a plot."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kvass.calibrate.picture import LEAST_KL, Drawn, write_png
from kvass.cli.output import AsJson, needs_transformers, out, print_json
from kvass.cli.repairs import show_repairs
from kvass.config import Settings
from kvass.errors import InputError, ModelFilesError
from kvass.quality import Budget, Certificate, Gate, Measured, calibrated_folder

_WIDTH, _HEIGHT = 64, 16
_WIDE = 110
"""Columns of a terminal that all of the table fits into."""


def quality(
    model: Annotated[str, typer.Argument(help="A bundled model, a .gguf file, or a model directory.")],
    png: Annotated[
        Path | None, typer.Option("--png", help="Write the plot to this PNG file (needs kvass\\[plot]).")
    ] = None,
    blends: Annotated[
        bool, typer.Option("--blends", help="Show what repair of moved passages costs instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what each codec was measured to cost a model, and whether it may be used.

    With --blends: what `kvass calibrate --blends` measured of reusing passages that were read elsewhere.
    Example: kvass quality smollm2-135m --png quality.png
    """
    if blends and png is not None:
        raise InputError("--png draws codecs; leave it out with --blends")
    needs_transformers()
    from kvass.engines.transformers.load import certified_namespace

    settings = Settings.load()
    namespace = certified_namespace(model, settings.models_path)
    if blends:
        show_repairs(namespace, settings, as_json)
        return
    gate = Gate(settings.models_path)
    certificate = gate.certificate(namespace)
    if certificate is None:
        raise ModelFilesError(gate.verdict(namespace, "any").reason)
    budget = Budget.of(settings)
    if png is not None:
        title = f"{certificate.model}: KL of what each codec stores"
        write_png(png, "--png", title, [Drawn(certificate.measured)])
    verdicts = {one.codec: gate.verdict(namespace, one.codec, budget) for one in certificate.measured}
    if as_json:
        measured = [
            {
                **msgspec.to_builtins(one),
                "allowed": verdicts[one.codec].allowed,
                "reason": verdicts[one.codec].reason,
            }
            for one in certificate.measured
        ]
        print_json(
            {
                "model": certificate.model,
                "folder": str(calibrated_folder(settings.models_path, namespace)),
                "tables": certificate.tables,
                "certificate": certificate.digest,
                "budget": budget._asdict(),
                "measured": measured,
            }
        )
        return
    out.print(_table(certificate, {name: verdict.allowed for name, verdict in verdicts.items()}))
    for line in plotted(certificate.measured):
        out.print(line, markup=False, soft_wrap=True)
    out.print(
        f"budget: KL {budget.kl:g} a token, {budget.facts_lost:.1%} of facts lost; certificate "
        f"{certificate.digest[:12]}, tables {certificate.tables[:12]}",
        soft_wrap=True,
    )
    for name, verdict in verdicts.items():
        if not verdict.allowed:
            out.print(f"{escape(name)} is not used: {escape(verdict.reason)}", soft_wrap=True)
    if png is not None:
        out.print(f"plot written to {escape(str(png))}", soft_wrap=True)


def _table(certificate: Certificate, allowed: dict[str, bool]) -> Table:
    """All columns where there is room for them; numbers that are cut off would tell nothing."""
    wide = out.width >= _WIDE
    table = Table(title=escape(certificate.model), title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("")
    table.add_column("codec", no_wrap=True)
    titles = ("bits", "KL", "95%", "early", "p99", "same top", "ppl", "facts lost", "at most")
    shown = [title for title in titles if wide or title not in ("95%", "p99", "ppl")]
    for title in shown:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("may be used" if wide else "used", no_wrap=True)
    for mark, one in zip(_marks(certificate.measured), certificate.measured, strict=True):
        cells = {
            "bits": f"{one.bits:.2f}", "KL": f"{one.kl_mean:.2g}",
            "95%": f"{one.kl_low:.2g}..{one.kl_high:.2g}", "early": f"{one.kl_early:.2g}",
            "p99": f"{one.kl_p99:.2g}", "same top": f"{one.top1:.1%}", "ppl": f"{one.ppl_ratio:.4f}",
            "facts lost": f"{one.facts_lost} of {one.facts_tried}", "at most": f"{one.facts_lost_high:.2%}",
        }  # fmt: skip
        table.add_row(
            mark, escape(one.codec), *(cells[title] for title in shown),
            "yes" if allowed[one.codec] else "[yellow]no[/yellow]",
        )  # fmt: skip
    return table


# -- plots ------------------------------------------------------------------------------------------


def plotted(measured: Sequence[Measured]) -> list[str]:
    """Lines of plain text: bits per element to the right, log10 of the KL upward; marks as in the table.

    Marks that fall on one another stand beside each other. Empty for no codecs.
    """
    if not measured:
        return []
    heights = [_height(one) for one in measured]
    low, high = math.floor(min(heights)), max(math.ceil(max(heights)), math.floor(min(heights)) + 1)
    most = max(math.ceil(max(one.bits for one in measured)), 1)
    grid = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for mark, one, height in zip(_marks(measured), measured, heights, strict=True):
        row = grid[round((high - height) / (high - low) * _HEIGHT)]
        at = round(one.bits / most * _WIDTH)
        free = sorted((abs(place - at), place) for place, there in enumerate(row) if there == " ")
        if free:
            row[free[0][1]] = mark
    ticks = {round((high - tick) / (high - low) * _HEIGHT): tick for tick in range(low, high + 1)}
    lines = ["  KL"]
    for number, row in enumerate(grid):
        label = f"1e{ticks[number]}" if number in ticks else ""
        lines.append(f"{label:>6} {'+' if number in ticks else '|'}{''.join(row).rstrip()}")
    step = max(1, most // 8)
    scale = [" "] * (_WIDTH + 4)
    for tick in range(0, most + 1, step):
        for offset, digit in enumerate(str(tick)):
            scale[round(tick / most * _WIDTH) + offset] = digit
    return [*lines, f"{'':7}+{'-' * (_WIDTH + 1)}", f"{'':8}{''.join(scale).rstrip()}  bits per element"]


def _height(one: Measured) -> float:
    return math.log10(max(one.kl_mean, LEAST_KL))


def _marks(measured: Sequence[Measured]) -> list[str]:
    return [chr(ord("a") + number % 26) for number in range(len(measured))]

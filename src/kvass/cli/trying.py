"""Commands to try kvass with: the demo, and the conformance suites for tiers and codecs from outside."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvass.cli.output import AsJson, err, needs_transformers, out, print_json, size
from kvass.config import Settings
from kvass.errors import KvassError, ModelFilesError


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the report and the files go.")] = Path(".demo"),
    as_json: AsJson = False,
) -> None:
    """Let a small model read real code once and ask about it, here and in a new process.

    Example: kvass demo --dir .demo
    """
    needs_transformers()
    from kvass.bench import demo as scenario

    began = time.monotonic()
    report = scenario.run(
        folder,
        Settings.load().models_path,
        lambda text: err.print(f"{time.monotonic() - began:5.0f} s  {text}"),
    )
    if as_json:
        print_json(report)
    else:
        _demo_table(report, folder)
    if not report["identical"]:
        raise KvassError("answers with kvass differ from those without; please report this")


def _demo_table(report: dict[str, Any], folder: Path) -> None:
    plain, loaded = report["ttft_seconds"]["plain"], report["bytes_loaded"]
    table = Table("", "time to first token", "speed-up", "tokens from cache", "bytes loaded")
    table.add_row("plain engine", f"{plain:.2f} s", "1.0x", "0", "0")
    cold = report["ttft_seconds"]["cold"]
    table.add_row("kvass, cold", f"{cold:.2f} s", f"{plain / cold:.1f}x", "0", "0")
    for side, label in (("host", "kvass, host tier"), ("disk", "kvass, SSD tier, new process")):
        table.add_row(
            label, f"{report['ttft_seconds'][side]:.2f} s", f"[bold]{report[f'speedup_{side}']:.1f}x[/bold]",
            f"{report['hit_tokens'][side][0]:,}", size(loaded[side][0]),
        )  # fmt: skip
    out.print(
        f"\n{report['model']} has read {report['context_tokens']:,} tokens of Python's standard library."
    )
    out.print(table)
    for question, answer in zip(report["questions"], report["answers"], strict=True):
        out.print(f"Q: {escape(question['text'])}\nA: {escape(answer.strip())} …")
    same = "bitwise the same" if report["identical"] else "NOT the same"
    agree = sum(report["same_answer_as_one_shot"])
    out.print(
        f"\nLogits and tokens are {same} as with the cache kept in memory; "
        f"{agree} of {len(report['questions'])} answers equal one-shot prefill's in bf16."
    )
    out.print(f"Report: {folder / 'report.json'}")


def conformance(
    target: Annotated[str, typer.Argument(help="package.module:Class, a Tier or a Codec.")],
) -> None:
    """Run the conformance suite against a tier or codec of your own.

    Example: kvass conformance kvass.codecs.raw:Raw
    """
    try:
        from kvass.testing.run import run_conformance
    except ImportError as error:
        raise ModelFilesError(
            f"the suites need pytest and hypothesis: pip install 'kvass[test]' ({error})"
        ) from error
    raise typer.Exit(run_conformance(target))

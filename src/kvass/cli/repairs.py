"""kvass quality --blends: what a model's certificate says of repairing moved passages."""

from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kvass.cli.output import out, print_json
from kvass.config import Settings
from kvass.errors import ModelFilesError
from kvass.keys import Namespace
from kvass.quality import Budget, Gate, Verdict, calibrated_folder
from kvass.quality.blends import BlendCertificate, BlendMeasured
from kvass.reuse.selectors import DEFAULT


def show_repairs(namespace: Namespace, settings: Settings, as_json: bool) -> None:
    """Print what repair was measured to cost a model, and which of it the settings' budget allows.

    Raises ModelFilesError where there is no certificate that holds.
    """
    gate = Gate(settings.models_path)
    budget = Budget.of(settings)
    certificate = gate.blends(namespace)
    if certificate is None:
        raise ModelFilesError(gate.blend(namespace, DEFAULT, 1.0, budget).reason)
    judged = [
        (one, certificate.verdict(one.method, one.chosen, budget))
        for one in sorted(
            certificate.measured, key=lambda one: (one.method != DEFAULT, one.method, one.chosen)
        )
    ]
    if as_json:
        print_json(
            {
                "model": certificate.model,
                "folder": str(calibrated_folder(settings.models_path, namespace)),
                "certificate": certificate.digest,
                "prompts": certificate.prompts,
                "no_context": certificate.no_context,
                "budget": budget._asdict(),
                "measured": [_described(one, verdict) for one, verdict in judged],
            }
        )
        return
    out.print(_table(certificate, judged))
    lone = f"{certificate.prompts} prompts, KL {certificate.no_context:.3g} without any passage"
    within = f"budget: KL {budget.kl:g} a token, {budget.facts_lost:.1%} of facts lost"
    out.print(f"{lone}; {within}; certificate {certificate.digest[:12]}", soft_wrap=True)
    for one, verdict in judged:
        if one.method == DEFAULT and not verdict.allowed:
            out.print(escape(f"not used: {verdict.reason}"), soft_wrap=True)


def _described(one: BlendMeasured, verdict: Verdict) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(one)
    return {**described, "allowed": verdict.allowed, "reason": verdict.reason}


def _table(certificate: BlendCertificate, judged: list[tuple[BlendMeasured, Verdict]]) -> Table:
    table = Table(title=escape(certificate.model), title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    for title in ("chosen", "charged", "KL", "95%", "same top", "facts lost", "at most"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("used", no_wrap=True)
    for one, verdict in judged:
        facts = [f"{one.facts_lost} of {one.facts_tried}", f"{one.facts_lost_high:.2%}"]
        table.add_row(
            escape(one.method), f"{one.chosen:.1%}", f"{one.fraction:.1%}", f"{one.kl_mean:.2g}",
            f"{one.kl_low:.2g}..{one.kl_high:.2g}", f"{one.top1:.1%}",
            *(facts if one.facts_tried else ("not tried", "")),
            "yes" if verdict.allowed else "[yellow]no[/yellow]",
        )  # fmt: skip
    return table

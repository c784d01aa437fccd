"""kvass recode: brings what a tier holds to another codec."""

from typing import Annotated

import typer
from rich.markup import escape

from kvass.cache import KVCache, StoredChunk
from kvass.cli.looking import known_tier
from kvass.cli.output import AsJson, err, out, print_json, progress, size
from kvass.codecs.registry import is_lossless
from kvass.config import Settings
from kvass.errors import CorruptObjectError, TierError
from kvass.keys import Namespace
from kvass.quality import Budget, Gate


def recode(
    to: Annotated[str, typer.Option(help="Codec: raw, lossless, int8, kivi4, kivi2, q1 to q4.")],
    tier: Annotated[str, typer.Option(help="Tier (host, disk, or a remote one).")],
    match: Annotated[
        str | None, typer.Option(help="Only objects of which model or address has this in it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bring what a tier holds to another codec; of all tenants. Interrupted, another run goes on.

    A lossy codec needs the model's certificate, and takes exact objects out of the tier; exit 1 where
    objects failed, or were refused.

    Example: kvass recode --to lossless --tier disk
    """
    settings = Settings.load()
    is_lossless(to)  # what is wrong is said before tiers are opened
    with KVCache.open(settings) as cache:
        known_tier(cache, tier)
        usage = cache.stats().get(tier)
        seen = _Seen(match)
        try:
            with progress(f"recoding to {to}", usage.objects if usage else None) as advance:
                counts = cache.recode(to, tier, seen.matches, lambda _: advance())
        except KeyboardInterrupt:
            err.print("kvass: interrupted; what is stored is whole, and another run goes on")
            raise typer.Exit(130) from None
    refused = seen.refused(to, settings)
    if as_json:
        print_json({**counts._asdict(), "refused": refused})
    else:
        out.print(
            f"{counts.objects:,} objects: {counts.recoded:,} recoded, {counts.already:,} were {to} already, "
            f"{counts.left:,} left, {counts.failed:,} failed"
        )
        if counts.recoded:
            before, after = counts.bytes_before, counts.bytes_after
            out.print(f"those recoded: {size(before)} before, {size(after)} after")
        for reason in refused:
            err.print(f"[red]kvass: {escape(reason)}[/red]", soft_wrap=True)
    raise typer.Exit(1 if counts.failed or refused else 0)


class _Seen:
    """Which objects are meant, and of which namespaces they are: a header is read once for each of these."""

    def __init__(self, text: str | None):
        self._text = text
        self._spaces: dict[bytes, Namespace] = {}
        self._meant: set[bytes] = set()

    def matches(self, stored: StoredChunk) -> bool:
        root = stored.entry.root
        if root not in self._spaces:
            try:
                self._spaces[root] = stored.header().namespace
            except (CorruptObjectError, KeyError, TierError, OSError):
                return self._text is None or self._text in stored.address
        meant = self._text is None or self._text in stored.address or self._text in self._spaces[root].model
        if meant:
            self._meant.add(root)
        return meant

    def refused(self, to: str, settings: Settings) -> list[str]:
        """Why objects that are meant may not be of a lossy codec."""
        if is_lossless(to):
            return []
        gate = Gate(settings.models_path)
        budget = Budget.of(settings)
        reasons = dict[str, None]()
        for root in sorted(self._meant):
            space = self._spaces[root]
            verdict = gate.verdict(space, to, budget)
            if space.state == "exact" and space.layout != "canonical":
                reasons[f"KV of {space.model} is in an engine's own layout, which no lossy codec takes"] = (
                    None
                )
            elif space.state == "exact" and not verdict.allowed:
                reasons[f"{to} is refused: {verdict.reason}"] = None
        return list(reasons)

"""kvass top: a live view of the tiers and, with --url, of a server."""

import time
from collections import deque
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvass.cache import KVCache
from kvass.cli.output import AsJson, out, print_json, size
from kvass.cli.scraping import EMPTY, Look, UnreachableError, checked, fetch, figures
from kvass.config import Settings
from kvass.errors import InputError
from kvass.serve.tenants import OPERATOR, clear_key

_WINDOW = 60.0
"""Seconds that rates and the recent figures are taken over."""


def top(
    url: Annotated[
        str | None, typer.Option(help="A server to look at too, such as http://127.0.0.1:8000.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="The operator's API key; else the one that the setting api_keys holds in clear."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show live how full the tiers are and what a server does; Ctrl-C ends it.

    Example: kvass top --url http://127.0.0.1:8000
    """
    if as_json and not once:
        raise InputError("--json prints one frame; give --once with it")
    settings = Settings.load()
    server = None if url is None else _Server(checked(url), key or clear_key(settings, OPERATOR))
    with KVCache.open(settings) as cache:
        if server is not None and once:
            server.look()
            time.sleep(min(interval, 1.0))  # without a second look there are no rates
        if as_json:
            print_json(_frame(cache, server))
        elif once:
            out.print(_shown(_frame(cache, server)))
        else:
            _live(cache, server, interval)


def _live(cache: KVCache, server: "_Server | None", interval: float) -> None:
    with suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            live.update(_shown(_frame(cache, server)), refresh=True)
            time.sleep(interval)


class _Server:
    """A server and the last looks at it."""

    def __init__(self, url: str, key: str | None):
        self.url = url
        self._key = key
        self._looks: deque[Look] = deque()

    def look(self) -> str | None:
        """Look again; why that failed, if it did."""
        try:
            self._looks.append(fetch(self.url, self._key))
        except UnreachableError as error:
            self._looks.clear()
            return str(error)
        while len(self._looks) > 2 and self._looks[-1].at - self._looks[0].at > _WINDOW:
            self._looks.popleft()
        return None

    def frame(self) -> dict[str, Any]:
        """All figures after one more look."""
        error = self.look()
        if error is not None:
            return {"url": self.url, "error": error}
        now = self._looks[-1]
        return {
            "url": self.url,
            "error": None,
            "queued": now.total("kvass_queued_requests"),
            "active": now.total("kvass_active_requests"),
            "recent": figures(self._looks[0], now) if len(self._looks) > 1 else None,
            "since_start": figures(EMPTY, now),
        }


def _frame(cache: KVCache, server: _Server | None) -> dict[str, Any]:
    return {
        "tiers": {name: usage._asdict() for name, usage in cache.stats().items()},
        "unavailable": cache.unavailable,
        "server": None if server is None else server.frame(),
    }


# -- printing ---------------------------------------------------------------------------------------


def _shown(frame: dict[str, Any]) -> Group:
    tiers = Table("tier", "used", "budget", "", "objects")
    for name, usage in frame["tiers"].items():
        share = usage["bytes"] / usage["budget"] if usage["budget"] else 0.0
        bar = "█" * round(20 * min(share, 1.0))
        tiers.add_row(
            name, size(usage["bytes"]), size(usage["budget"]), f"{bar:░<20} {share:4.0%}",
            f"{usage['objects']:,}",
        )  # fmt: skip
    parts: list[Any] = [tiers]
    parts += [f"no {name} tier: {escape(reason)}" for name, reason in frame["unavailable"].items()]
    server = frame["server"]
    if server is not None:
        parts.append(escape(server["error"]) if server["error"] else _server_table(server))
    return Group(*parts)


def _server_table(server: dict[str, Any]) -> Table:
    recent, whole = server["recent"], server["since_start"]
    last = f"last {recent['seconds']:.0f} s" if recent else "lately"
    table = Table(escape(server["url"]), last, "since its start")

    def row(label: str, name: str, show: Any, key: str | None = None) -> None:
        cells = []
        for one in (recent, whole):
            value = None if one is None else one[name] if key is None else one[name].get(key)
            cells.append("-" if value is None else show(value))
        table.add_row(label, *cells)

    table.add_row("queued, active", f"{server['queued']:.0f}, {server['active']:.0f}", "")
    row("requests a second", "requests_per_second", "{:.2f}".format)
    row("requests", "requests", "{:,.0f}".format)
    row("tokens from the cache", "hit_share", "{:.1%}".format)
    for hit in whole["ttft_median_seconds"]:
        row(f"time to first token, hit {hit}", "ttft_median_seconds", "{:.3f} s".format, hit)
    for tier in whole["load_bytes_per_second"]:
        row(f"loaded from {tier} a second", "load_bytes_per_second", size, tier)
    for tier in whole["store_bytes_per_second"]:
        row(f"stored in {tier} a second", "store_bytes_per_second", size, tier)
    row("errors", "errors", "{:,.0f}".format)
    row("evicted objects", "evicted_objects", "{:,.0f}".format)
    return table

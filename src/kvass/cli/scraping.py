"""A server's /metrics as figures: what happened in all, and between two looks."""

import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from kvass.errors import InputError, KvassError

Samples = dict[str, list[tuple[dict[str, str], float]]]

_SECONDS = 2.0
_MAX_BYTES = 8 << 20
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A server of one's own is not behind the proxy that a shell may name."""


class Look(NamedTuple):
    """What /metrics said at one moment (seconds of the monotonic clock)."""

    at: float
    samples: Samples

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of a name that have these labels."""
        return sum(value for found, value in self.samples.get(name, ()) if labels.items() <= found.items())

    def values(self, name: str, label: str) -> list[str]:
        """The values of a label, in the order of the server."""
        return list(dict.fromkeys(found[label] for found, _ in self.samples.get(name, ()) if label in found))


EMPTY = Look(0.0, {})


class UnreachableError(KvassError):
    """The server's metrics cannot be had at present; the message says why."""


def fetch(url: str, key: str | None) -> Look:
    """Look at `url`/metrics. Raises UnreachableError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)  # noqa: S310 - checked
        with _DIRECT.open(request, timeout=_SECONDS) as answer:
            return Look(time.monotonic(), parsed(answer.read(_MAX_BYTES).decode()))
    except urllib.error.HTTPError as error:
        hint = "; give the operator's key with --key" if error.code in (401, 403) else ""
        raise UnreachableError(f"{url} answers /metrics with {error.code}{hint}") from error
    except (OSError, HTTPException, ValueError, UnicodeError) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(f"no metrics from {url}: {reason}") from error


def checked(url: str) -> str:
    """The URL, if it is one of a server. Raises InputError."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url is {url!r}; it must begin with http:// or https://")
    return url


def parsed(text: str) -> Samples:
    """Prometheus' text format as series by name. Raises ValueError."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return samples


def figures(before: Look, now: Look) -> dict[str, Any]:
    """What happened between two looks; since the server's start where `before` is EMPTY, without rates then.

    A share or a median of nothing is None.
    """
    seconds = now.at - before.at if before is not EMPTY else None

    def gained(name: str, **labels: str) -> float:
        # a server that was started anew counts from nothing again
        return max(0.0, now.total(name, **labels) - before.total(name, **labels))

    def rate(name: str, **labels: str) -> float | None:
        return gained(name, **labels) / seconds if seconds else None

    requests = gained("kvass_requests_total") - gained("kvass_requests_total", endpoint="/metrics")
    hit, miss = (gained("kvass_lookup_tokens_total", result=result) for result in ("hit", "miss"))
    return {
        "seconds": seconds,
        "requests": requests,  # without looks like this one
        "requests_per_second": requests / seconds if seconds else None,
        "hit_share": hit / (hit + miss) if hit + miss else None,
        "ttft_median_seconds": {
            one: _median(before, now, "kvass_ttft_seconds", hit=one) for one in ("none", "part", "most")
        },
        "load_bytes_per_second": {
            tier: rate("kvass_load_bytes_total", tier=tier)
            for tier in now.values("kvass_load_bytes_total", "tier")
        },
        "store_bytes_per_second": {
            tier: rate("kvass_store_bytes_total", tier=tier)
            for tier in now.values("kvass_store_bytes_total", "tier")
        },
        "errors": gained("kvass_errors_total"),
        "evicted_objects": gained("kvass_evicted_objects_total"),
    }


def _median(before: Look, now: Look, name: str, **labels: str) -> float | None:
    """The median of a histogram, linear within its bucket; the last bound where it lies past that."""
    bucket = f"{name}_bucket"
    counts = [
        (float(bound), now.total(bucket, le=bound, **labels) - before.total(bucket, le=bound, **labels))
        for bound in now.values(bucket, "le")
    ]
    counts.sort()
    if not counts or counts[-1][1] <= 0:
        return None
    half, low, below = counts[-1][1] / 2, 0.0, 0.0
    for bound, count in counts:
        if count >= half:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (half - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low

"""What a request may ask of the connector, in its `kv_transfer_params` under `kvass`."""

import logging
import math
from typing import Any, Final, NamedTuple

from kvass import metrics
from kvass.quality import DEFAULT_BUDGET, Budget

log = logging.getLogger("kvass.vllm")

_warned: set[str] = set()
_FIELDS: Final = ("load", "store", "segments", "reuse", "max_fraction", "budget")


class Permissions(NamedTuple):
    """Whether a request's KV may be loaded and stored; `segments`: (start, stop) of its parts, in tokens.

    The segments are for state that is edited, of which there is none in this version. `reuse`: whether
    passages that were read elsewhere may be used, of whose layers `max_fraction` may be computed anew, within
    `budget` (None: the settings').
    """

    load: bool = True
    store: bool = True
    segments: tuple[tuple[int, int], ...] = ()
    reuse: bool = False
    max_fraction: float = 0.15
    budget: Budget | None = None


_PLAIN: Final = Permissions()


def permissions(params: Any, standard: Permissions = _PLAIN) -> Permissions:
    """Read a request's wishes, `standard` where it has none. One that is malformed is ignored, counted and
    logged once."""
    asked = params.get("kvass") if isinstance(params, dict) else None
    if asked is None:
        return standard
    if not isinstance(asked, dict):
        _ignore("kvass", asked)
        return standard
    found = standard
    for name, value in asked.items():
        if name == "load" and isinstance(value, bool):
            found = found._replace(load=value)
        elif name == "store" and isinstance(value, bool):
            found = found._replace(store=value)
        elif name == "segments" and _are_segments(value):
            found = found._replace(segments=tuple((start, stop) for start, stop in value))
        elif name == "reuse" and value in ("prefix", "anywhere"):
            found = found._replace(reuse=value == "anywhere")
        elif name == "max_fraction" and _is_share(value) and value > 0:
            found = found._replace(max_fraction=float(value))
        elif name == "budget" and (budget := _budget(value, standard.budget or DEFAULT_BUDGET)) is not None:
            found = found._replace(budget=budget)
        else:
            _ignore(name if name in _FIELDS else "an unknown field", value)
    return found


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _budget(value: Any, standard: Budget) -> Budget | None:
    if not isinstance(value, dict) or not value.keys() <= {"kl", "facts_lost"}:
        return None
    kl, facts = value.get("kl", standard.kl), value.get("facts_lost", standard.facts_lost)
    if type(kl) not in (int, float) or not 0 <= kl < math.inf or not _is_share(facts):
        return None
    return Budget(float(kl), float(facts))


def _are_segments(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(type(number) is int for number in pair)
        and 0 <= pair[0] < pair[1]
        for pair in value
    )


def _ignore(name: str, value: Any) -> None:
    metrics.errors.labels("vllm", "kv_transfer_params").inc()
    if name not in _warned:
        _warned.add(name)
        log.warning(
            "kvass: a request's kv_transfer_params hold %s of type %s, which is ignored; load and store are "
            "true or false, segments a list of [start, stop], reuse 'prefix' or 'anywhere', max_fraction "
            "above 0 and at most 1, budget a kl and facts_lost; counted in kvass_errors_total from now on",
            name,
            type(value).__name__,
        )

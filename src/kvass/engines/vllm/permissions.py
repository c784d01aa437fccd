"""What a request may ask of the connector, in its `kv_transfer_params` under `kvass`."""

import logging
from typing import Any, Final, NamedTuple

from kvass import metrics

log = logging.getLogger("kvass.vllm")

_warned: set[str] = set()
_FIELDS: Final = ("load", "store", "segments")


class Permissions(NamedTuple):
    """Whether a request's KV may be loaded and stored; `segments`: (start, stop) of its parts, in tokens.

    The segments are for state that is not exact, of which there is none in this version.
    """

    load: bool = True
    store: bool = True
    segments: tuple[tuple[int, int], ...] = ()


def permissions(params: Any) -> Permissions:
    """Read a request's wishes. One that is malformed is ignored, counted and logged once."""
    asked = params.get("kvass") if isinstance(params, dict) else None
    if asked is None:
        return Permissions()
    if not isinstance(asked, dict):
        _ignore("kvass", asked)
        return Permissions()
    found = Permissions()
    for name, value in asked.items():
        if name == "load" and isinstance(value, bool):
            found = found._replace(load=value)
        elif name == "store" and isinstance(value, bool):
            found = found._replace(store=value)
        elif name == "segments" and _are_segments(value):
            found = found._replace(segments=tuple((start, stop) for start, stop in value))
        else:
            _ignore(name if name in _FIELDS else "an unknown field", value)
    return found


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
            "true or false, segments a list of [start, stop]; counted in kvass_errors_total from now on",
            name,
            type(value).__name__,
        )

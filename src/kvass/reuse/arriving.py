"""Repair while segments arrive: layers are loaded and put in place while the model computes those below."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvass.container import Array
from kvass.errors import KvassError
from kvass.reuse.assembly import check_apart, lay, turning
from kvass.reuse.prompt import Prompt
from kvass.reuse.repair import Repaired, repair
from kvass.reuse.selectors.base import Selector
from kvass.runner import Workspace
from kvass.workers import Workers

log = logging.getLogger("kvass.reuse")

_PATIENCE = 5.0
"""Seconds that a blend which was given up waits for a read to end; what it reads later is put nowhere."""


class Arriving(Protocol):
    """A passage of a prompt whose KV can be had layer by layer: `start` in the prompt, `read_at` where it
    stood when the model read it."""

    @property
    def start(self) -> int: ...

    @property
    def read_at(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def rows(self, layer: int, name: str) -> Array:
        """`k` or `v` of one of the model's layers, `[tokens, heads, dim]`. Raises KvassError or OSError where
        it cannot be had; called by one thread at a time."""


class Lost(Exception):
    """A layer will not come, or not in time."""


class Arrival:
    """Brings segments to their places, layer by layer from the first on, in a thread of its own; what is
    waited for comes next."""

    def __init__(
        self,
        workspace: Workspace,
        segments: Sequence[Arriving],
        seconds: float | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ):
        """Begins at once; ends with `close`. `seconds`: all must be there by then; `given_up`: asked before
        each layer, whether nobody waits for this any more. Raises InputError where segments overlap or do not
        fit the workspace, UnsupportedModelError for keys that cannot be moved."""
        check_apart([(one.start, one.start + one.tokens) for one in segments])
        spec = workspace.spec
        self._places = spec.places
        self._rates = turning(spec)
        groups = range(len(spec.groups))
        self._segments = [
            (one, [workspace.arrays(group, one.start, one.start + one.tokens) for group in groups])
            for one in segments
        ]
        self._until = None if seconds is None else time.monotonic() + seconds
        self._given_up = given_up
        self._changed = threading.Condition()
        self._left = [(layer, name) for layer in self._places for name in ("k", "v")]
        self._there: set[tuple[int, str]] = set()
        self._error: BaseException | None = None
        self._over = False
        self._workers = Workers(1, "kvass-arriving")
        self._workers.submit(self._bring)

    def wait(self, layer: int, names: Sequence[str]) -> None:
        """Return once these arrays of a layer are in place. Raises Lost where they will not be, or not in
        time, or nobody wants them any more."""
        if self._given_up():
            raise Lost("a blend was given up")
        wanted = {(layer, name) for name in names}
        with self._changed:
            self._left.sort(key=lambda one: one not in wanted)
            left = None if self._until is None else self._until - time.monotonic()
            came = self._changed.wait_for(lambda: self._error is not None or wanted <= self._there, left)
            error = self._error
        if error is not None or not came:
            raise Lost(f"layer {layer} {'will not come' if error else 'is late'}") from error

    def _bring(self) -> None:
        try:
            while (wanted := self._next()) is not None:
                self._bring_one(*wanted)
        except Exception as error:  # whoever waits must come to know, whatever it is
            if not isinstance(error, KvassError | OSError | KeyError):
                log.exception("kvass: segments could not be put in place; treated as a miss")
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> tuple[int, str] | None:
        with self._changed:
            return self._left.pop(0) if self._left and not self._over else None

    def _bring_one(self, layer: int, name: str) -> None:
        group, place = self._places[layer]
        for segment, targets in self._segments:
            found = segment.rows(layer, name)
            with self._changed:
                if self._over:
                    return
                distance = segment.start - segment.read_at
                lay(targets[group][name][place], found, name, self._rates[group], distance)
        with self._changed:
            self._there.add((layer, name))
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing is written to the workspace any more."""
        with self._changed:
            self._over = True
        self._workers.close(_PATIENCE)


def blend(
    prompt: Prompt,
    workspace: Workspace,
    segments: Sequence[Arriving],
    selector: Selector,
    fraction: float,
    seconds: float | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> Repaired | None:
    """Repair a prompt whose exact prefix is in the workspace, while its segments arrive; None, and the
    workspace is of no use any more, where one of them cannot be had within so many seconds, or it was
    `given_up`, which is asked before each layer."""
    arrival = Arrival(workspace, segments, seconds, given_up)
    workspace.arriving(arrival.wait)
    try:
        return repair(prompt, workspace, selector, fraction)
    except Lost:
        return None
    finally:
        workspace.arriving(None)
        arrival.close()

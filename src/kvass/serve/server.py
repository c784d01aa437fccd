"""Puts a server together, runs it, and ends it without losing what was computed."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp, Scope

from kvass.config import Settings
from kvass.serve.guard import Guard
from kvass.serve.listening import url_of
from kvass.serve.protocol import with_deadline
from kvass.serve.tenants import Tenants

if TYPE_CHECKING:
    from kvass.serve.address import Address

_OPEN_PATHS = ("/health", "/healthz", "/readyz", "/openapi.json")

_IDLE_CONNECTIONS = 256

_FAREWELL_SECONDS = 1.0
"""In which who is cut off must take that answer."""


def run(
    settings: Settings,
    listening: socket.socket,
    tenants: Tenants,
    *,
    model: str,
    dtype: str,
    ready: Callable[[str, str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; `ready(url, model)` is called once requests are taken.

    The first signal lets running requests finish within the grace and stores what they computed; a second
    one ends at once, which loses nothing that was stored.
    """
    from kvass.cache import KVCache
    from kvass.engines.transformers import Engine, load_model
    from kvass.engines.transformers.hosting import kept_under
    from kvass.serve.answers import Answers
    from kvass.serve.app import Service, make_app
    from kvass.serve.prompts import ChatEncoder
    from kvass.serve.scheduler import Scheduler

    with listening, contextlib.ExitStack() as stack:
        loaded = load_model(model, dtype=dtype, models_path=settings.models_path)  # type: ignore[arg-type]
        cache = stack.enter_context(KVCache.open(settings))
        engine = Engine(
            loaded.model, cache, tokenizer=loaded.tokenizer, tenant_salt=settings.tenant_salt,
            spare_pools=settings.serve_slots, shared=kept_under(loaded, settings, settings.tenant_salt),
            allow_lossy=settings.allow_lossy,
        )  # fmt: skip
        answers = Answers(settings.state_path)
        stack.callback(answers.close)
        scheduler = Scheduler(engine, slots=settings.serve_slots, queue=settings.serve_queue)
        stack.callback(scheduler.close, 0.0)
        encoder = ChatEncoder(loaded, answers, max_tokens=engine.max_tokens)
        service = Service(loaded.name, int(time.time()), engine, scheduler, encoder, tenants, settings)
        _serve(
            make_app(service), settings, listening, tenants,
            partial(ready, url_of(listening), loaded.name),
            partial(scheduler.close, settings.serve_grace_seconds),
        )  # fmt: skip


def run_upstream(
    settings: Settings,
    listening: socket.socket,
    tenants: Tenants,
    address: "Address",
    *,
    ready: Callable[[str], None],
) -> None:
    """Serve what an upstream answers, until SIGINT or SIGTERM; `ready(url)` is called once requests are
    taken. Signals are handled as by `run`."""
    from kvass.serve.upstream import Upstream

    with listening:
        upstream = Upstream(address, settings, tenants)
        _serve(
            upstream.app(), settings, listening, tenants,
            partial(ready, url_of(listening)),
            partial(upstream.close, settings.serve_grace_seconds),
        )  # fmt: skip


def _serve(
    app: ASGIApp,
    settings: Settings,
    listening: socket.socket,
    tenants: Tenants,
    ready: Callable[[], None],
    end: Callable[[], None],
) -> None:
    """`end`: see `_Server`."""
    guarded = Guard(
        app,
        tenant_of=partial(_tenant_of, tenants),
        body_bytes=settings.serve_body_bytes,
        receive_seconds=settings.serve_receive_seconds,
    )
    # asyncio does it only for sockets that were made with their protocol's number, which these are not:
    # a piece of an answer would wait for the client to confirm the one before, about 40 ms
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for one in (signal.SIGINT, signal.SIGTERM):  # which uvicorn puts back while the rest is stored
        signal.signal(one, _end_at_once)
    _Server(_config(guarded, settings), ready, end).run(sockets=[listening])


def _tenant_of(tenants: Tenants, scope: Scope) -> str | None:
    """The empty name where there are no tenants, or the path is for everybody."""
    if not tenants or scope["path"] in _OPEN_PATHS:
        return ""
    header = dict(scope["headers"]).get(b"authorization", b"")
    return tenants.of_header(header.decode("latin-1"))


def _config(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=with_deadline(settings.serve_receive_seconds),
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=settings.serve_slots + settings.serve_queue + _IDLE_CONNECTIONS,
        timeout_graceful_shutdown=settings.serve_grace_seconds + _FAREWELL_SECONDS,  # type: ignore[arg-type]
    )


def _end_at_once(sig: int, frame: FrameType | None) -> None:
    os._exit(128 + sig)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], end: Callable[[], None]):
        """`end` lets requests finish, tells those that cannot, and returns when there are none."""
        super().__init__(config)
        self._ready = ready
        self._end = end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Told when signals are handled as well: who starts a server may stop it at once."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests end before their connections do, so that none goes without an answer."""
        ending = asyncio.create_task(asyncio.to_thread(self._end))
        await super().shutdown(sockets)
        await ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks, the second does not: stores are whole or absent at any instant."""
        if self.should_exit:
            _end_at_once(sig, frame)
        self.should_exit = True  # not captured: it would be raised again at the end

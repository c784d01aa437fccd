"""The server before an upstream: tenants, bounds and metrics here, answers from another OpenAI server."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import unquote

import httpx2 as httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvass import metrics
from kvass.config import Settings
from kvass.errors import ConfigError
from kvass.serve.address import Address
from kvass.serve.common import ERROR_HANDLERS, metrics_page, until_gone
from kvass.serve.errors import ApiError
from kvass.serve.forwarding import Answer, Exchange
from kvass.serve.guard import TENANT
from kvass.serve.tenants import OPERATOR, Tenants, tenant_salt

_OPERATORS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths that change the upstream for everybody."""

_CONNECT_SECONDS = 5.0
_PROBE_SECONDS = 2.0
_IDLE_SECONDS = 2.0
"""Less than vLLM's, so that no request meets a connection that is just being closed."""


class Upstream:
    """The routes over one upstream."""

    def __init__(self, address: Address, settings: Settings, tenants: Tenants):
        """Raises ConfigError for settings that cannot be had before an upstream."""
        if tenants.public:
            raise ConfigError(
                "public_tenants cannot be had before an upstream, where each tenant has one salt; unset it"
            )
        self._address = address
        self._settings = settings
        self._tenants = tenants
        self._via = f"1.1 kvass-{uuid.uuid4().hex}"
        self._running: Counter[str] = Counter()
        self._stopping = False
        self._cut = asyncio.Event()
        self._probing = asyncio.Lock()
        self._probed: tuple[float, bool] = (float("-inf"), False)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def app(self) -> Starlette:
        """The routes."""
        made = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/health", self._readyz),
                Route("/metrics", self._metrics),
                Route("/v1/{rest:path}", _Forward(self)),
            ],
            exception_handlers=ERROR_HANDLERS,
            lifespan=self._lifespan,
        )
        made.router.redirect_slashes = False
        return made

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)  # an answer takes as long as it takes
        limits = httpx.Limits(keepalive_expiry=_IDLE_SECONDS)
        async with self._address.client(timeout=timeout, limits=limits) as self._client:
            yield

    def close(self, grace: float) -> None:
        """Take no more requests, let running ones finish for `grace` seconds, then end those left. Called
        by another thread than the loop's."""
        self._stopping = True
        end = time.monotonic() + grace
        while self._running.total() and time.monotonic() < end:
            time.sleep(0.05)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut.set)

    # -- what is answered here ------------------------------------------------------------------------

    async def _healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, _: Request) -> Response:
        if self._stopping:
            raise ApiError(503, "not ready: the server is stopping")
        if not await self._answers():
            raise ApiError(503, "not ready: the upstream does not answer")
        return JSONResponse({"status": "ready"})

    async def _answers(self) -> bool:
        """Whether the upstream does. It is asked once a second at most, since anybody may ask here."""
        assert self._client is not None
        async with self._probing:
            at, answers = self._probed
            if time.monotonic() - at > 1.0:
                try:
                    async with asyncio.timeout(_PROBE_SECONDS):
                        reply = await self._client.get(self._address.to(b"/health"))
                    answers = reply.status_code < 500
                except (httpx.HTTPError, TimeoutError):
                    answers = False
                self._probed = (time.monotonic(), answers)
            return answers

    async def _metrics(self, request: Request) -> Response:
        return metrics_page(self._tenants, request.scope[TENANT])

    # -- what is answered there -----------------------------------------------------------------------

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with what the upstream answers. Ends with its client, and past the grace of a stop."""
        self._check(scope)
        body: bytes = (await receive())["body"]  # all of it: the guard has read it
        tenant: str = scope[TENANT]
        assert self._client is not None
        salt = tenant_salt(self._settings, tenant or None)
        answer = Answer(send)
        with self._admitted(tenant):
            exchange = Exchange(self._client, self._address, salt, self._via)
            work = asyncio.create_task(exchange.run(scope, body, answer))
            gone, cut = asyncio.create_task(until_gone(receive)), asyncio.create_task(self._cut.wait())
            try:
                await asyncio.wait((work, gone, cut), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    await work
                elif not gone.done():
                    await _ended(work)
                    await answer.fail(503, "the server is stopping")
            finally:
                for task in (work, gone, cut):
                    await _ended(task)

    def _check(self, scope: Scope) -> None:
        if {".", ".."} & set(unquote(scope["path"]).split("/")):
            raise ApiError(404, "Not Found")
        if self._tenants and scope["path"] in _OPERATORS and scope[TENANT] != OPERATOR:
            raise ApiError(403, f"this concerns all tenants; use a key of the tenant {OPERATOR!r}")
        if any(name == b"via" and self._via.encode() in value for name, value in scope["headers"]):
            raise ApiError(508, "the upstream is this server itself; start it with another --upstream")

    @contextmanager
    def _admitted(self, tenant: str) -> Iterator[None]:
        if self._stopping:
            raise ApiError(503, "the server is stopping", headers={"Retry-After": "5"})
        most = self._settings.serve_slots + self._settings.serve_queue
        if self._running[tenant] >= most:
            message = f"{most} requests are being answered already (serve_slots, serve_queue)"
            raise ApiError(429, message, headers={"Retry-After": "1"})
        self._running[tenant] += 1
        metrics.active_requests.inc()
        try:
            yield
        finally:
            self._running[tenant] -= 1
            metrics.active_requests.dec()


class _Forward:
    """The endpoint of all methods and paths; of a function starlette would take GET alone."""

    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._upstream.forward(scope, receive, send)


async def _ended(task: "asyncio.Task[Any]") -> None:
    """Cancel a task, and wait until it has given back what it held."""
    task.cancel()
    await asyncio.wait((task,))

"""Stands before the app: keys, then bodies, in time and within their bound; every request is counted."""

import asyncio
import json
import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvass import metrics
from kvass.serve.errors import FAULT, NO_KEY, error_body

log = logging.getLogger("kvass.serve")

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/healthz",
    "/readyz", "/metrics",
)  # fmt: skip

ARRIVED = "kvass.arrived"
"""Where a request's scope says when its body was there, by `time.perf_counter`."""

TENANT = "kvass.tenant"
"""Where it says whose request it is."""


class _Gone(Exception):
    """The client went away before it had sent its request."""


class Guard:
    """Reads a request's body before the app sees it, so that no route has to think of slow or huge ones."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tenant_of: Callable[[Scope], str | None],
        body_bytes: int,
        receive_seconds: float,
    ):
        """`tenant_of`: whose request it is, None where it lacks the key that it needs.
        `receive_seconds`: also those in which a client must take a piece of its answer."""
        self._app = app
        self._tenant_of = tenant_of
        self._body_bytes = body_bytes
        self._receive_seconds = receive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # what is counted where the client went away first

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                async with asyncio.timeout(self._receive_seconds):
                    await send(message)
            except TimeoutError:
                raise ConnectionResetError("the client does not take its answer") from None

        try:
            scope[TENANT] = self._tenant_of(scope)
            if scope[TENANT] is None:
                raise _Refused(401, NO_KEY)
            body = await self._body(scope, receive)
            scope[ARRIVED] = time.perf_counter()
            await self._app(scope, _replay(body, receive), counted)
        except (_Gone, ConnectionError):
            pass
        except _Refused as refusal:
            await _answer(counted, refusal.status, str(refusal))
        except Exception:
            log.exception("kvass: a request failed")
            metrics.failed_requests.inc()
            if status == 499:
                await _answer(counted, 500, FAULT)
        finally:
            metrics.requests.labels(_endpoint(scope["path"]), str(status)).inc()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._body_bytes:
            raise self._too_large()
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self._receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > self._body_bytes:
                        raise self._too_large()
                    pieces.append(piece)
                    if not message.get("more_body"):
                        return b"".join(pieces)
        except TimeoutError:
            seconds = self._receive_seconds
            raise _Refused(408, f"the request's body did not arrive within {seconds:g} s") from None

    def _too_large(self) -> "_Refused":
        return _Refused(413, f"the request's body is over {self._body_bytes} bytes (serve_body_bytes)")


class _Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def _endpoint(path: str) -> str:
    return path if path in ENDPOINTS else "other"


def _replay(body: bytes, receive: Receive) -> Receive:
    """The whole body first; then whatever comes, which is the client's going away."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


async def _answer(send: Send, status: int, message: str) -> None:
    code = "invalid_api_key" if status == 401 else None
    body = json.dumps(error_body(status, message, code=code)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""One request on its way to an upstream and its answer on the way back, piece by piece."""

import json
import logging
import re
import uuid
from typing import NamedTuple

import httpx2 as httpx
from starlette.types import Scope, Send

from kvass import metrics
from kvass.serve.address import Address
from kvass.serve.errors import error_body
from kvass.serve.rewriting import Lines, annotated, rewrite

log = logging.getLogger("kvass.serve")

Headers = list[tuple[bytes, bytes]]

_ANNOTATED = ("/v1/chat/completions", "/v1/completions")
"""Whose answers get `kvass`."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_HOP_BY_HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip
_REPLACED = frozenset((b"host", b"content-length", b"expect", b"accept-encoding", b"via", b"x-request-id"))
_SECRETS = frozenset((b"authorization", b"cookie", b"x-api-key", b"api-key"))
"""A client's own, which are nobody else's business."""

_WHOLE_BYTES = 4 << 20
"""An answer that is larger goes on as it comes, without `kvass` in it."""


class _CutOff(ConnectionError):
    """An answer that has begun and cannot be ended well: its connection must be closed."""


class Answer:
    """What has been sent to a client, so that an answer can be ended in a way that its client sees."""

    def __init__(self, send: Send):
        self._send = send
        self.started = False
        self.is_events = False

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        """Send a piece. Returns when the client has room for more."""
        if piece:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """Say that this was all."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, status: int, message: str) -> None:
        """End it with an error. Raises ConnectionError where only a closed connection can say so."""
        body = json.dumps(error_body(status, message)).encode()
        if not self.started:
            length = (b"content-length", str(len(body)).encode())
            await self.start(status, [(b"content-type", b"application/json"), length])
            await self.write(body)
            return await self.end()
        metrics.failed_requests.inc()
        if not self.is_events:
            raise _CutOff(message)
        await self.write(b"\n\ndata: " + body + b"\n\n")  # whatever line it came in
        await self.end()


class Exchange(NamedTuple):
    """One request. `salt`: for its `cache_salt`, empty for none; `via`: this server, in the header's form."""

    client: httpx.AsyncClient
    address: Address
    salt: str
    via: str

    async def run(self, scope: Scope, body: bytes, answer: Answer) -> None:
        """Ask the upstream, and answer with what it answers. Cancelling it ends both.

        Raises ApiError for a body that cannot be sent on, before anything was sent.
        """
        headers = httpx.Headers(scope["headers"])
        one_prompt = True
        if body:
            body, one_prompt = rewrite(body, headers.get("content-type", ""), self.salt)
        given = headers.get("x-request-id", "")
        identity = given if _ID.fullmatch(given) else f"kv-{uuid.uuid4().hex}"
        request = self.client.build_request(
            scope["method"],
            self.address.to(scope["raw_path"], scope["query_string"]),
            headers=self._onward(headers, identity),
            content=body or None,
        )
        try:
            reply = await self.client.send(request, stream=True)
        except httpx.HTTPError as error:
            return await answer.fail(502, self._told(error, "does not answer"))
        try:
            if reply.status_code == 401:  # what the client showed was accepted here
                await answer.fail(502, f"{self.address} refuses this server's key (upstream_api_key_file)")
            else:
                await self._pass_on(
                    scope["path"], reply, answer, _backward(reply.headers, identity), one_prompt
                )
        except httpx.HTTPError as error:
            await answer.fail(502, self._told(error, "broke off its answer"))
        finally:
            await reply.aclose()

    def _onward(self, headers: httpx.Headers, identity: str) -> Headers:
        dropped = _hop_by_hop(headers) | _REPLACED | _SECRETS
        via = ", ".join(filter(None, (headers.get("via"), self.via)))
        own = {"accept-encoding": "identity", "x-request-id": identity, "via": via}
        own |= self.address.authorization()
        return [
            *(pair for pair in headers.raw if pair[0] not in dropped),
            *((name.encode(), value.encode("latin-1")) for name, value in own.items()),
        ]

    def _told(self, error: httpx.HTTPError, what: str) -> str:
        message = f"{self.address} {what}: {str(error) or type(error).__name__}"
        log.warning("kvass: %s", message)
        return message

    async def _pass_on(
        self, path: str, reply: httpx.Response, answer: Answer, headers: Headers, one_prompt: bool
    ) -> None:
        kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
        answer.is_events = kind == "text/event-stream"
        known = path in _ANNOTATED and reply.status_code == 200 and "content-encoding" not in reply.headers
        if known and answer.is_events:
            await self._pass_events(reply, answer, headers, Lines(one_prompt=one_prompt))
        elif known and kind == "application/json":
            await self._pass_whole(reply, answer, headers, one_prompt)
        else:
            await answer.start(reply.status_code, headers)
            async for piece in reply.aiter_raw():
                await answer.write(piece)
            await answer.end()

    async def _pass_events(
        self, reply: httpx.Response, answer: Answer, headers: Headers, lines: Lines
    ) -> None:
        await answer.start(reply.status_code, _without_length(headers))
        async for piece in reply.aiter_raw():
            await answer.write(lines.feed(piece))
        await answer.write(lines.finish())
        if lines.done:
            return await answer.end()
        # a server that is being ended may well close its connections in order
        await answer.fail(502, f"{self.address} ended the stream before its end")

    async def _pass_whole(
        self, reply: httpx.Response, answer: Answer, headers: Headers, one_prompt: bool
    ) -> None:
        whole = bytearray()
        async for piece in reply.aiter_raw():
            if answer.started:
                await answer.write(piece)
                continue
            whole += piece
            if len(whole) > _WHOLE_BYTES:
                await answer.start(reply.status_code, headers)
                await answer.write(bytes(whole))
                whole.clear()
        if not answer.started:
            body = annotated(bytes(whole), one_prompt=one_prompt)
            length = (b"content-length", str(len(body)).encode())
            await answer.start(reply.status_code, [*_without_length(headers), length])
            await answer.write(body)
        await answer.end()


def _hop_by_hop(headers: httpx.Headers) -> frozenset[bytes]:
    """Headers that concern one connection, those that it names itself included."""
    return _HOP_BY_HOP | {name.strip().encode() for name in headers.get("connection", "").lower().split(",")}


def _backward(headers: httpx.Headers, identity: str) -> Headers:
    dropped = _hop_by_hop(headers) | {b"date"}  # which the server sets itself
    kept = [(name.lower(), value) for name, value in headers.raw if name.lower() not in dropped]
    if "x-request-id" not in headers:
        kept.append((b"x-request-id", identity.encode()))
    return kept


def _without_length(headers: Headers) -> Headers:
    return [pair for pair in headers if pair[0] != b"content-length"]

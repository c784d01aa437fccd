"""The HTTP response of a run: JSON at its end, or server-sent events as it goes; ends with its client."""

import asyncio
import json
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from kvass.serve.common import until_gone
from kvass.serve.errors import error_body
from kvass.serve.replies import Shape
from kvass.serve.run import Delta, Run, ServerFault


class RunResponse(Response):
    """Answers one request. `stream`: chunk by chunk; `usage`: with a last chunk for the usage."""

    def __init__(self, run: Run, shape: Shape, *, stream: bool, usage: bool):
        super().__init__()
        self._run = run
        self._shape = shape
        self._stream = stream
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._until_gone(receive))
        try:
            await (self._send_stream(send) if self._stream else self._send_whole(send))
        except OSError:
            pass  # the client went away while it was being written to
        finally:
            watch.cancel()
            self._run.cancel()

    async def _until_gone(self, receive: Receive) -> None:
        await until_gone(receive)
        self._run.cancel()

    # -- whole ----------------------------------------------------------------------------------------

    async def _send_whole(self, send: Send) -> None:
        found: dict[int, Delta] = {}
        status = 200
        try:
            async for delta in self._run.deltas():
                before = found.get(delta.choice, Delta(delta.choice, "", [], None))
                found[delta.choice] = Delta(
                    delta.choice, before.text + delta.text, before.logprobs + delta.logprobs, delta.finish
                )
            body = self._shape.whole([found[index] for index in sorted(found)])
            body |= {"usage": self._run.usage(), "kvass": self._run.report()}
        except ServerFault as fault:
            status, body = fault.status, error_body(fault.status, str(fault))
        if not self._run.cancelled:
            await _start(send, status, b"application/json")
            await send({"type": "http.response.body", "body": _json(body)})

    # -- streamed -------------------------------------------------------------------------------------

    async def _send_stream(self, send: Send) -> None:
        await _start(send, 200, b"text/event-stream; charset=utf-8")
        try:
            for index in range(self._run.count):
                opening = self._shape.opening(index)
                if opening is not None:
                    await self._event(send, opening)
            async for delta in self._run.deltas():
                if delta.text or delta.logprobs or delta.finish is not None:
                    await self._event(send, self._shape.chunk(delta))
            if self._run.cancelled:
                return
            if self._usage:
                await self._event(send, {**self._shape.closing(), "usage": self._run.usage()})
        except ServerFault as fault:
            await self._write(send, error_body(fault.status, str(fault)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _event(self, send: Send, chunk: dict[str, Any]) -> None:
        if self._run.over:
            chunk["kvass"] = self._run.report()
        if self._usage:
            chunk.setdefault("usage", None)
        await self._write(send, chunk)

    @staticmethod
    async def _write(send: Send, value: dict[str, Any]) -> None:
        body = b"data: " + _json(value) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _start(send: Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": status, "headers": headers})

"""An HTTP answer made of a request's events: its status waits for the first one, its end for the last.

A client that leaves, at whatever moment, cancels its request.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..schemas.errors import PayloadTooLarge
from ..schemas.events import Cancelled, Done, ErrorBody, Event, Expired, Failed, Token
from .bridge import Reading
from .rendering import Renderer, error_message, error_payload

PING = b": ping\n\n"
FOR_EVER = 1e9  # seconds


def error_response(error: ErrorBody, request: str | None = None) -> Response:
    headers = {"x-request-id": request or f"req-{uuid.uuid4().hex}"}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
        headers["retry-after-ms"] = str(round(error.retry_after * 1000))
    return Response(orjson.dumps(error_payload(error)), error.status, headers=headers, media_type="application/json")


class Answer(Response):
    """Streams a request's events as SSE, or collects them into one JSON body."""

    def __init__(self, reading: Reading, renderer: Renderer, *, streaming: bool, keepalive: float) -> None:
        super().__init__()
        self._reading = reading
        self._renderer = renderer
        self._streaming = streaming
        self._keepalive = keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream if self._streaming else self._collect
        answering = asyncio.create_task(answer(scope, receive, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._reading.close()
            if not self._reading.ended:
                await self._reading.cancel()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = await self._reading.take(FOR_EVER)
        if error := next((found for event in events if (found := _error(event))), None):
            await error_response(error, self._reading.request)(scope, receive, send)
            return
        await send(self._opening("text/event-stream", {"cache-control": "no-cache", "x-accel-buffering": "no"}))
        while True:
            body = b"".join(chunk for event in events for chunk in self._render(event))
            more = not self._reading.ended
            if body or not more or not events:
                # Nothing to say for a while: a comment keeps proxies and clients from giving up.
                await send({"type": "http.response.body", "body": body if events else PING, "more_body": more})
            if not more:
                return
            events = await self._reading.take(self._keepalive)

    def _render(self, event: Event) -> list[bytes]:
        match event:
            case Token():
                return list(self._renderer.chunks(event))
            case Done():
                return list(self._renderer.end(event))
            case Failed() | Expired() | Cancelled():
                error = _error(event)
                return [error_message(error)] if error else []
            case _:
                return []

    async def _collect(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens: list[Token] = []
        while True:
            for event in await self._reading.take(FOR_EVER):
                if isinstance(event, Token):
                    tokens.append(event)
                elif error := _error(event):
                    await error_response(error, self._reading.request)(scope, receive, send)
                    return
                elif isinstance(event, Done):
                    body = self._renderer.whole(tokens, event)
                    await send(self._opening("application/json", {"content-length": str(len(body))}))
                    await send({"type": "http.response.body", "body": body})
                    return

    def _opening(self, media_type: str, headers: dict[str, str]) -> dict[str, Any]:
        every = {"content-type": media_type, "x-request-id": self._reading.request, **headers}
        return {
            "type": "http.response.start",
            "status": 200,
            "headers": [(name.encode(), value.encode()) for name, value in every.items()],
        }


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises `PayloadTooLarge`, having read on a while so that the client gets to read the answer."""
    body = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            body += chunk
        elif size > 16 * limit:
            break
    if size > limit:
        raise PayloadTooLarge(f"The body is larger than {limit} bytes; the setting max_body_size allows no more.")
    return bytes(body)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(event: Event) -> ErrorBody | None:
    match event:
        case Failed(error=error) | Expired(error=error):
            return error
        case Cancelled():
            return ErrorBody(499, "The request was cancelled.", "cancelled_error", "cancelled")
        case _:
            return None

"""HTTP responses made of a request's events. The status waits for the first event, the end for the last.

A client that disconnects cancels its request, unless the request is resumable.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...schemas.errors import Overloaded
from ...schemas.events import Accepted, Cancelled, Done, ErrorBody, Event, Expired, Failed, Queued, Token
from ..bridge.reading import Reading
from ..bridge.response_reading import ResponseReading
from ..bridge.resume import Progress, invalid_event_id
from ..render.openai import Renderer, error_message, error_payload

FOR_EVER = 1e9  # seconds
BROKER_AWAY = ErrorBody.of(
    Overloaded("The message broker does not answer; try again later.", code="broker_away", retry_after=2.0)
)
# For a stream: nginx buffers it otherwise, and what compresses on the way may hold it back until its end.
AS_IT_COMES = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


def error_response(error: ErrorBody, request: str | None = None) -> Response:
    headers = {"x-request-id": request or f"req-{uuid.uuid4().hex}"}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
        headers["retry-after-ms"] = str(round(error.retry_after * 1000))
    return Response(orjson.dumps(error_payload(error)), error.status, headers=headers, media_type="application/json")


class EventStream(Response):
    """Sends a request's events as SSE. Subclasses render the events and say which of them refuse the request."""

    MEDIA_TYPE = "text/event-stream"

    def __init__(self, reading: Reading | ResponseReading, *, keepalive: float, progress: Progress | None) -> None:
        super().__init__()
        self._reading = reading
        self._keepalive = keepalive
        self._progress = progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._reading.leave()

    @abstractmethod
    def _chunks(self, event: Event) -> list[bytes]:
        """Render one event as SSE messages."""

    def _refusal(self, event: Event) -> ErrorBody | None:
        """The error that this event answers the request with; it decides the status if it is among the first events."""
        return None

    def _reached(self, events: list[Event]) -> bool:
        """Whether the response may begin, now that these events have arrived."""
        # The event after which the client resumes may not be stored yet.
        return self._progress is None or self._progress.reached

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            events = await self._reading.take(FOR_EVER)
            error = next((found for event in events if (found := self._refusal(event))), None)
            body += self._render(events)
            reached = self._reached(events)
            if not reached and not error and self._reading.ended:
                error = ErrorBody.of(
                    invalid_event_id(
                        "Last-Event-ID is beyond the end of the stream; send the id of an event that you received."
                    )
                )
            if reached or error:
                break
        if error is not None:
            await error_response(error, self._reading.request)(scope, receive, send)
            return
        await send(self._opening(self.MEDIA_TYPE, AS_IT_COMES))
        clock = asyncio.get_running_loop().time
        silent_until = clock() + self._keepalive
        while True:
            more = not self._reading.ended
            if body or not more:
                await send({"type": "http.response.body", "body": body, "more_body": more})
                silent_until = clock() + self._keepalive
            if not more:
                return
            body = self._render(await self._reading.take(max(0.0, silent_until - clock())))
            if not body and not self._reading.ended and clock() >= silent_until:
                body = self._ping()  # so that proxies and clients do not time out

    def _render(self, events: list[Event]) -> bytes:
        # Of several positions in the queue, send only the newest.
        return b"".join(
            chunk
            for event in events
            if not isinstance(event, Queued) or event is events[-1]
            for chunk in self._chunks(event)
        )

    def _ping(self) -> bytes:
        """What is sent after a silence: a comment."""
        # The official client remembers the last id, as the standard says, but then takes a blank line after a comment
        # for a message without data, and fails. Without the blank line the comment belongs to the next message.
        return b": ping\n" + (b"" if self._progress else b"\n")

    def _identified(self, message: bytes) -> bytes:
        return message if self._progress is None else self._progress.identified(message)

    def _opening(self, media_type: str, headers: dict[str, str]) -> dict[str, Any]:
        every = {"content-type": media_type, "x-request-id": self._reading.request, **headers}
        return {
            "type": "http.response.start",
            "status": 200,
            "headers": [(name.encode(), value.encode()) for name, value in every.items()],
        }


class Answer(EventStream):
    """OpenAI's response: SSE with `streaming`, or one JSON body; `status` adds events with the queue position."""

    def __init__(
        self,
        reading: Reading,
        renderer: Renderer,
        *,
        streaming: bool,
        keepalive: float,
        progress: Progress | None = None,
        status: bool = False,
    ) -> None:
        super().__init__(reading, keepalive=keepalive, progress=progress)
        self._renderer = renderer
        if progress is not None:
            renderer.opened = progress.opened
        self._streaming = streaming
        self._status = status

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (super()._answer if self._streaming else self._collect)(scope, receive, send)

    def _refusal(self, event: Event) -> ErrorBody | None:
        return error_of(event)

    def _chunks(self, event: Event) -> list[bytes]:
        progress, renderer = self._progress, self._renderer
        match event:
            case Accepted():
                renderer.begin(event)
            case Queued() if self._status:
                return [b"event: status\ndata: " + orjson.dumps(_status(event)) + b"\n\n"]
            case Token():
                if progress is None:
                    return list(renderer.chunks(event))
                return [chunk for part in renderer.apart(event) for chunk in self._rest(part, progress)]
            case Done():
                *usage, end = renderer.end(event)
                if progress is not None:
                    usage = [] if progress.usage_sent else usage
                    progress.usage_sent = True
                return [*map(self._identified, usage), end]
            case Failed() | Expired() | Cancelled():
                error = error_of(event)
                return [error_message(error)] if error else []
        return []

    def _rest(self, token: Token, progress: Progress) -> Iterator[bytes]:
        """What the client has not received of a token event, each message with the id that says it has."""
        before = progress if token.choice in progress.opened else progress.before()
        sent, unsent = progress.split(token)
        if sent is not None:
            list(self._renderer.chunks(sent))  # brings the renderer's state up to date
        if unsent is not None:
            for opening in self._renderer.openings(unsent):
                yield before.identified(opening)
            yield from map(progress.identified, self._renderer.chunks(unsent))

    async def _collect(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens: list[Token] = []
        while True:
            for event in await self._reading.take(FOR_EVER):
                if isinstance(event, Accepted):
                    self._renderer.begin(event)
                elif isinstance(event, Token):
                    self._renderer.hear(event)
                    tokens.append(event)
                elif error := error_of(event):
                    await error_response(error, self._reading.request)(scope, receive, send)
                    return
                elif isinstance(event, Done):
                    body = self._renderer.whole(tokens, event)
                    await send(self._opening("application/json", {"content-length": str(len(body))}))
                    await send({"type": "http.response.body", "body": body})
                    return


_WAITING = {None: "queued", "waiting": "waiting_for_model", "loading": "loading"}


def _status(event: Queued) -> dict[str, Any]:
    """What a client hears of its place in the queue and of its model."""
    known = {"progress": event.progress, "estimated_seconds": event.wait}
    said = {"type": _WAITING[event.model], "position": event.position}
    return said | {name: value for name, value in known.items() if value is not None}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_of(event: Event) -> ErrorBody | None:
    match event:
        case Failed(error=error) | Expired(error=error):
            return error
        case Cancelled():
            return ErrorBody(499, "The request was cancelled.", "cancelled_error", "cancelled")
        case _:
            return None

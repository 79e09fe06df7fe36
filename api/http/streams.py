"""`/v1/streams/{id}`: read the events of any request of the tenant, trace its way, or cancel it."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...schemas.errors import InvalidRequest
from ...schemas.events import Accepted, Cancelled, Event, Queued, Token
from ...schemas.request_trace import RequestTrace
from ...schemas.wire import codec
from ..bridge.reading import Reading
from ..bridge.request_traces import read_trace
from ..bridge.resume import Progress, invalid_event_id
from .answers import EventStream
from .openapi import STREAMED, refusals
from .requests import Gateway, Routes, tenant_meant, tenant_of


class Feed(EventStream):
    """Sends the events as they are stored, without those that hold only the first `after` tokens of their choice."""

    def __init__(self, reading: Reading, *, keepalive: float, progress: Progress, after: int) -> None:
        super().__init__(reading, keepalive=keepalive, progress=progress)
        self._position = progress
        self._after = after

    def _chunks(self, event: Event) -> list[bytes]:
        match event:
            case Token():
                _, unsent = self._position.split(event)
                if unsent is None or (unsent.token_ids and unsent.index + len(unsent.token_ids) <= self._after):
                    return []
                event = unsent
            case Accepted() | Queued() if self._position.resumed:
                return []
        return [self._identified(b"data: " + codec.encode(event) + b"\n\n")]


def add_streams(app: FastAPI, gateway: Gateway) -> None:
    routes = StreamRoutes(gateway)
    app.get(
        "/v1/streams/{id}", tags=["streams"], response_class=Response, responses=STREAMED | refusals(400, 404, 503)
    )(routes.stream)
    app.get("/v1/streams/{id}/trace", tags=["streams"], responses=refusals(400, 403, 404, 503))(routes.trace)
    app.delete("/v1/streams/{id}", tags=["streams"], responses=refusals(400, 403, 404, 503))(routes.cancel)


class StreamRoutes(Routes):
    async def stream(self, id: str, request: Request) -> Response:
        """Send a request's events as SSE, stored ones first.

        `after` skips so many tokens of each choice. The header `Last-Event-ID` is exact and takes precedence.
        """
        after = request.query_params.get("after", "0")
        if re.fullmatch("[0-9]{1,9}", after) is None:
            raise InvalidRequest("after must be a number of tokens.", param="after")
        progress = Progress(id)
        if (last := request.headers.get("last-event-id")) is not None:
            progress, after = Progress.parse(last), "0"
            if progress.request != id:
                raise invalid_event_id("Last-Event-ID does not belong to this stream.")
        reading = await self._gateway.bridge.follow(id, tenant_of(request))
        return Feed(reading, keepalive=self._settings.keepalive_interval, progress=progress, after=int(after))

    async def trace(self, id: str, request: Request) -> RequestTrace:
        """Tell where a request has been, and what happened there: its stages, workers, takeovers, calls and its end.

        It holds no text of the request. With an admin's key, `tenant` names the one whose request it is.
        """
        subjects, partitions = self._gateway.bridge.subjects, self._settings.stream_partitions
        return await read_trace(self._broker, subjects, partitions, tenant_meant(request), id)

    async def cancel(self, id: str, request: Request) -> Any:
        """Cancel a request; `cancelled` is false if it had ended before.

        With an admin's key, `tenant` names the one whose request it is.
        """
        reading = await self._gateway.bridge.follow(id, tenant_meant(request))
        try:
            running = reading.final is None
            if running:
                await reading.cancel()
            cancelled = running and isinstance(reading.final, Cancelled | None)
            return {"id": id, "object": "stream", "cancelled": cancelled}
        finally:
            reading.close()

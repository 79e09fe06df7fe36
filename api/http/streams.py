"""`/v1/streams/{id}`: a request's own events over HTTP, whoever asked for it and in whichever way; and its end."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...schemas import codec
from ...schemas.errors import InvalidRequest
from ...schemas.events import Accepted, Cancelled, Event, Queued, Token
from ..bridge.reading import Reading
from ..bridge.resume import Progress, invalid_event_id
from .answers import EventStream
from .openapi import STREAMED, refusals
from .requests import Gateway, tenant_of


class Feed(EventStream):
    """The events as they are stored. Those that hold nothing beyond `after` tokens of their choice are left out."""

    def __init__(self, reading: Reading, *, keepalive: float, progress: Progress, after: int) -> None:
        super().__init__(reading, keepalive=keepalive, progress=progress)
        self._places = progress
        self._after = after

    def _chunks(self, event: Event) -> list[bytes]:
        match event:
            case Token():
                _, news = self._places.split(event)
                if news is None or (news.token_ids and news.index + len(news.token_ids) <= self._after):
                    return []
                event = news
            case Accepted() | Queued() if self._places.resumed:
                return []
        return [self._identified(b"data: " + codec.encode(event) + b"\n\n")]


def add_streams(app: FastAPI, gateway: Gateway) -> None:
    @app.get(
        "/v1/streams/{id}", tags=["streams"], response_class=Response, responses=STREAMED | refusals(400, 404, 503)
    )
    async def stream(id: str, request: Request) -> Response:
        """A request's events as SSE, stored ones first.

        `after` leaves out so many tokens of each choice; the header `Last-Event-ID` wins, and is exact.
        """
        after = request.query_params.get("after", "0")
        if re.fullmatch("[0-9]{1,9}", after) is None:
            raise InvalidRequest("after is a number of tokens.", param="after")
        progress = Progress(id)
        if (last := request.headers.get("last-event-id")) is not None:
            progress, after = Progress.parse(last), "0"
            if progress.request != id:
                raise invalid_event_id("Last-Event-ID is not that of this stream.")
        reading = await gateway.bridge.follow(id, tenant_of(request))
        return Feed(reading, keepalive=gateway.settings.keepalive_interval, progress=progress, after=int(after))

    @app.delete("/v1/streams/{id}", tags=["streams"], responses=refusals(404, 503))
    async def cancel(id: str, request: Request) -> Any:
        """Cancel a request; `cancelled` is false where it had ended before."""
        reading = await gateway.bridge.follow(id, tenant_of(request))
        try:
            running = reading.final is None
            if running:
                await reading.cancel()
            cancelled = running and isinstance(reading.final, Cancelled | None)
            return {"id": id, "object": "stream", "cancelled": cancelled}
        finally:
            reading.close()

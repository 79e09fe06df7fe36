"""`/server/events`: the state of the deployment, and then its changes, as server-sent events.

A change is a JSON merge patch (RFC 7386): what is null is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from ....schemas.wire.merge_patch import Document, merge_patch
from ..answers import AS_IT_COMES
from ..metrics import MetricsRoutes
from ..models.catalogue import check_admin, is_admin_still
from ..openapi import STREAMED, refusals
from ..requests import Gateway
from .overview import Overview


class EventRoutes:
    def __init__(self, gateway: Gateway, metrics: MetricsRoutes, version: str) -> None:
        self._gateway = gateway
        self._overview = Overview(gateway, metrics, version)

    def add_to(self, app: FastAPI) -> None:
        app.get(
            "/server/events", tags=["operations"], response_class=StreamingResponse, responses=STREAMED | refusals(403)
        )(self.events)

    async def events(self, request: Request) -> StreamingResponse:
        """The state of the pipeline, requests, models, workers and dead letters as SSE: whole once (`snapshot`), then
        twice a second what has changed (`delta`, a JSON merge patch)."""
        check_admin(request)
        headers = AS_IT_COMES | {"cache-control": "no-store, no-transform"}
        return StreamingResponse(self._events(request), media_type="text/event-stream", headers=headers)

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        told: Document | None = None
        async with contextlib.aclosing(self._overview.watch()) as documents:
            async for document in documents:
                if await request.is_disconnected() or self._gateway.bridge.draining or not is_admin_still(request):
                    return
                if told is None:
                    yield b"event: snapshot\ndata: " + orjson.dumps(document) + b"\n\n"
                else:
                    yield b"event: delta\ndata: " + orjson.dumps(merge_patch(told, document)) + b"\n\n"
                told = document

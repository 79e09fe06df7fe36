"""OpenAI's chat and text completions over HTTP."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...schemas.jobs import Endpoint
from ...schemas.openai.body import model_of
from ...schemas.openai.completions import KINDS
from ..render.openai import PREFIX, Extras, Renderer
from .answers import Answer
from .openapi import documented
from .requests import Gateway, open_request, read_object

ENDPOINTS: tuple[Endpoint, ...] = ("/v1/chat/completions", "/v1/completions")


def add_completions(app: FastAPI, gateway: Gateway) -> None:
    for endpoint in ENDPOINTS:
        extra = documented(KINDS[endpoint])
        app.post(endpoint, tags=["openai"], name=endpoint, openapi_extra=extra)(_route(endpoint, gateway))


def _route(endpoint: Endpoint, gateway: Gateway) -> Any:
    async def generate(request: Request) -> Response:
        body = await read_object(request, gateway.settings, KINDS[endpoint])
        reading, progress, status = await open_request(request, gateway, endpoint, body, PREFIX[endpoint])
        streaming = body.get("stream") is True
        renderer = Renderer(
            endpoint,
            reading.request,
            model_of(body),
            int(time.time()),
            streaming=streaming,
            extras=Extras.of(body),
            service_tier=body.get("service_tier"),
        )
        keepalive = gateway.settings.keepalive_interval
        return Answer(reading, renderer, streaming=streaming, keepalive=keepalive, progress=progress, status=status)

    generate.__doc__ = f"OpenAI's `{endpoint}`; Penstock's own parameters are in the schema too."
    return generate

"""What a bridge answers while it waits for its broker: that it lives, what is missing, and 503 to everything else.

Otherwise connections would hang, and whoever watches the process would take it for dead and end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from ...config.settings import Settings
from .answers import BROKER_AWAY, error_response
from .anthropic.messages import AnthropicErrors
from .app import EXPOSED
from .middleware.access import AccessLog, note
from .middleware.browsers import SharedOrigins
from .ollama.answers import OllamaErrors
from .server import Server, configured

DRAIN = 1.0  # seconds in which a client that has connected may send its request and read the answer


@contextlib.asynccontextmanager
async def answering(listener: socket.socket, settings: Settings) -> AsyncIterator[None]:
    """Answer on the socket. It stays open: who connects afterwards waits for the next server on it."""
    app: ASGIApp = OllamaErrors(AnthropicErrors(_answer))
    if settings.cors_origins:
        app = SharedOrigins(app, settings.cors_origins, EXPOSED)
    server = Server(configured(AccessLog(app, lines=settings.access_log), settings, drain=0))
    serving = asyncio.create_task(server.serve(sockets=[listener.dup()]))
    try:
        yield
    finally:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN):
                    await server.last_answered()
        finally:
            server.end()
            await serving


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(error_response(BROKER_AWAY))
        return
    response = _response(Request(scope))
    response.headers["connection"] = "close"  # the next request finds the next server
    await response(scope, receive, send)


def _response(request: Request) -> Response:
    match request.url.path:
        case "/health/live":
            return JSONResponse({"status": "live"})
        case "/health" | "/health/ready":
            return JSONResponse({"status": "waiting", "missing": ["broker"], "workers": 0}, 503)
        case _:
            note(request.scope, error=BROKER_AWAY.code)
            return error_response(BROKER_AWAY)

"""The HTTP bridge: OpenAI's paths in front of the pipeline. It checks little: what a body means is validate's work."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...config.settings import BUILT_IN_STAGES, Settings
from ...schemas.errors import STORE_FULL, BrokerUnavailable, Overloaded, Refusal, StorageFull, StreamFull
from ...schemas.events import ErrorBody
from ...schemas.registry import ModelCard
from ...streams.port import Broker
from ...streams.stores.quotas import NO_SPACE, Quotas
from ...streams.stores.registry import Registry
from ..bridge.bridge import Bridge
from .answers import error_response
from .batches import add_batches
from .browsers import Browsers, is_loopback
from .completions import add_generation
from .conversations import add_conversations
from .embeddings import add_embeddings
from .files import add_files
from .generate import add_generate
from .ignored import HEADER, Ignored
from .keys import Authentication, Keys
from .messages import add_messages
from .openapi import complete, refusals
from .requests import Gateway
from .responses import add_responses
from .streams import add_streams
from .tokens import Preparers, add_tokens

_EXPOSED = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    HEADER,
)  # headers that a web page may read


def create_app(bridge: Bridge, broker: Broker, registry: Registry, settings: Settings, version: str) -> FastAPI:
    """The ASGI application; whoever calls this starts `bridge` and runs `registry`.

    Raises `ConfigurationError` for API keys that cannot be read.
    """
    app = FastAPIOffline(title="Penstock", version=version, license_info={"name": "Apache-2.0"})
    _add_errors(app)
    _add_edges(app, settings)
    gateway = Gateway(bridge, broker, registry, settings, Quotas(broker, settings.tenant_quota))
    add_generation(app, gateway)
    add_embeddings(app, gateway)
    preparers = Preparers(registry)
    add_generate(app, gateway, preparers)
    add_tokens(app, gateway, preparers)
    add_files(app, gateway)
    add_batches(app, gateway)
    add_responses(app, gateway)
    add_conversations(app, gateway)
    add_messages(app, gateway, preparers)

    @app.get("/models", tags=["openai"])
    @app.get("/v1/models", tags=["openai"])
    async def models() -> Any:
        """Every model that can be asked for."""
        return {"object": "list", "data": [_model(card) for card in registry.models.values()]}

    @app.get("/v1/models/{name:path}", tags=["openai"], responses=refusals(404))
    async def model(name: str) -> Any:
        """One model."""
        return _model(await preparers.card(name))

    @app.get("/health/live", tags=["health"])
    async def live() -> Any:
        """The process answers."""
        return {"status": "live"}

    @app.get("/health", tags=["health"], responses={503: {"description": "Not yet, or no more."}})
    @app.get("/health/ready", tags=["health"], responses={503: {"description": "Not yet, or no more."}})
    async def ready() -> Any:
        """A request would be answered now; otherwise 503 with what is missing.

        Custom stages need not say that they live, so those of which nothing was heard are `unseen`, and no more.
        `slow_paths` says, by worker, which fast paths its model does not take, and why.
        """
        if bridge.draining:
            return JSONResponse({"status": "stopping"}, 503)
        absent = registry.missing(settings.pipeline) if broker.connected else ["broker"]
        if "stream" not in absent:  # which runs only with all the filters
            absent = [part for part in absent if part not in settings.filters]
        unseen = [stage for stage in absent if stage in settings.job_stages and stage not in BUILT_IN_STAGES]
        missing = [part for part in absent if part not in unseen]
        answer: dict[str, Any] = {"status": "waiting", "missing": missing} if missing else {"status": "ready"}
        slow = {card.id: card.slow_paths for card in registry.workers if card.slow_paths}
        answer |= {"workers": len(registry.workers)}
        answer |= ({"unseen": unseen} if unseen else {}) | ({"slow_paths": slow} if slow else {})
        return JSONResponse(answer, 503 if missing else 200)

    add_streams(app, gateway)
    return app


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        "max_model_len": card.context_length,
    }


def _add_edges(app: FastAPI, settings: Settings) -> None:
    """What stands before every path, the innermost first."""
    keys = settings.api_keys is not None or settings.api_keys_file is not None
    if keys:
        app.add_middleware(Authentication, keys=Keys(settings.api_keys or (), settings.api_keys_file))
    app.add_middleware(Browsers, origins=settings.cors_origins or (), local=is_loopback(settings.host))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    app.add_middleware(_RequestIds)
    app.add_middleware(Ignored)
    complete(app, keys=keys)


class _RequestIds:
    """ASGI middleware: every answer has an `x-request-id`, always of our own making."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", f"req-{uuid.uuid4().hex}")
            await send(message)

        await self.app(scope, receive, named if scope["type"] == "http" else send)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        response = error_response(ErrorBody.of(error))
        if error.status in (409, 507) or error.code == NO_SPACE:
            response.headers["x-should-retry"] = "false"  # else the official client asks twice more
        if error.code == "body_timeout":
            response.headers["connection"] = "close"  # what is still to come of the body must not hold it
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: Exception) -> Response:
        return error_response(ErrorBody(499, "The client left.", "cancelled_error", "cancelled"))  # read by nobody

    @app.exception_handler(BrokerUnavailable)
    async def away(_: Request, error: Exception) -> Response:
        refusal = Overloaded("The message broker does not answer.", code="broker_away", retry_after=2.0)
        return error_response(ErrorBody.of(refusal))

    @app.exception_handler(StreamFull)
    async def full(_: Request, error: StreamFull) -> Response:
        refusal = (
            StorageFull(STORE_FULL) if error.storage else Overloaded("Too many messages are waiting.", retry_after=1.0)
        )
        return error_response(ErrorBody.of(refusal))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods(request))
            text, code = f"this path takes another method: {headers['Allow']}.", "method_not_allowed"
        else:
            text, code = "no such path. See /docs for those there are.", "not_found"
        text = f"{request.method} {request.url.path}: {text}"
        response = error_response(ErrorBody(error.status_code, text, "invalid_request_error", code))
        response.headers.update(headers)
        return response

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_response(ErrorBody(500, "Penstock failed to answer.", "server_error", "internal_error"))


def _methods(request: Request) -> list[str]:
    """What a request's path takes; a route by itself knows its own alone."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = (route.methods or () for route in routes if route.matches(request.scope)[0] != Match.NONE)
    return sorted(set().union(*found))

"""The HTTP bridge: OpenAI's paths in front of the pipeline. The stage `validate` checks what the bodies mean."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...config.api_keys import Keys
from ...config.settings import Settings
from ...engine.preparing.remote_files import RemoteFiles
from ...engine.vision.reading import ImageLimits
from ...schemas.errors import STORE_FULL, BrokerUnavailable, Overloaded, Refusal, StorageFull, StreamFull
from ...schemas.events import ErrorBody
from ...schemas.urls import is_loopback
from ...streams.family import FamilyMetrics
from ...streams.port import Broker
from ...streams.stores.named_files import NamedFileStore
from ...streams.stores.quotas import NO_SPACE, Quotas
from ...streams.stores.registry import Registry
from ..bridge.bridge import Bridge
from ..bridge.readiness import Readiness
from .answers import BROKER_AWAY, error_response
from .anthropic.messages import add_messages
from .batches import add_batches
from .completions import add_completions
from .console.dead_letters import DeadLetterRoutes
from .console.events import EventRoutes
from .console.files import add_page
from .conversations import add_conversations
from .files import add_files
from .generate import add_generate
from .metrics import MetricsRoutes
from .middleware.access import AccessLog, note
from .middleware.azure import AzurePaths
from .middleware.browsers import Browsers, SharedOrigins
from .middleware.failures import Failures
from .middleware.ignored import HEADER, Ignored
from .middleware.keys import Authentication
from .middleware.rates import ANTHROPIC_NAMES, OPENAI_NAMES, RateHeaders
from .middleware.refused import RefusedBodies
from .models.adapters import add_adapters
from .models.catalogue import CatalogueRoutes
from .models.states import ModelRoutes
from .ollama.answers import add_ollama
from .openapi import add_pages, complete
from .paths import add_heads, advice, methods, without_slash
from .pooled import add_pooled
from .preparers import Preparers
from .requests import Gateway
from .responses import add_responses
from .responses_socket import add_socket
from .streams import add_streams
from .tokens import add_tokens

_NOT_READY = {"description": "Not ready yet, or shutting down."}
# Response headers that a web page may read.
EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry", HEADER),
    *(*OPENAI_NAMES, *ANTHROPIC_NAMES),
)


def create_app(
    bridge: Bridge,
    broker: Broker,
    registry: Registry,
    settings: Settings,
    version: str,
    family: FamilyMetrics | None = None,
    readiness: Readiness | None = None,
) -> FastAPI:
    """The ASGI application. The caller starts `bridge` and runs `registry`; `family` has what other
    processes count.

    Raises `ConfigurationError` for malformed API keys.
    """
    app = FastAPIOffline(
        docs_url=None,
        redoc_url=None,
        title="Penstock",
        version=version,
        license_info={"name": "Apache-2.0"},
        redirect_slashes=False,
    )
    add_pages(app)
    _add_error_handlers(app)
    _add_middleware(app, settings, bridge)
    preparers = Preparers(
        registry,
        NamedFileStore(broker, settings.max_body_size),
        ImageLimits.of(settings),
        RemoteFiles(settings.image_allowed_urls, settings.document_allowed_urls),
    )
    readiness = readiness or Readiness(bridge, broker, registry, settings)
    gateway = Gateway(bridge, broker, registry, settings, Quotas(broker, settings.tenant_quota), preparers)
    add_completions(app, gateway)
    add_pooled(app, gateway)
    add_generate(app, gateway)
    add_tokens(app, gateway)
    add_files(app, gateway)
    add_batches(app, gateway)
    add_responses(app, gateway)
    add_socket(app, gateway)
    add_conversations(app, gateway)
    add_messages(app, gateway)

    models = ModelRoutes(gateway, registry, preparers)
    models.add_to(app)
    add_ollama(app, gateway, models)
    CatalogueRoutes(gateway).add_to(app)
    add_adapters(app, gateway)
    app.state.metrics = MetricsRoutes(gateway, family or FamilyMetrics(), models.status)
    app.state.metrics.add_to(app)
    EventRoutes(gateway, app.state.metrics, version).add_to(app)
    DeadLetterRoutes(gateway).add_to(app)
    add_page(app)

    @app.get("/health/live", tags=["health"])
    async def live() -> Any:
        """Answer 200 while the process runs."""
        return {"status": "live"}

    @app.get("/health", tags=["health"], responses={503: _NOT_READY})
    @app.get("/health/ready", tags=["health"], responses={503: _NOT_READY})
    async def ready() -> Any:
        """Answer 200 if a request would be answered now; otherwise 503 with what is `missing`, or the `fault` for which
        the last requests were not answered.

        A custom stage need not send heartbeats, so one without them is `unseen`, not `missing`. `slow_paths` says for
        each worker which fast paths its model cannot take, and why.
        """
        answer = readiness.answer()
        return JSONResponse(answer, 200 if answer["status"] == "ready" else 503)

    add_streams(app, gateway)
    add_heads(app)
    return app


def _add_middleware(app: FastAPI, settings: Settings, bridge: Bridge) -> None:
    """Add the middleware of every path, the innermost first."""
    keys = settings.api_keys is not None or settings.api_keys_file is not None
    if settings.rate_limits:
        app.add_middleware(RateHeaders, rates=bridge.rates)
    app.add_middleware(RefusedBodies)
    if keys:
        app.add_middleware(Authentication, keys=Keys(settings.api_keys or (), settings.api_keys_file))
    app.add_middleware(Browsers, origins=settings.cors_origins or (), local=is_loopback(settings.host))
    app.add_middleware(Failures)
    if settings.cors_origins:
        app.add_middleware(SharedOrigins, origins=settings.cors_origins, exposed=EXPOSED)
    app.add_middleware(_Heads, bridge=bridge)
    app.add_middleware(AzurePaths)
    app.add_middleware(Ignored)
    app.add_middleware(AccessLog, lines=settings.access_log)
    complete(app, keys=keys)


class _Heads:
    """ASGI middleware: every response has an `x-request-id` that Penstock made; a client cannot choose it. While the
    bridge stops, each ends its connection, and the next request goes elsewhere."""

    def __init__(self, app: ASGIApp, bridge: Bridge) -> None:
        self.app = app
        self._bridge = bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def completed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", f"req-{uuid.uuid4().hex}")
                if self._bridge.stopping:
                    headers["connection"] = "close"
            await send(message)

        await self.app(scope, receive, completed if scope["type"] == "http" else send)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        note(request.scope, error=error.code)
        response = error_response(ErrorBody.of(error))
        if error.status in (409, 507) or error.code == NO_SPACE:
            response.headers["x-should-retry"] = "false"  # else the official client retries twice
        if error.status == 415:
            response.headers["accept-encoding"] = "identity"  # RFC 9110, 15.5.16
        if error.code == "body_timeout":
            response.headers["connection"] = "close"  # the rest of the body must not keep it open
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: Exception) -> Response:
        return error_response(
            ErrorBody(499, "The client disconnected.", "cancelled_error", "cancelled")
        )  # no client reads it

    @app.exception_handler(BrokerUnavailable)
    async def away(_: Request, error: Exception) -> Response:
        return error_response(BROKER_AWAY)

    @app.exception_handler(StreamFull)
    async def full(_: Request, error: StreamFull) -> Response:
        busy = Overloaded("Too many messages are waiting; try again later.", retry_after=1.0)
        return error_response(ErrorBody.of(StorageFull(STORE_FULL) if error.storage else busy))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(methods(request))
            text, code = f"this path has only the methods {headers['Allow']}.", "method_not_allowed"
        else:
            if (redirection := without_slash(request)) is not None:
                return redirection
            text, code = f"no such path; {advice(request)}", "not_found"
        text = f"{request.method} {request.url.path}: {text}"
        response = error_response(ErrorBody(error.status_code, text, "invalid_request_error", code))
        response.headers.update(headers)
        return response

"""The HTTP bridge: OpenAI's paths in front of the pipeline. It checks little: what a body means is validate's work."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Any, get_args

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from ..config.settings import BUILT_IN_STAGES, Settings
from ..schemas.errors import BrokerUnavailable, InvalidRequest, ModelNotFound, Overloaded, Refusal
from ..schemas.events import ErrorBody
from ..schemas.jobs import Endpoint, Job, Priority
from ..schemas.openai import ChatRequest, CompletionRequest
from ..schemas.registry import ModelCard
from ..streams.port import Broker
from ..streams.registry import Registry
from .answers import Answer, error_response, read_body
from .bridge import Bridge
from .idempotency import open_once
from .native import add_streams
from .rendering import Renderer
from .resuming import Progress, invalid_event_id

TENANT = "default"
LONGEST = 86400  # seconds that a request may ask for
PREFIX: dict[Endpoint, str] = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl"}


def create_app(bridge: Bridge, broker: Broker, registry: Registry, settings: Settings, version: str) -> FastAPI:
    """The ASGI application; whoever calls this starts `bridge` and runs `registry`."""
    app = FastAPI(title="Penstock", version=version, license_info={"name": "Apache-2.0"})
    _add_errors(app)
    bodies: dict[Endpoint, type[BaseModel]] = {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
    }
    for endpoint, body in bodies.items():
        schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(body)}}}}
        generate = _generation(endpoint, bridge, broker, settings)
        app.post(endpoint, tags=["openai"], openapi_extra=schema, name=endpoint)(generate)

    @app.get("/v1/models", tags=["openai"])
    async def models() -> Any:
        """Every model that can be asked for."""
        return {"object": "list", "data": [_model(card) for card in registry.models.values()]}

    @app.get("/v1/models/{name:path}", tags=["openai"])
    async def model(name: str) -> Any:
        """One model."""
        if name not in registry.models:
            raise ModelNotFound(f"The model {name!r} is not served here.", param="model")
        return _model(registry.models[name])

    @app.get("/health/live", tags=["health"])
    async def live() -> Any:
        """The process answers."""
        return {"status": "live"}

    @app.get("/health/ready", tags=["health"])
    async def ready() -> Any:
        """A request would be answered now; otherwise 503 with what is missing.

        Custom stages need not say that they live, so those of which nothing was heard are `unseen`, and no more.
        """
        if bridge.draining:
            return JSONResponse({"status": "stopping"}, 503)
        absent = registry.missing(settings.pipeline) if broker.connected else ["broker"]
        unseen = [stage for stage in absent if stage in settings.job_stages and stage not in BUILT_IN_STAGES]
        missing = [part for part in absent if part not in unseen]
        answer = {"status": "waiting", "missing": missing} if missing else {"status": "ready"}
        return JSONResponse(
            answer | {"workers": len(registry.workers)} | ({"unseen": unseen} if unseen else {}),
            503 if missing else 200,
        )

    add_streams(app, bridge, settings, TENANT)
    return app


def _generation(endpoint: Endpoint, bridge: Bridge, broker: Broker, settings: Settings) -> Callable[..., Any]:
    async def generate(request: Request) -> Response:
        headers = request.headers
        resumable, status = _flag(headers, "Penstock-Resumable"), _flag(headers, "Penstock-Events")
        body = _object(await read_body(request, settings.max_body_size))
        streaming = body.get("stream") is True
        deadline = time.time() + _timeout(body, headers, settings)
        priority = _priority(body)
        job = Job(id=f"{PREFIX[endpoint]}-{uuid.uuid4().hex}", endpoint=endpoint, bridge=bridge.name, body=body)
        progress = None
        if (last := headers.get("last-event-id")) is not None:
            progress = Progress.parse(last)
            if not streaming or not progress.request.startswith(f"{PREFIX[endpoint]}-"):
                raise invalid_event_id("Last-Event-ID is not that of a stream of this endpoint.")
            reading = await bridge.follow(progress.request, TENANT, deadline=deadline)
        elif (key := headers.get("idempotency-key")) is not None:
            reading = await open_once(key, bridge, broker, job, priority=priority, tenant=TENANT, deadline=deadline)
        else:
            kept = resumable and streaming
            reading = await bridge.open(job, priority=priority, tenant=TENANT, deadline=deadline, kept=kept)
        if resumable and streaming:
            progress = progress or Progress(reading.request)
        options = body.get("stream_options")
        renderer = Renderer(
            endpoint,
            reading.request,
            str(body.get("model")),
            int(time.time()),
            streaming=streaming,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )
        keepalive = settings.keepalive_interval
        return Answer(reading, renderer, streaming=streaming, keepalive=keepalive, progress=progress, status=status)

    generate.__doc__ = f"OpenAI's `{endpoint}`; Penstock's own parameters are in the schema too."
    return generate


def _flag(headers: Headers, name: str) -> bool:
    value = headers.get(name, "")
    if value and value.lower() not in ("true", "1"):
        raise InvalidRequest(f"The header {name} is `true` or left out.", param=name)
    return bool(value)


def _timeout(body: dict[str, Any], headers: Headers, settings: Settings) -> float:
    """Seconds that the request may take: the body's word, the header's or the setting's."""
    given, param = body.get("timeout"), "timeout"
    if given is None and (text := headers.get("penstock-timeout")) is not None:
        given, param = text, "Penstock-Timeout"
        with contextlib.suppress(ValueError):
            given = float(text)
    if given is None:
        return settings.default_timeout
    if type(given) not in (int, float) or not 0 < given <= LONGEST:
        raise InvalidRequest(f"{param} is a number of seconds above 0, at most {LONGEST}.", param=param)
    return float(given)


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_type")
    return body


def _priority(body: dict[str, Any]) -> Priority:
    # An unknown one goes on as normal: validate refuses it, with every other fault.
    for known in get_args(Priority):
        if body.get("priority") == known:
            return known  # type: ignore[no-any-return]  # get_args forgets the literal's type
    return "normal"


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        "max_model_len": card.context_length,
    }


def _schema(body: type[BaseModel]) -> dict[str, Any]:
    """A body's JSON Schema with its definitions written out in place, since the page has no other home for them."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if isinstance(node, dict):
            name = node.get("$ref", "").rpartition("/")[2]
            return inlined(definitions[name]) if name else {key: inlined(value) for key, value in node.items()}
        return node

    return {key: inlined(value) for key, value in schema.items()}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return error_response(ErrorBody.of(error))

    @app.exception_handler(BrokerUnavailable)
    async def away(_: Request, error: Exception) -> Response:
        refusal = Overloaded("The message broker does not answer.", code="broker_away", retry_after=2.0)
        return error_response(ErrorBody.of(refusal))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        message = {
            404: f"{what}: no such path. See /docs for those there are.",
            405: f"{what}: this path takes another method.",
        }
        text = message.get(error.status_code, str(error.detail))
        return error_response(ErrorBody(error.status_code, text, "invalid_request_error", "not_found"))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_response(ErrorBody(500, "Penstock failed to answer.", "server_error", "internal_error"))

"""The HTTP bridge: OpenAI's paths in front of the pipeline. It checks little: what a body means is validate's work."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, get_args

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ..config.settings import BUILT_IN_STAGES, Settings
from ..schemas.errors import InvalidRequest, ModelNotFound, Refusal
from ..schemas.events import ErrorBody
from ..schemas.jobs import Endpoint, Job, Priority
from ..schemas.openai import ChatRequest, CompletionRequest
from ..schemas.registry import ModelCard
from ..streams.port import Broker
from ..streams.registry import Registry
from .answers import Answer, error_response, read_body
from .bridge import Bridge
from .rendering import Renderer

TENANT = "default"
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
        generate = _generation(endpoint, bridge, settings)
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
        """A request would be answered now; otherwise 503 with what is missing."""
        missing = registry.missing(BUILT_IN_STAGES) if broker.connected else ["broker"]
        return JSONResponse(
            {"status": "waiting", "missing": missing} if missing else {"status": "ready"}, 503 if missing else 200
        )

    return app


def _generation(endpoint: Endpoint, bridge: Bridge, settings: Settings) -> Callable[..., Any]:
    async def generate(request: Request) -> Response:
        body = _object(await read_body(request, settings.max_body_size))
        job = Job(id=f"{PREFIX[endpoint]}-{uuid.uuid4().hex}", endpoint=endpoint, bridge=bridge.name, body=body)
        streaming = body.get("stream") is True
        options = body.get("stream_options")
        renderer = Renderer(
            endpoint,
            str(job.id),
            str(body.get("model")),
            int(time.time()),
            streaming=streaming,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )
        reading = await bridge.open(job, priority=_priority(body), tenant=TENANT)
        return Answer(reading, renderer, streaming=streaming, keepalive=settings.keepalive_interval)

    generate.__doc__ = f"OpenAI's `{endpoint}`; Penstock's own parameters are in the schema too."
    return generate


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

"""The HTTP bridge: OpenAI's paths in front of the pipeline. It checks little: what a body means is validate's work."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ..config.settings import BUILT_IN_STAGES, Settings
from ..schemas.errors import BrokerUnavailable, ModelNotFound, Overloaded, Refusal
from ..schemas.events import ErrorBody
from ..schemas.registry import ModelCard
from ..streams.port import Broker
from ..streams.registry import Registry
from .answers import error_response
from .bridge import Bridge
from .door import Door
from .generation import add_generation
from .native import add_streams


def create_app(bridge: Bridge, broker: Broker, registry: Registry, settings: Settings, version: str) -> FastAPI:
    """The ASGI application; whoever calls this starts `bridge` and runs `registry`."""
    app = FastAPI(title="Penstock", version=version, license_info={"name": "Apache-2.0"})
    _add_errors(app)
    door = Door(bridge, broker, registry, settings)
    add_generation(app, door)

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

    add_streams(app, door)
    return app


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        "max_model_len": card.context_length,
    }


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

"""Ollama's API over HTTP: chats, completions and embeddings. Its requests are translated into those of OpenAI's API."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.types import Scope

from ....config.settings import Settings
from ....schemas.errors import InvalidRequest
from ....schemas.events import Event
from ....schemas.ollama.bodies import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, OllamaRequest
from ....schemas.ollama.options import Options
from ....schemas.ollama.paths import in_ollama
from ....schemas.openai.completions import parse_body
from ...render.ollama import LineRenderer, Timer, Vectors, error_line, line
from ...render.openai import PREFIX, Renderer
from ..answers import Answer
from ..middleware.error_forms import ErrorForm
from ..middleware.headers import check_unused
from ..middleware.ignored import known_fields, name_ignored
from ..models.catalogue import check_admin
from ..models.states import ModelRoutes
from ..openapi import body_of
from ..requests import Gateway, caller_of, open_request, read_as
from .models import LINES, OllamaModels

Asked = TypeVar("Asked", bound=OllamaRequest)

BASE = "/api/"
_CHAT = "/api/chat"
_ERROR = {"schema": {"type": "object", "required": ["error"]}}
REFUSED: dict[int | str, Any] = {
    "default": {"description": "A refusal, in Ollama's form", "content": {"application/json": _ERROR}}
}


class LineAnswer(Answer):
    """Ollama's response: a line for each piece with `streaming`, or one JSON body."""

    MEDIA_TYPE = "application/x-ndjson"
    _renderer: LineRenderer

    def _chunks(self, event: Event) -> list[bytes]:
        if error := self._refusal(event):
            return [error_line(error.message)]
        return super()._chunks(event)

    def _ping(self) -> bytes:
        return line(self._renderer.empty())  # the format has no comments


def add_ollama(app: FastAPI, gateway: Gateway, models: ModelRoutes) -> None:
    """Call this after all other middleware was added, so that its refusals get Ollama's form, too."""
    app.add_middleware(OllamaErrors)
    settings = gateway.settings

    async def answered(request: Request, kind: type[ChatRequest] | type[GenerateRequest]) -> Response:
        timer = Timer()
        asked = await read_as(partial(_read, kind, request, settings), request, settings)
        is_chat = kind is ChatRequest
        if asked.only_loads:
            renderer = LineRenderer(asked.endpoint, "", asked.model, is_chat=is_chat, timer=timer)
            return JSONResponse(renderer.empty(await loaded(request, asked.model, asked.keep_alive)))
        check_unused(request.headers)
        if asked.think:
            await check_thinks(asked.model)
        reading = (await open_request(request, gateway, asked.endpoint, asked.body(), PREFIX[asked.endpoint])).reading
        renderer = LineRenderer(asked.endpoint, reading.request, asked.model, is_chat=is_chat, timer=timer)
        return LineAnswer(reading, renderer, streaming=asked.streams, keepalive=settings.keepalive_interval)

    async def loaded(request: Request, model: str, keep_alive: float | None) -> str:
        """Load or unload a model for a request that asks nothing; returns Ollama's word for it."""
        name = await gateway.registry.untagged(model)
        if keep_alive == 0:
            check_admin(request)
            await models.unload_named(name)
            return "unload"
        if (await gateway.preparers.card(name)).catalogued and caller_of(request).admin:
            await models.load_named(name)  # others are loaded, or will be when they are asked
        if keep_alive is not None:
            name_ignored(request, ["keep_alive"])  # it counts from a request that was answered
        return "load"

    async def check_thinks(model: str) -> None:
        """Raises `InvalidRequest` for a model without thoughts, as programs know it."""
        card = await gateway.preparers.card(model)
        if (await gateway.preparers.of(card)).form.reasoning_format is None:
            raise InvalidRequest(f'"{model}" does not support thinking', param="think")

    async def embedded(request: Request, kind: type[EmbedRequest] | type[EmbeddingsRequest]) -> Response:
        timer = Timer()
        asked = await read_as(partial(_read, kind, request, settings), request, settings)
        alone = kind is EmbeddingsRequest
        if asked.only_loads:
            await loaded(request, asked.model, None)
            return JSONResponse({"embedding": []} if alone else {"model": asked.model, "embeddings": []})
        reading = (await open_request(request, gateway, asked.endpoint, asked.body(), PREFIX[asked.endpoint])).reading
        renderer: Renderer = Vectors(reading.request, asked.model, alone=alone, timer=timer)
        return Answer(reading, renderer, streaming=False, keepalive=settings.keepalive_interval)

    @app.post(_CHAT, tags=["ollama"], openapi_extra=body_of(ChatRequest), responses=LINES | REFUSED)
    async def chat(request: Request) -> Response:
        """Ollama's chats; without messages, the model is loaded, or unloaded if `keep_alive` is 0."""
        return await answered(request, ChatRequest)

    @app.post("/api/generate", tags=["ollama"], openapi_extra=body_of(GenerateRequest), responses=LINES | REFUSED)
    async def generate(request: Request) -> Response:
        """Ollama's completions of a prompt; without one, the model is loaded, or unloaded if `keep_alive` is 0."""
        return await answered(request, GenerateRequest)

    @app.post("/api/embed", tags=["ollama"], openapi_extra=body_of(EmbedRequest), responses=REFUSED)
    async def embed(request: Request) -> Response:
        """Ollama's embeddings; needs a worker with the backend sentence_transformers."""
        return await embedded(request, EmbedRequest)

    @app.post("/api/embeddings", tags=["ollama"], openapi_extra=body_of(EmbeddingsRequest), responses=REFUSED)
    async def embed_one(request: Request) -> Response:
        """The embedding of one prompt, as Ollama once had it."""
        return await embedded(request, EmbeddingsRequest)

    OllamaModels(gateway, models).add_to(app, REFUSED)


def _read(kind: type[Asked], request: Request, settings: Settings, body: dict[str, Any]) -> Asked:
    """The request; what of it has no effect is named in the response. Raises `InvalidRequest`."""
    body = known_fields(body, kind, request, settings)
    if isinstance(options := body.get("options"), dict):
        body |= {"options": known_fields(options, Options, request, settings, within="options.")}
    asked = parse_body(kind, body)
    name_ignored(request, asked.without_effect)
    return asked


class OllamaErrors(ErrorForm):
    """Gives every error below `/api/` Ollama's form: its message alone."""

    def concerns(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return path.startswith(BASE)

    def payload(self, scope: Scope, status: int, error: dict[str, Any], headers: MutableHeaders) -> dict[str, Any]:
        return {"error": in_ollama(error["message"], error.get("param"), scope["path"])}

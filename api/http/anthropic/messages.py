"""Anthropic's Messages over HTTP: requests are translated into chat requests, and their answers back."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Scope

from ....config.settings import Settings
from ....schemas.anthropic.messages import CountRequest, MessagesRequest
from ....schemas.anthropic.paths import in_message
from ....schemas.errors import InvalidRequest
from ....schemas.events import Accepted, Event
from ....schemas.jobs import Endpoint
from ....schemas.openai.completions import parse_body, parse_request
from ...render.anthropic import THREAD, MessageRenderer, error_payload, sse
from ..answers import Answer
from ..middleware.error_forms import ErrorForm
from ..middleware.headers import check_unused
from ..middleware.ignored import known_fields, name_ignored
from ..openapi import STREAMED, body_of
from ..requests import Gateway, open_request, read_as, size_of, tenant_of
from .batches import add_message_batches
from .lists import VERSION

Asked = TypeVar("Asked", bound=CountRequest)

PATH = "/v1/messages"
CHAT: Endpoint = "/v1/chat/completions"
_ERROR = {"schema": {"type": "object", "required": ["type", "error", "request_id"]}}
_REFUSED: dict[int | str, Any] = {
    "default": {"description": "A refusal, in Anthropic's form", "content": {"application/json": _ERROR}}
}


class MessageAnswer(Answer):
    """Anthropic's response: SSE with `streaming`, or one JSON body."""

    _renderer: MessageRenderer

    def _chunks(self, event: Event) -> list[bytes]:
        if isinstance(event, Accepted):
            return list(self._renderer.start(event))
        if error := self._refusal(event):
            return [sse(error_payload(error.status, error.message, self._reading.request, error.code))]
        return super()._chunks(event)


def add_messages(app: FastAPI, gateway: Gateway) -> None:
    """Call this after all other middleware was added, so that its refusals get Anthropic's form, too."""
    app.add_middleware(AnthropicErrors)

    @app.post(PATH, tags=["anthropic"], openapi_extra=body_of(MessagesRequest), responses=STREAMED | _REFUSED)
    async def messages(request: Request) -> Response:
        """Anthropic's `/v1/messages`, and Penstock's `priority` and `timeout`."""
        asked, body = await read_as(partial(_translated, request, gateway.settings), request, gateway.settings)
        check_unused(request.headers)
        reading = (await open_request(request, gateway, CHAT, body, "msg-")).reading
        return MessageAnswer(
            reading,
            MessageRenderer(reading.request, asked.model),
            streaming=asked.stream is True,
            keepalive=gateway.settings.keepalive_interval,
        )

    add_message_batches(app, gateway, _REFUSED)

    @app.post(f"{PATH}/count_tokens", tags=["anthropic"], openapi_extra=body_of(CountRequest), responses=_REFUSED)
    async def count(request: Request) -> dict[str, int]:
        """Count the tokens of a request's prompt."""
        chat = await read_as(partial(_counted, request, gateway.settings), request, gateway.settings)
        card = await gateway.preparers.card(chat.model)
        return {"input_tokens": len(await gateway.preparers.prompt(card, chat, tenant_of(request), size_of(request)))}


def _translated(request: Request, settings: Settings, body: dict[str, Any]) -> tuple[MessagesRequest, dict[str, Any]]:
    asked = _read(MessagesRequest, request, settings, body)
    return asked, asked.chat_body()


def _counted(request: Request, settings: Settings, body: dict[str, Any]) -> Any:
    return parse_request(CHAT, _read(CountRequest, request, settings, body).chat_body())


def _read(kind: type[Asked], request: Request, settings: Settings, body: dict[str, Any]) -> Asked:
    """The request; what of it has no effect is named in the response. Raises `InvalidRequest`."""
    if body.get("thread") is not None:  # only this code makes clients retry without it
        raise InvalidRequest("thread is not supported here; send the whole conversation.", code=THREAD, param="thread")
    asked = parse_body(kind, known_fields(body, kind, request, settings))
    name_ignored(request, asked.without_effect)
    return asked


class AnthropicErrors(ErrorForm):
    """Gives every error of these paths Anthropic's form, and below /v1 all that its clients get."""

    def concerns(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return path.startswith(PATH) or (path.startswith("/v1/") and VERSION in Headers(scope=scope))

    def complete(self, headers: MutableHeaders) -> None:
        headers["request-id"] = headers["x-request-id"]

    def payload(self, scope: Scope, status: int, error: dict[str, Any], headers: MutableHeaders) -> dict[str, Any]:
        fault = in_message(error["message"], error.get("param"))
        return error_payload(status, fault, headers["request-id"], error["code"])

    def status(self, status: int) -> int:
        return 529 if status == 503 else status

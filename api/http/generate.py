"""`POST /generate`: what OpenAI's paths do, in Penstock's own events."""

from __future__ import annotations

import time

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...schemas.errors import InvalidRequest
from ...schemas.events import Done, ErrorBody, Event, Expired, Failed, Token
from ...schemas.jobs import Endpoint
from ...schemas.openai.body import Body, ModelName, model_of
from ...schemas.openai.completions import ChatRequest, CompletionRequest, Stop
from ..bridge.resume import Progress
from ..render.calls import join_calls
from ..render.openai import Renderer
from .answers import Answer
from .middleware.ignored import known_fields
from .openapi import documented
from .requests import Gateway, Opened, open_request, read_object
from .streams import Feed


class _Events(Feed):
    """The events from the first one on, or after Last-Event-ID; with ids if the client may resume."""

    def __init__(self, opened: Opened, keepalive: float) -> None:
        progress = opened.progress or Progress(opened.reading.request)
        super().__init__(opened.reading, keepalive=keepalive, progress=progress, after=0)
        self._progress = opened.progress

    def _refusal(self, event: Event) -> ErrorBody | None:
        return event.error if isinstance(event, Failed | Expired) else None


class _Whole(Renderer):
    """The whole generation as one JSON object."""

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        choices = []
        for index, reason in enumerate(done.finish_reasons):
            own = [token for token in tokens if token.choice == index]
            entries = [entry for token in own for entry in token.logprobs or ()]
            choice = {
                "index": index,
                "text": "".join(token.text for token in own),
                "reasoning": "".join(token.reasoning for token in own),
                "tool_calls": join_calls(own),
                "token_ids": [id for token in own for id in token.token_ids],
                "logprobs": None if all(token.logprobs is None for token in own) else entries,
                "prompt_logprobs": own[0].prompt_logprobs if own else None,
                "finish_reason": reason,
                "stop_reason": next((token.stop_reason for token in reversed(own)), None),
            }
            choices.append(choice)
        return orjson.dumps({**self._head, "object": "generation", "choices": choices, "usage": done.usage})


class _Own(Body):
    """The fields that differ from those of OpenAI's paths."""

    model: ModelName = ""  # required if several models are served
    stop_sequences: Stop | None = None  # an alias of `stop`


class _Chat(_Own, ChatRequest):
    pass


class _Text(_Own, CompletionRequest):
    pass


def add_generate(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/generate", tags=["native"], openapi_extra=documented(_Chat, _Text))
    async def generate(request: Request) -> Response:
        """Generate from the body of `/v1/chat/completions`, if it has messages, or of `/v1/completions`.

        `model` may be left out if only one is served.

        With `stream` the response is the request's events, as `/v1/streams/{id}` sends them.
        """
        body = await read_object(request, gateway.settings)
        endpoint: Endpoint = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        kind = _Chat if "messages" in body else _Text
        body = {**known_fields(body, kind, request, gateway.settings)}
        if (stops := body.pop("stop_sequences", None)) is not None:
            if body.get("stop") not in (None, stops):
                raise InvalidRequest("stop and stop_sequences differ; give one.", param="stop_sequences")
            body["stop"] = stops
        if body.get("model") is None:
            body["model"] = (await gateway.preparers.card(None)).name
        opened = await open_request(request, gateway, endpoint, body, "gen-")
        keepalive = gateway.settings.keepalive_interval
        if body.get("stream") is True:
            return _Events(opened, keepalive)
        reading = opened.reading
        renderer = _Whole(endpoint, reading.request, model_of(body), int(time.time()), streaming=False)
        return Answer(
            reading, renderer, streaming=False, keepalive=keepalive, progress=opened.progress, status=opened.status
        )

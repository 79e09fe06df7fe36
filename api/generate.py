"""`POST /generate`: what the OpenAI paths do, told in Penstock's own events."""

from __future__ import annotations

import time

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..schemas.events import Done, ErrorBody, Event, Expired, Failed, Token
from ..schemas.jobs import Endpoint
from ..schemas.openai import KINDS, ChatRequest, CompletionRequest
from .answers import Answer
from .door import Door, Opened, model_of, open_request, read_object
from .ignored import known_alone
from .native import Feed
from .openapi import documented
from .rendering import Renderer, join_calls
from .resuming import Progress


class _Events(Feed):
    """The events from the first one on, or after what the client has; ids for whoever may resume."""

    def __init__(self, opened: Opened, keepalive: float) -> None:
        progress = opened.progress or Progress(opened.reading.request)
        super().__init__(opened.reading, keepalive=keepalive, progress=progress, after=0)
        self._progress = opened.progress

    def _refusal(self, event: Event) -> ErrorBody | None:
        return event.error if isinstance(event, Failed | Expired) else None


class _Whole(Renderer):
    """All of it as one object."""

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        choices = []
        for index, reason in enumerate(done.finish_reasons):
            said = [token for token in tokens if token.choice == index]
            entries = [entry for token in said for entry in token.logprobs or ()]
            choice = {
                "index": index,
                "text": "".join(token.text for token in said),
                "reasoning": "".join(token.reasoning for token in said),
                "tool_calls": join_calls(said),
                "token_ids": [id for token in said for id in token.token_ids],
                "logprobs": None if all(token.logprobs is None for token in said) else entries,
                "finish_reason": reason,
            }
            choices.append(choice)
        return orjson.dumps({**self._head, "object": "generation", "choices": choices, "usage": done.usage})


def add_generate(app: FastAPI, door: Door) -> None:
    @app.post("/generate", tags=["native"], openapi_extra=documented(ChatRequest, CompletionRequest))
    async def generate(request: Request) -> Response:
        """The body of `/v1/chat/completions`, if it has messages, or of `/v1/completions`.

        With `stream` the answer is the request's events, as `/v1/streams/{id}` gives them.
        """
        body = await read_object(request, door.settings, ChatRequest, CompletionRequest)
        endpoint: Endpoint = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = known_alone(body, KINDS[endpoint], request=request, settings=door.settings)
        opened = await open_request(request, door, endpoint, body, "gen-")
        keepalive = door.settings.keepalive_interval
        if body.get("stream") is True:
            return _Events(opened, keepalive)
        reading = opened.reading
        renderer = _Whole(endpoint, reading.request, model_of(body), int(time.time()), streaming=False)
        return Answer(
            reading, renderer, streaming=False, keepalive=keepalive, progress=opened.progress, status=opened.status
        )

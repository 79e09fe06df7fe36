"""What a line of a batch becomes: a job, and from its events the body that HTTP would have answered with."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any, Protocol

import orjson

from ...schemas.anthropic.messages import MessagesRequest
from ...schemas.events import Accepted, Done, Event, Token
from ...schemas.jobs import POOLED
from ...schemas.openai.batches import MESSAGES, RESPONSES, Batch
from ...schemas.openai.body import model_of
from ...schemas.openai.completions import parse_body
from ..render.anthropic import MessageRenderer
from ..render.openai import PREFIX, Extras, Renderer
from ..render.pooled import pooled
from ..render.responses import ResponseRenderer, repeats_no_more


class Answer(Protocol):
    """Hears the events of a request, in order."""

    @property
    def has_acted(self) -> bool:
        """Whether tools have been called, so that the request must not be repeated."""

    def hear(self, event: Event) -> None: ...

    def whole(self, final: Event) -> bytes:
        """The body in JSON, once the final event has been heard. Raises `GenerationFailed`."""


class GeneratedAnswer:
    """Of a chat, a completion, embeddings or a ranking."""

    has_acted = False

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tokens: list[Token] = []

    def hear(self, event: Event) -> None:
        if isinstance(event, Accepted):
            self._renderer.begin(event)
        elif isinstance(event, Token):
            self._tokens.append(event)

    def whole(self, final: Event) -> bytes:
        assert isinstance(final, Done)
        return self._renderer.whole(self._tokens, final)


class ResponseAnswer:
    """Of a response, whose turns call tools."""

    def __init__(self, renderer: ResponseRenderer) -> None:
        self.has_acted = False
        self._renderer = renderer

    def hear(self, event: Event) -> None:
        self.has_acted |= repeats_no_more(event)
        self._renderer.render(event)

    def whole(self, final: Event) -> bytes:
        return orjson.dumps(self._renderer.response())


def request_id(batch: Batch, number: int, attempt: int) -> str:
    """The id of the request for a line, the same for every runner; clients retrieve and continue a response by it."""
    id = f"{batch.id}-{number}" + (f"-{attempt}" if attempt else "")
    return f"resp_{sha256(id.encode()).hexdigest()[:32]}" if batch.endpoint == RESPONSES else id


def prepared(
    batch: Batch, number: int, body: dict[str, Any], now: int
) -> tuple[dict[str, Any], Callable[[str], Answer]]:
    """The body of the line's job, and what makes the answer to the request of an id. Raises `InvalidRequest`."""
    name, endpoint = f"{batch.id.removeprefix('batch_')}-{number}", batch.endpoint
    if endpoint == RESPONSES:
        model = model_of(body)
        return body, lambda request: ResponseAnswer(ResponseRenderer(request, body, now, model=model))
    if endpoint == MESSAGES:
        asked = parse_body(MessagesRequest, body)
        return asked.chat_body(), lambda _: GeneratedAnswer(MessageRenderer(f"msg-{name}", asked.model))
    id, model = f"{PREFIX[endpoint]}{name}", model_of(body)
    if endpoint in POOLED:
        return body, lambda _: GeneratedAnswer(pooled(endpoint, id, body))
    tier, extras = body.get("service_tier"), Extras.of(body)
    return body, lambda _: GeneratedAnswer(
        Renderer(endpoint, id, model, now, streaming=False, extras=extras, service_tier=tier)
    )

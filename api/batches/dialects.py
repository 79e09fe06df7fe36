"""Makes a job of a line of a batch, and the renderer of its answer, for OpenAI's API or Anthropic's."""

from __future__ import annotations

from typing import Any

from ...schemas.anthropic.messages import MessagesRequest
from ...schemas.openai.batches import MESSAGES, Batch
from ...schemas.openai.body import model_of
from ...schemas.openai.completions import parse_body
from ..render.anthropic import MessageRenderer
from ..render.openai import PREFIX, Embeddings, Extras, Renderer


def prepared(batch: Batch, number: int, body: dict[str, Any], now: int) -> tuple[dict[str, Any], Renderer]:
    """The body of the line's job, and the renderer of its answer. Raises `InvalidRequest`."""
    name = f"{batch.id.removeprefix('batch_')}-{number}"
    if batch.endpoint == MESSAGES:
        asked = parse_body(MessagesRequest, body)
        return asked.chat_body(), MessageRenderer(f"msg-{name}", asked.model)
    id, model = f"{PREFIX[batch.endpoint]}{name}", model_of(body)
    if batch.endpoint == "/v1/embeddings":
        return body, Embeddings(id, model, encoded=body.get("encoding_format") == "base64")
    tier, extras = body.get("service_tier"), Extras.of(body)
    return body, Renderer(batch.endpoint, id, model, now, streaming=False, extras=extras, service_tier=tier)

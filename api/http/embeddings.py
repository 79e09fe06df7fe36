"""OpenAI's embeddings over HTTP."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...schemas.openai.body import model_of
from ...schemas.openai.embeddings import EmbeddingRequest
from ..render.openai import PREFIX, Embeddings
from .answers import Answer
from .openapi import documented
from .requests import Gateway, open_request, read_object


def add_embeddings(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/embeddings", tags=["openai"], openapi_extra=documented(EmbeddingRequest))
    async def embed(request: Request) -> Response:
        """OpenAI's `/v1/embeddings`; needs a worker with the backend sentence_transformers."""
        body = await read_object(request, gateway.settings, EmbeddingRequest)
        opened = await open_request(request, gateway, "/v1/embeddings", body, PREFIX["/v1/embeddings"])
        encoded = body.get("encoding_format") == "base64"
        renderer = Embeddings(opened.reading.request, model_of(body), encoded=encoded)
        return Answer(opened.reading, renderer, streaming=False, keepalive=gateway.settings.keepalive_interval)

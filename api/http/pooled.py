"""Embeddings and rankings over HTTP."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...schemas.jobs import Endpoint
from ...schemas.openai.embeddings import EmbeddingRequest, PooledRequest
from ...schemas.openai.rerank import RerankRequest
from ..render.openai import PREFIX
from ..render.pooled import pooled
from .answers import Answer
from .openapi import documented
from .requests import Gateway, open_request, read_object


def add_pooled(app: FastAPI, gateway: Gateway) -> None:
    async def answer(request: Request, endpoint: Endpoint, kind: type[PooledRequest], *, shows: bool) -> Response:
        body = await read_object(request, gateway.settings, kind)
        if shows:
            body.setdefault("return_documents", True)
        opened = await open_request(request, gateway, endpoint, body, PREFIX[endpoint])
        renderer = pooled(endpoint, opened.reading.request, body)
        return Answer(opened.reading, renderer, streaming=False, keepalive=gateway.settings.keepalive_interval)

    @app.post("/v1/embeddings", tags=["openai"], openapi_extra=documented(EmbeddingRequest))
    async def embed(request: Request) -> Response:
        """OpenAI's `/v1/embeddings`; needs a worker with the backend sentence_transformers."""
        return await answer(request, "/v1/embeddings", EmbeddingRequest, shows=False)

    @app.post("/v1/rerank", tags=["rerank"], openapi_extra=documented(RerankRequest))
    @app.post("/rerank", tags=["rerank"], openapi_extra=documented(RerankRequest))
    async def rerank(request: Request) -> Response:
        """Documents by their relevance to a query, as of Jina and vLLM; needs a reranker on sentence_transformers."""
        return await answer(request, "/v1/rerank", RerankRequest, shows=True)

    @app.post("/v2/rerank", tags=["rerank"], openapi_extra=documented(RerankRequest))
    async def rerank_without_texts(request: Request) -> Response:
        """Cohere's `/v2/rerank`: `/v1/rerank`, but without the documents' texts in the answer."""
        return await answer(request, "/v1/rerank", RerankRequest, shows=False)

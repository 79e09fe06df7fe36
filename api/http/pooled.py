"""Embeddings and rankings over HTTP."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...schemas.jobs import Endpoint
from ...schemas.openai.completions import parse_body
from ...schemas.openai.embeddings import EmbeddingRequest
from ...schemas.openai.rerank import RerankRequest, TextsRequest
from ..render.openai import PREFIX, Renderer
from ..render.pooled import ListedRanking, pooled
from .answers import Answer
from .middleware.ignored import known_fields
from .openapi import documented
from .requests import Gateway, open_request, read_as, read_object


def add_pooled(app: FastAPI, gateway: Gateway) -> None:
    settings = gateway.settings

    async def answered(
        request: Request, endpoint: Endpoint, body: dict[str, Any], *, as_list: bool = False
    ) -> Response:
        opened = await open_request(request, gateway, endpoint, body, PREFIX[endpoint])
        id = opened.reading.request
        renderer: Renderer = ListedRanking(id, "", body) if as_list else pooled(endpoint, id, body)
        return Answer(opened.reading, renderer, streaming=False, keepalive=settings.keepalive_interval)

    @app.post("/v1/embeddings", tags=["openai"], openapi_extra=documented(EmbeddingRequest))
    async def embed(request: Request) -> Response:
        """OpenAI's `/v1/embeddings`; needs a worker with the backend sentence_transformers."""
        return await answered(request, "/v1/embeddings", await read_object(request, settings, EmbeddingRequest))

    @app.post("/v1/rerank", tags=["rerank"], openapi_extra=documented(RerankRequest))
    async def rerank(request: Request) -> Response:
        """Documents by their relevance to a query, as of Jina and vLLM; needs a reranker on sentence_transformers."""
        body = await read_object(request, settings, RerankRequest)
        return await answered(request, "/v1/rerank", {"return_documents": True} | body)

    @app.post("/v2/rerank", tags=["rerank"], openapi_extra=documented(RerankRequest))
    async def rerank_without_texts(request: Request) -> Response:
        """Cohere's `/v2/rerank`: `/v1/rerank`, but without the documents' texts in the answer."""
        return await answered(request, "/v1/rerank", await read_object(request, settings, RerankRequest))

    @app.post("/rerank", tags=["rerank"], openapi_extra=documented(RerankRequest, TextsRequest))
    async def rerank_texts(request: Request) -> Response:
        """`/v1/rerank`; with `texts` for `documents` it answers as Hugging Face's Text Embeddings Inference does."""

        def read(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
            if "texts" not in body:
                return {"return_documents": True} | known_fields(body, RerankRequest, request, settings), False
            return parse_body(TextsRequest, known_fields(body, TextsRequest, request, settings)).rerank_body(), True

        body, as_list = await read_as(read, request, settings)
        return await answered(request, "/v1/rerank", body, as_list=as_list)

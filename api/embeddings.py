"""OpenAI's embeddings over HTTP."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..schemas.embeddings import EmbeddingRequest
from ..schemas.events import Done, Token
from .answers import Answer
from .door import Door, open_request, read_object
from .openapi import documented
from .rendering import PREFIX, Renderer


class Embeddings(Renderer):
    """The list of vectors: as numbers, or with `encoded` as the base64 that they came in."""

    def __init__(self, request: str, model: str, *, encoded: bool) -> None:
        super().__init__("/v1/embeddings", request, model, 0, streaming=False)
        self._model = model
        self._encoded = encoded

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        data = [
            {"object": "embedding", "index": token.choice, "embedding": self._vector(token.text)}
            for token in sorted(tokens, key=lambda token: token.choice)
        ]
        usage = {"prompt_tokens": done.usage.prompt_tokens, "total_tokens": done.usage.total_tokens}
        answer = {"object": "list", "data": data, "model": self._model, "usage": usage}
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

    def _vector(self, text: str) -> Any:
        # As float32, which needs fewer digits than the same number as a float.
        return text if self._encoded else np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def add_embeddings(app: FastAPI, door: Door) -> None:
    @app.post("/v1/embeddings", tags=["openai"], openapi_extra=documented(EmbeddingRequest))
    async def embed(request: Request) -> Response:
        """OpenAI's `/v1/embeddings`; the model is one that a worker with the backend sentence_transformers serves."""
        body = await read_object(request, door.settings)
        opened = await open_request(request, door, "/v1/embeddings", body, PREFIX["/v1/embeddings"])
        encoded = body.get("encoding_format") == "base64"
        renderer = Embeddings(opened.reading.request, str(body.get("model")), encoded=encoded)
        return Answer(
            opened.reading,
            renderer,
            streaming=False,
            keepalive=door.settings.keepalive_interval,
            progress=None,
            status=False,
        )

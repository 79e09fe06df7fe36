"""Renders what is no text: OpenAI's embeddings, and rankings as Cohere and Jina have them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import orjson

from ...schemas.events import Done, Token
from ...schemas.integers import as_integer
from ...schemas.jobs import Endpoint
from ...schemas.openai.body import model_of
from .openai import Renderer, answered_by


def pooled(endpoint: Endpoint, request: str, body: Mapping[str, Any]) -> Renderer:
    """The renderer of the request that came to `endpoint` with this unvalidated body."""
    if endpoint == "/v1/rerank":
        return Ranking(request, model_of(body), body)
    return Embeddings(request, model_of(body), encoded=body.get("encoding_format") == "base64")


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
        # The id is vLLM's and Mistral's, whose clients need it.
        answer = {"id": self.request, "object": "list", "data": data, "model": self._model, **_counted(done)}
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

    def _vector(self, text: str) -> Any:
        return text if self._encoded else vector(text)


class Ranking(Renderer):
    """The documents' places in the request, the most relevant first, and their texts where the client wants them."""

    def __init__(self, request: str, model: str, body: Mapping[str, Any]) -> None:
        super().__init__("/v1/rerank", request, model, 0, streaming=False)
        self._model = model
        self._body = body

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        results = list(map(self._result, self._best(tokens)))
        answer = {"id": self.request, "object": "list", "model": self._model, "results": results, **_counted(done)}
        return orjson.dumps(answer)

    def _best(self, tokens: list[Token]) -> list[Token]:
        best = sorted(tokens, key=lambda token: (-float(token.text), token.choice))
        return best[: as_integer(self._body.get("top_n"))]

    def _result(self, token: Token) -> dict[str, Any]:
        result: dict[str, Any] = {"index": token.choice, "relevance_score": float(token.text)}
        if self._body.get("return_documents") is True:
            document = self._body["documents"][token.choice]
            result["document"] = {"text": document} if isinstance(document, str) else document
        return result


class ListedRanking(Ranking):
    """The list that Text Embeddings Inference answers with."""

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        return orjson.dumps(list(map(self._result, self._best(tokens))))

    def _result(self, token: Token) -> dict[str, Any]:
        result: dict[str, Any] = {"index": token.choice, "score": float(token.text)}
        if self._body.get("return_documents") is True:
            result["text"] = self._body["documents"][token.choice]
        return result


def vector(text: str) -> Any:
    """The numbers of an embedding, as float32, which needs fewer digits than the same number as a float."""
    import numpy as np  # which other answers do not need

    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def _counted(done: Done) -> dict[str, Any]:
    usage = {"prompt_tokens": done.usage.prompt_tokens, "total_tokens": done.usage.total_tokens}
    return {"usage": usage, **answered_by(done.fallback)}

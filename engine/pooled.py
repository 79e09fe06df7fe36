"""The library's calls that generate no tokens: vectors of texts, and scores of documents."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence

from ..schemas.errors import GenerationFailed, InvalidRequest
from ..schemas.params import GenerationParams
from .backend import Backend
from .backends.embedding import EmbeddingBackend
from .handle import RequestHandle
from .request import EmbeddingInput, EngineRequest


def inputs_of(prompts: Iterable[Sequence[int]], dimensions: int | None = None) -> list[EmbeddingInput]:
    """The inputs of one request, in order."""
    name, params = uuid.uuid4().hex, GenerationParams()
    return [
        EmbeddingInput(name, tuple(prompt), params, seed=0, first_choice=index, dimensions=dimensions)
        for index, prompt in enumerate(prompts)
    ]


def pairs_of(backend: Backend, query: str, documents: Sequence[str], most: int | None) -> list[EmbeddingInput]:
    """The query with each document, of whose tokens only the first `most` are read. Raises `InvalidRequest`."""
    # The models of HTTP's bodies, which an engine behind a server needs for nothing else.
    from ..schemas.openai.completions import parse_body
    from ..schemas.openai.rerank import RerankRequest
    from .preparing.pooled_inputs import prepare_pooled

    body = {"model": backend.info.source, "query": query, "documents": list(documents), "max_tokens_per_doc": most}
    request, info = parse_body(RerankRequest, body), backend.info
    return inputs_of(prepare_pooled(request, backend.tokenizer, context_length=info.context_length, name=info.source))


def refuse_pairs(backend: Backend) -> None:
    """Raise `InvalidRequest` for texts where the backend's model takes pairs of them."""
    if isinstance(backend, EmbeddingBackend) and backend.ranks:
        raise InvalidRequest(
            f"{backend.info.source} scores pairs of texts; call score with a query and documents",
            code="unsupported_capability",
        )


async def results(
    inputs: Sequence[EmbeddingInput],
    check: Callable[[EngineRequest], None],
    open_all: Callable[[Sequence[EngineRequest]], list[RequestHandle]],
) -> list[str]:
    """What the engine says of each input. Raises `InvalidRequest` before anything runs, and `GenerationFailed`."""
    for request in inputs:
        check(request)
    handles = open_all(inputs)
    try:
        return [await _result(handle) for handle in handles]
    finally:
        for handle in handles:
            handle.cancel()


async def _result(handle: RequestHandle) -> str:
    (delta,) = await handle.take()
    if delta.finish_reason != "stop":
        raise GenerationFailed(delta.error.message if delta.error else "the engine has stopped; start a new one")
    return delta.text

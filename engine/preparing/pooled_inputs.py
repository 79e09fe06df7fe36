"""Turns a request for embeddings, or for a ranking, into the token ids of its inputs."""

from __future__ import annotations

from collections.abc import Iterator

from ...schemas.errors import InvalidRequest
from ...schemas.openai.embeddings import MAX_INPUTS, MAX_TOKENS, EmbeddingRequest, PooledRequest
from ...schemas.openai.rerank import RerankRequest
from ..request import check_input
from ..text.tokenizer import EmbeddingTokenizer, PairTokenizer
from ..text.tokenizer_port import TokenizerLike, encode_within, refuse_far_too_long


def prepare_pooled(
    request: PooledRequest, tokenizer: TokenizerLike, *, context_length: int, name: str
) -> list[list[int]]:
    """The token ids of every input, for a ranking of the query with each document; `name` is the model's, for error
    messages. Raises `InvalidRequest`."""
    if isinstance(request, RerankRequest):
        return _pairs(request, tokenizer, context_length=context_length, name=name)
    assert isinstance(request, EmbeddingRequest)
    return _inputs(request, tokenizer, context_length=context_length, name=name)


def refuse_pooled(tokenizer: TokenizerLike, name: str) -> None:
    """Raise `InvalidRequest` for a request that is to generate text, where the model generates none."""
    if isinstance(tokenizer, PairTokenizer):
        fault = f"{name} only ranks documents; send a query and documents to /v1/rerank."
        raise InvalidRequest(fault, code="unsupported_capability")
    if isinstance(tokenizer, EmbeddingTokenizer):
        fault = f"{name} serves only embeddings; send texts to /v1/embeddings."
        raise InvalidRequest(fault, code="unsupported_capability")


def _inputs(request: EmbeddingRequest, tokenizer: TokenizerLike, *, context_length: int, name: str) -> list[list[int]]:
    if isinstance(tokenizer, PairTokenizer):
        refuse_pooled(tokenizer, name)
    inputs = request.prompts
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(f"The request has {len(inputs)} inputs; send at most {MAX_INPUTS}.", param="input")
    prompts = []
    for index, text in enumerate(inputs):
        path = "input" if len(inputs) == 1 else f"input[{index}]"
        if not text or (isinstance(text, str) and not text.strip()):
            raise InvalidRequest(f"{path} is blank; send some text.", code="empty_prompt", param=path)
        prompts.append(encode_within(tokenizer, text, context_length, path) if isinstance(text, str) else text)
        check_input(prompts[-1], path, context_length=context_length, vocabulary_size=tokenizer.vocabulary_size)
    if (total := sum(map(len, prompts))) > MAX_TOKENS:
        raise InvalidRequest(
            f"The inputs have {total} tokens together; send {name} at most {MAX_TOKENS} a request.", param="input"
        )
    return prompts


def _pairs(request: RerankRequest, tokenizer: TokenizerLike, *, context_length: int, name: str) -> list[list[int]]:
    if not isinstance(tokenizer, PairTokenizer):
        raise InvalidRequest(
            f"{name} ranks no documents; ask a reranker, a model that scores a query with a document.",
            code="unsupported_capability",
        )
    documents = request.documents
    if len(documents) > MAX_INPUTS:
        raise InvalidRequest(
            f"The request has {len(documents)} documents; send at most {MAX_INPUTS}.", param="documents"
        )
    if not request.query.strip():
        raise InvalidRequest("The query is blank; send some text.", code="empty_prompt", param="query")
    refuse_far_too_long(tokenizer, request.query, context_length, "query")
    most = _most(request, tokenizer, context_length)

    def checked() -> Iterator[str]:
        for index, document in enumerate(documents):
            path = f"documents[{index}]"
            if not document.strip():
                raise InvalidRequest(f"{path} is blank; send some text.", code="empty_prompt", param=path)
            if most is None:
                refuse_far_too_long(tokenizer, document, context_length, path)
            yield document

    prompts: list[list[int]] = []
    total = 0
    for index, ids in enumerate(tokenizer.pairs(request.query, checked(), most)):
        path = f"documents[{index}]"
        check_input(
            ids,
            path,
            context_length=context_length,
            vocabulary_size=tokenizer.vocabulary_size,
            what=f"The query and {path} together have",
            advice="shorten them, or send max_tokens_per_doc or truncate to have documents cut",
        )
        total += len(ids)
        if total > MAX_TOKENS:
            raise InvalidRequest(
                f"The query and the documents up to {path} have more than {MAX_TOKENS} tokens together, the query "
                f"counted with each; send {name} fewer documents a request.",
                param="documents",
            )
        prompts.append(ids)
    return prompts


def _most(request: RerankRequest, tokenizer: PairTokenizer, context_length: int) -> int | None:
    """How many tokens of a document are read; None if all are. Raises `InvalidRequest` for a query without room."""
    if not request.truncate:
        return request.max_tokens_per_doc
    [alone] = tokenizer.pairs(request.query, [""])
    if (room := context_length - len(alone)) < 1:
        raise InvalidRequest(
            f"The query leaves no room for a document: it has {len(alone)} tokens with the model's own, of "
            f"{context_length}; shorten it.",
            code="context_length_exceeded",
            param="query",
        )
    return min(room, request.max_tokens_per_doc or room)

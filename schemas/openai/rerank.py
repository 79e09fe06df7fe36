"""The body of `/v1/rerank`, as Cohere and Jina defined it, and that of Hugging Face's Text Embeddings Inference.

Sources: https://docs.cohere.com/reference/rerank, https://api.jina.ai/redoc#tag/rerank and
https://huggingface.github.io/text-embeddings-inference
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from .body import Body, ModelName, OpenBody, Unsupported
from .embeddings import PooledRequest

_SHORTER = "send max_tokens_per_doc or truncate, which have longer documents cut"


class DocumentText(OpenBody):
    """A document as Cohere's and Jina's clients may send it: of its fields only `text` is read."""

    text: str


def _text(document: Any) -> Any:
    return document.get("text") if isinstance(document, dict) else document


Document = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | DocumentText)]


class RerankRequest(PooledRequest):
    """Asks how relevant each of `documents` is to `query`, and for the best `top_n` of them.

    A pair of query and document that is longer than the model's context is refused, unless `max_tokens_per_doc` has
    documents cut to so many tokens, or `truncate` to what the context takes beside the query.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "max_chunks_per_doc": Unsupported(advice=_SHORTER),
        "rank_fields": Unsupported((None, ["text"]), "send each document as one text"),
        "texts": Unsupported(advice="send documents, or ask /rerank"),
        "truncate_prompt_tokens": Unsupported(advice=_SHORTER),
        "truncation": Unsupported((None, False), _SHORTER),
    }

    query: str
    documents: Annotated[list[Document], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return [self.query, *self.documents]


class TextsRequest(Body):
    """The same question in the form of Text Embeddings Inference, whose answer is a list."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "raw_scores": Unsupported((None, False), "scores are on the model's own scale"),
        "truncation_direction": Unsupported((None, "right", "Right"), "documents are cut at their ends"),
    }

    model: ModelName | None = None
    query: str
    texts: Annotated[list[str], Field(min_length=1)]
    return_text: bool | None = None
    truncate: bool | None = None

    def rerank_body(self) -> dict[str, Any]:
        """The body of the same request at `/v1/rerank`."""
        body = {"query": self.query, "documents": self.texts, "return_documents": self.return_text is True}
        return body | self.model_dump(include={"model", "truncate"}, exclude_none=True)

"""`POST /tokenize` and `/detokenize`, with vLLM's bodies: what a prompt is in tokens, without asking the engine."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import structlog
from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from ...schemas.errors import Fatal, InvalidRequest, ModelNotFound, Overloaded
from ...schemas.openai.chat import Body, ChatMessage, Tool
from ...schemas.openai.completions import ChatRequest, CompletionRequest
from ...schemas.openai.embeddings import EmbeddingRequest
from ...schemas.registry import ModelCard
from ...streams.stores.registry import Registry
from .openapi import body_of, refusals
from .requests import Gateway, read_parsed

if TYPE_CHECKING:
    from ...engine.prepare import Preparer

log = structlog.get_logger(__name__)

_FAULTS = refusals(400, 404, 408, 413, 500, 503)


class TokenizeRequest(Body):
    """`prompt`, with the special tokens that the model wants around it unless told otherwise, or `messages`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class DetokenizeResponse(BaseModel):
    prompt: str


_OF_MESSAGES = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class Preparers:
    """By model, each loaded when it is first asked for."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._kept: dict[tuple[str, ...], asyncio.Task[Preparer]] = {}

    async def card(self, name: str | None) -> ModelCard:
        """The model of this name, or the only one. Raises `InvalidRequest` and `ModelNotFound`."""
        if name is None and not self._registry.models:
            await self._registry.look()
        models = self._registry.models
        if name is None and len(models) != 1:
            known = ", ".join(models) or "none yet"
            raise InvalidRequest(
                f"model is missing. Served: {known}.", code="missing_required_parameter", param="model"
            )
        card = next(iter(models.values())) if name is None else await self._registry.find(name)
        if card is None:
            raise ModelNotFound(f"The model {name!r} is not served here.", param="model")
        return card

    async def of(self, card: ModelCard) -> Preparer:
        """Raises `Overloaded` where this machine cannot load it."""
        key = (card.source, card.backend, card.tool_format, card.reasoning_format)
        if key not in self._kept:
            self._kept[key] = asyncio.create_task(asyncio.to_thread(_load, *key))
        try:
            return await asyncio.shield(self._kept[key])
        except Fatal as error:
            self._kept.pop(key, None)  # the next request tries again
            log.error("cannot load a tokenizer", model=card.name, reason=str(error))
            raise Overloaded(
                f"The tokenizer of {card.name!r} cannot be loaded where this bridge runs.", code="tokenizer_unavailable"
            ) from None

    async def prompt(self, card: ModelCard, request: ChatRequest | CompletionRequest | EmbeddingRequest) -> list[int]:
        """Its tokens, however many. Raises `InvalidRequest`, and what `of` raises."""
        prepare = (await self.of(card)).prepare
        found = await asyncio.to_thread(prepare, request, context_length=sys.maxsize, name=card.name, seed=0)
        return found.prompts[0]


def add_tokens(app: FastAPI, gateway: Gateway, preparers: Preparers) -> None:
    @app.post("/tokenize", tags=["native"], openapi_extra=body_of(TokenizeRequest), responses=_FAULTS)
    async def tokenize(request: Request) -> TokenizeResponse:
        """The tokens of a prompt, or of messages as the model's chat template writes them."""
        asked = await read_parsed(TokenizeRequest, request, gateway.settings)
        card = await preparers.card(asked.model)
        tokenizer = (await preparers.of(card)).tokenizer
        options = asked.model_dump(include=set(_OF_MESSAGES), exclude_none=True)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        if asked.messages is not None:
            if asked.add_special_tokens:
                raise InvalidRequest("The chat template writes every special token itself.", param="add_special_tokens")
            tokens = await preparers.prompt(card, ChatRequest(model=card.name, messages=asked.messages, **options))
        elif options:
            raise InvalidRequest(f"{', '.join(options)}: for messages only.", param=next(iter(options)))
        else:
            special = asked.add_special_tokens is not False
            tokens = await asyncio.to_thread(tokenizer.encode, asked.prompt or "", add_special_tokens=special)
        texts = None
        if asked.return_token_strs:
            texts = await asyncio.to_thread(lambda: [tokenizer.piece(token).text for token in tokens])
        return TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=card.context_length, token_strs=texts)

    @app.post("/detokenize", tags=["native"], openapi_extra=body_of(DetokenizeRequest), responses=_FAULTS)
    async def detokenize(request: Request) -> DetokenizeResponse:
        """The text of tokens, special ones included."""
        asked = await read_parsed(DetokenizeRequest, request, gateway.settings)
        tokenizer = (await preparers.of(await preparers.card(asked.model))).tokenizer
        if (highest := max(asked.tokens, default=0)) >= tokenizer.vocabulary_size:
            raise InvalidRequest(
                f"tokens: token id {highest} is outside the vocabulary of {tokenizer.vocabulary_size}.", param="tokens"
            )
        return DetokenizeResponse(prompt=await asyncio.to_thread(tokenizer.decode, asked.tokens))


def _load(*card: str) -> Preparer:
    from ...engine.prepare import load_preparer  # brings the grammar compiler, which few bridges need

    return load_preparer(*card)

"""`POST /tokenize` and `/detokenize`, with vLLM's bodies. The bridge answers them itself, without a worker."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field

from ...schemas.errors import InvalidRequest
from ...schemas.openai.body import Body
from ...schemas.openai.chat import ChatMessage, Tool
from ...schemas.openai.completions import ChatRequest
from .openapi import body_of, refusals
from .requests import Gateway, Routes, read_parsed, size_of, tenant_of

_REFUSALS = refusals(400, 404, 408, 413, 500, 503)


class TokenizeRequest(Body):
    """Either `prompt`, with special tokens around it unless `add_special_tokens` is false, or `messages`."""

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


def add_tokens(app: FastAPI, gateway: Gateway) -> None:
    routes = TokenRoutes(gateway)
    tokenize, detokenize = body_of(TokenizeRequest), body_of(DetokenizeRequest)
    app.post(
        "/tokenize", tags=["native"], openapi_extra=tokenize, responses=_REFUSALS, response_model=TokenizeResponse
    )(routes.tokenize)
    app.post("/detokenize", tags=["native"], openapi_extra=detokenize, responses=_REFUSALS)(routes.detokenize)


class TokenRoutes(Routes):
    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt, or of messages as the model's chat template renders them."""
        asked = await read_parsed(TokenizeRequest, request, self._settings)
        card = await self._gateway.preparers.card(asked.model)
        tokenizer = (await self._gateway.preparers.of(card)).tokenizer
        options = asked.model_dump(include=set(_OF_MESSAGES), exclude_none=True)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        tenant, size = tenant_of(request), size_of(request)

        def answer(tokens: list[int]) -> Response:
            pieces = [tokenizer.piece(token).text for token in tokens] if asked.return_token_strs else None
            about = {"count": len(tokens), "max_model_len": card.context_length, "token_strs": pieces}
            return Response(orjson.dumps({"tokens": tokens, **about}), media_type="application/json")

        if asked.messages is not None:
            if asked.add_special_tokens:
                raise InvalidRequest("The chat template writes every special token itself.", param="add_special_tokens")
            chat = ChatRequest(model=card.name, messages=asked.messages, **options)
            return await asyncio.to_thread(answer, await self._gateway.preparers.prompt(card, chat, tenant, size))
        if options:
            raise InvalidRequest(f"{', '.join(options)}: for messages only.", param=next(iter(options)))
        special = asked.add_special_tokens is not False
        async with self._gateway.preparers.counting.turn(tenant, size):
            encode = partial(tokenizer.encode, asked.prompt or "", add_special_tokens=special)
            return await asyncio.to_thread(lambda: answer(encode()))

    async def detokenize(self, request: Request) -> DetokenizeResponse:
        """Return the text of tokens, special ones included."""
        asked = await read_parsed(DetokenizeRequest, request, self._settings)
        tokenizer = (await self._gateway.preparers.of(await self._gateway.preparers.card(asked.model))).tokenizer
        if (highest := max(asked.tokens, default=0)) >= tokenizer.vocabulary_size:
            raise InvalidRequest(
                f"tokens: token id {highest} is outside the vocabulary of {tokenizer.vocabulary_size}.", param="tokens"
            )
        async with self._gateway.preparers.counting.turn(tenant_of(request), size_of(request)):
            return DetokenizeResponse(prompt=await asyncio.to_thread(tokenizer.decode, asked.tokens))

"""Answers OpenAI's requests with an engine in this process: as over HTTP, without a server or a broker.

with InferenceEngine(EngineConfig(model="MODEL")) as engine:
    adapter = OpenAIAdapter(engine)
    answer = adapter.create({"messages": [{"role": "user", "content": "Hello!"}]})
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson

from ...engine import EmbeddingInput, EngineRequest, InferenceEngine
from ...engine.blocking import wait_for
from ...engine.preparing.prepare import Prepared, Preparer
from ...engine.text.answer_reader import AnswerReader
from ...engine.text.tool_formats import thought_end
from ...schemas.bounds import whole
from ...schemas.errors import GenerationFailed, InvalidRequest
from ...schemas.events import Accepted, Delta, Done, FinishReason, Token, Usage
from ...schemas.jobs import Endpoint
from ...schemas.openai.completions import parse_request
from ...schemas.openai.embeddings import PooledRequest
from ..render.openai import PREFIX, Extras, Renderer
from ..render.pooled import pooled

CHAT: Endpoint = "/v1/chat/completions"


class OpenAIAdapter:
    """Takes and returns the JSON bodies of OpenAI's API; as safe to share between threads and event loops as `engine`.

    `name` is the model's name in requests and answers; its source if None. The name of a loaded LoRA adapter chooses
    that instead. The formats say how to parse the model's tool calls and reasoning: names, or "auto" for what its chat
    template suggests.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        name: str | None = None,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        """Raises `ConfigurationError` for an unknown format."""
        self.name = name or engine.model_info().source
        self.engine = engine
        self._preparer = Preparer(
            engine.tokenizer, tool_format=tool_format, reasoning_format=reasoning_format, sight=engine.sight
        )

    def create(self, body: Mapping[str, Any], endpoint: Endpoint = CHAT) -> dict[str, Any]:
        """Like `acreate`, for callers without an event loop."""
        return wait_for(self.acreate(body, endpoint))

    async def acreate(self, body: Mapping[str, Any], endpoint: Endpoint = CHAT) -> dict[str, Any]:
        """Answer one request as a whole. The body may leave `model` out and must not ask for a stream.

        Raises `InvalidRequest` where the server would answer 400, `GenerationFailed`, and `TypeError` for what is no
        body.
        """
        if _checked(body).get("stream"):
            raise InvalidRequest("create() returns whole answers; for a stream call stream().", param="stream")
        running = await self._open(body, endpoint, streaming=False)
        try:
            tokens = [token async for token in running.tokens()]
        finally:
            running.cancel()
        answer: dict[str, Any] = orjson.loads(running.renderer.whole(tokens, running.done()))
        return answer

    async def stream(self, body: Mapping[str, Any], endpoint: Endpoint = CHAT) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of an answer as they come; to leave early cancels the request. Raises as `acreate` does."""
        running = await self._open({**_checked(body), "stream": True}, endpoint, streaming=True)
        try:
            async with aclosing(running.tokens()) as tokens:
                async for token in tokens:
                    for message in running.renderer.chunks(token):
                        yield _chunk(message)
            *usage, _ = running.renderer.end(running.done())
            for message in usage:
                yield _chunk(message)
        finally:
            running.cancel()

    async def _open(self, body: Mapping[str, Any], endpoint: Endpoint, *, streaming: bool) -> _Running:
        if endpoint not in PREFIX:
            raise InvalidRequest(
                f"An adapter answers {', '.join(PREFIX)}, not {endpoint!r}; for conversations with tools use "
                "ResponsesSession.",
                param="endpoint",
            )
        read: dict[str, Any] = whole(body)  # as over HTTP
        if read.get("model") is None:
            read["model"] = self.name
        request = parse_request(endpoint, read)
        name = request.model
        adapter = None if name == self.name else name
        if adapter is not None and adapter not in (names := [info.name for info in self.engine.adapters()]):
            raise InvalidRequest(
                f"This engine serves only {', '.join(map(repr, [self.name, *names]))}; name one.",
                code="model_not_found",
                param="model",
            )
        for field in ("timeout", "priority", "service_tier"):
            if getattr(request, field) not in (None, "auto"):
                raise InvalidRequest(f"{field} has no effect without a queue; leave it out.", param=field)
        prepared = await asyncio.to_thread(
            self._preparer.prepare,
            request,
            context_length=self.engine.model_info().context_length,
            name=name,
            seed=secrets.randbits(63),
        )
        compiled = await self.engine.prepare(prepared.params)
        id = f"{PREFIX[endpoint]}{uuid.uuid4().hex}"
        if isinstance(request, PooledRequest):
            if streaming:
                raise InvalidRequest("Embeddings and rankings cannot be streamed; call create().", param="stream")
            renderer = pooled(endpoint, id, {**read, "model": name})
        else:
            created = int(time.time())
            renderer = Renderer(endpoint, id, name, created, streaming=streaming, extras=Extras.of(read))
            prompts = tuple(map(tuple, prepared.prompts))
            renderer.begin(Accepted(id, name, created, sum(map(len, prompts)), prompts))
        running = _Running(self.engine, prepared, renderer, adapter, is_pooled=isinstance(request, PooledRequest))
        del compiled
        return running


class _Running:
    """One request in the engine: a handle for each of its prompts."""

    def __init__(
        self,
        engine: InferenceEngine,
        prepared: Prepared,
        renderer: Renderer,
        adapter: str | None,
        *,
        is_pooled: bool,
    ) -> None:
        n = prepared.params.n
        kind: Callable[..., EngineRequest] = EngineRequest
        if is_pooled:
            kind = partial(EmbeddingInput, dimensions=prepared.dimensions)
        self.renderer = renderer
        self._prompt_tokens = sum(map(len, prepared.prompts))
        self._reasons: list[FinishReason] = ["stop"] * (len(prepared.prompts) * n)  # by choice; set by `_read`
        self._reader = AnswerReader(renderer.request, prepared.form, len(self._reasons))
        self._num_tokens = self._num_cached = 0  # set by `_read`
        requests = [
            kind(
                id=f"{renderer.request}.{index}",
                prompt=tuple(prompt),
                params=prepared.params,
                seed=prepared.params.seed or 0,
                first_choice=index * n,
                adapter=adapter,
                images=prepared.images,
                border=thought_end(prepared.form),
            )
            for index, prompt in enumerate(prepared.prompts)
        ]
        self._handles = engine.open_all(requests)

    async def tokens(self) -> AsyncGenerator[Token, None]:
        """Yield the tokens of all choices as they come. Raises `GenerationFailed`."""
        waiting = {asyncio.ensure_future(handle.take()): handle for handle in self._handles}
        try:
            while waiting:
                ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for take in ready:
                    handle = waiting.pop(take)
                    if not handle.finished:
                        waiting[asyncio.ensure_future(handle.take())] = handle
                    for delta in take.result():
                        yield self._read(delta)
        finally:
            for take in waiting:
                take.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)  # whoever leaves may close the loop next

    def done(self) -> Done:
        usage = Usage(self._prompt_tokens, self._num_tokens, self._prompt_tokens + self._num_tokens, self._num_cached)
        return Done(self.renderer.request, tuple(self._reasons), self._reader.usage(usage))

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def _read(self, delta: Delta) -> Token:
        if delta.finish_reason == "error":
            raise GenerationFailed(delta.error.message if delta.error else "The engine failed.")
        token = self._reader.read(delta)
        self._num_tokens += len(delta.token_ids)
        self._num_cached += delta.cached_tokens
        if token.finish_reason is not None:
            self._reasons[delta.choice] = token.finish_reason
        return token


def _checked(body: object) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise TypeError(f"a body must be a mapping, such as {{'messages': […]}}, not {type(body).__name__}")
    return body


def _chunk(message: bytes) -> dict[str, Any]:
    chunk: dict[str, Any] = orjson.loads(message.removeprefix(b"data: "))
    return chunk

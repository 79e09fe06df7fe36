"""validate: the door of the pipeline. A job is checked, its prompt rendered and tokenised, or refused with why."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Iterable
from typing import get_args

from ..engine.tokenizer import load_tokenizer
from ..engine.tokenizer_port import TokenizerLike
from ..schemas import codec
from ..schemas.codec import DecodeError
from ..schemas.errors import DeadlineExceeded, InvalidRequest, ModelNotFound
from ..schemas.jobs import TOKEN_PATTERN, Job, Priority, ValidatedJob
from ..schemas.openai import ChatMessage, ChatRequest, CompletionRequest, Request, generation_params, parse_request
from ..schemas.params import MAX_CHOICES
from ..schemas.registry import ModelCard
from ..streams.port import DEADLINE, SCHEMA, Delivery, Message
from . import endings
from .contract import Intake, Pipe, Stage

# Variables that a client may not set: they would replace the model's template or mean something else to its renderer.
NOT_FOR_TEMPLATES = frozenset(
    {
        *("self", "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "sanitize_control_tokens"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
LONG = 20_000  # characters; tokenising more than this would hold up the event loop for milliseconds


class Validate(Stage):
    """`jobs` in, validated jobs out. Tokenizers are loaded at a model's first request and kept."""

    name = "validate"

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self._tokenizers: dict[tuple[str, str], asyncio.Task[TokenizerLike]] = {}  # by source and backend

    async def run(self, intake: Intake) -> None:
        """Load the tokenizer of every model that appears, before its first request comes."""
        await intake.consume("JOBS", self.name, self.pipe.subjects.jobs_all())
        if model := self.pipe.settings.model:
            self._load(model, self.pipe.settings.backend)
        while True:
            for card in self.pipe.registry.models.values():
                self._load(card.source, card.backend)
            await asyncio.sleep(self.pipe.settings.heartbeat_interval)

    @property
    def ready(self) -> bool:
        return all(loading.done() for loading in self._tokenizers.values())

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        priority, tenant = self._lane(message)
        job = self._decode(message)
        validated = await self._validate(job, message, priority, tenant)
        route = [self.pipe.subjects.stage(stage, priority, tenant) for stage in self.pipe.settings.job_stages]
        route.append(self.pipe.subjects.batch(priority, tenant))
        await self.pipe.forward(validated, route, delivery)

    def _lane(self, message: Message) -> tuple[Priority, str]:
        priority, tenant = message.subject.split(".")[-2:]
        if re.fullmatch(TOKEN_PATTERN, tenant) is None:
            raise InvalidRequest("A tenant's name holds letters, digits, '_' and '-' alone.", param="tenant")
        for known in get_args(Priority):
            if priority == known:
                return known, tenant
        raise InvalidRequest(f"The priority is one of {', '.join(get_args(Priority))}.", param="priority")

    def _decode(self, message: Message) -> Job:
        try:
            return codec.decode_model(Job, message.data, message.headers.get(SCHEMA))
        except DecodeError as error:
            raise InvalidRequest(f"The job cannot be read: {error}.", code="malformed_job") from None

    async def _validate(self, job: Job, message: Message, priority: Priority, tenant: str) -> ValidatedJob:
        created = self.pipe.now()
        request = parse_request(job.endpoint, job.body)
        deadline = self._deadline(job.timeout or request.timeout, message, created)
        model = self.pipe.registry.models.get(request.model)
        if model is None:
            known = ", ".join(self.pipe.registry.models) or "none yet"
            raise ModelNotFound(f"The model {request.model!r} is not served here. Served: {known}.", param="model")
        tokenizer = await self._tokenizer(model)
        prompts = await self._prompts(request, tokenizer)
        longest = max(map(len, prompts))
        if longest >= model.context_length:
            raise InvalidRequest(
                f"The prompt has {longest} tokens and needs room for an answer, but the context length of "
                f"{model.name} is {model.context_length} tokens.",
                code="context_length_exceeded",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
            )
        params = generation_params(request, room=model.context_length - longest, seed=secrets.randbits(63))
        _check_vocabulary("logit_bias", params.logit_bias, tokenizer)
        _check_vocabulary("stop_token_ids", params.stop_token_ids, tokenizer)
        return ValidatedJob(
            id=job.id or endings.request_id(message),
            endpoint=job.endpoint,
            bridge=job.bridge,
            tenant=tenant,
            priority=priority,
            model=model.name,
            prompts=tuple(map(tuple, prompts)),
            params=params,
            created=created,
            deadline=deadline,
            body=job.body,
        )

    def _deadline(self, timeout: float | None, message: Message, created: float) -> float:
        given = message.headers.get(DEADLINE)
        try:
            deadline = float(given) if given else created + (timeout or self.pipe.settings.default_timeout)
        except ValueError:
            deadline = math.nan
        if not math.isfinite(deadline):
            raise InvalidRequest(f"The header {DEADLINE} must hold Unix seconds.", param="deadline")
        if deadline <= created:
            raise DeadlineExceeded("The deadline passed before the job was looked at.")
        return deadline

    async def _tokenizer(self, model: ModelCard) -> TokenizerLike:
        """Raises `ModelLoadError` where this machine cannot load the model's tokenizer."""
        try:
            return await asyncio.shield(self._load(model.source, model.backend))
        except Exception:
            self._tokenizers.pop((model.source, model.backend), None)  # the next request tries again
            raise

    def _load(self, source: str, backend: str) -> asyncio.Task[TokenizerLike]:
        key = (source, backend)
        if key not in self._tokenizers:
            self._tokenizers[key] = asyncio.create_task(asyncio.to_thread(load_tokenizer, source, backend))
        return self._tokenizers[key]

    async def _prompts(self, request: Request, tokenizer: TokenizerLike) -> list[list[int]]:
        match request:
            case ChatRequest():
                return [await self._chat(request, tokenizer)]
            case CompletionRequest():
                if len(request.prompts) * (request.n or 1) > MAX_CHOICES:
                    raise InvalidRequest(f"Prompts times n is above {MAX_CHOICES}.", param="n")
                return [await self._completion(prompt, tokenizer) for prompt in request.prompts]

    async def _chat(self, request: ChatRequest, tokenizer: TokenizerLike) -> list[int]:
        for place, message in enumerate(request.messages):
            if message.content is None and not (message.role == "assistant" and message.tool_calls):
                raise InvalidRequest(f"messages[{place}].content is missing.", param=f"messages[{place}].content")
        if not any(message.text.strip() or message.tool_calls for message in request.messages):
            raise InvalidRequest("Every message is blank.", code="empty_prompt", param="messages")
        messages = [_for_template(message) for message in request.messages]
        size = sum(len(message.text) for message in request.messages)
        options = request.chat_template_kwargs or {}
        if taken := sorted(options.keys() & NOT_FOR_TEMPLATES):
            raise InvalidRequest(f"{', '.join(taken)}: not for the chat template.", param="chat_template_kwargs")
        if size <= LONG:
            return tokenizer.encode_chat(messages, **options)
        return await asyncio.to_thread(tokenizer.encode_chat, messages, **options)

    async def _completion(self, prompt: str | list[int], tokenizer: TokenizerLike) -> list[int]:
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise InvalidRequest("The prompt is blank.", code="empty_prompt", param="prompt")
        if isinstance(prompt, list):
            _check_vocabulary("prompt", prompt, tokenizer)
            return prompt
        if len(prompt) <= LONG:
            return tokenizer.encode(prompt)
        return await asyncio.to_thread(tokenizer.encode, prompt)


def _check_vocabulary(param: str, ids: Iterable[int], tokenizer: TokenizerLike) -> None:
    if (highest := max(ids, default=0)) >= tokenizer.vocabulary_size:
        raise InvalidRequest(
            f"{param}: token id {highest} is outside the vocabulary of {tokenizer.vocabulary_size}.", param=param
        )


def _for_template(message: ChatMessage) -> dict[str, object]:
    return {name: value for name, value in message.model_dump().items() if value is not None}

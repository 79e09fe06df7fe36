"""Ollama's requests, strictly typed, and the requests of OpenAI's API that mean the same.

This module checks only the shape; the check of OpenAI's requests then validates the values. `without_effect` names the
fields of a request that change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from ..errors import InvalidRequest
from ..jobs import Endpoint, Priority
from ..openai.body import Body, ModelName, Unsupported
from ..openai.chat import MOST_MESSAGES
from ..openai.completions import KeepAlive
from ..openai.dialects import schema_format, thought_options
from .options import Options
from .turns import ChatMessage, chat_messages, chat_tool

_SAME = {"model", "keep_alive", "priority", "timeout"}


def _is_effort(value: object) -> object:
    if value is None or isinstance(value, bool) or value in ("low", "medium", "high", "max"):
        return value
    raise ValueError('must be true, false, "low", "medium", "high" or "max"')


def _is_format(value: object) -> object:
    if value in (None, "", "json") or isinstance(value, dict):
        return value
    raise ValueError('must be "json" or a JSON Schema')


def _is_input(value: object) -> object:
    texts = value if isinstance(value, list) else [value]
    if value is None or all(isinstance(each, str) for each in texts):
        return value
    raise ValueError("must be a string or a list of strings")


def _missing(value: object) -> object:
    return None if value == "" else value  # Ollama's own client sends what it leaves out


Think = Annotated[bool | str | None, BeforeValidator(_is_effort)]
Format = Annotated[dict[str, Any] | str | None, BeforeValidator(_is_format)]


class ModelRequest(Body):
    """Names a model. `model` was once called `name`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = MappingProxyType(
        {"system": Unsupported((None, "")), "template": Unsupported((None, "")), "options": Unsupported((None, {}))}
    )

    model: Annotated[ModelName | None, BeforeValidator(_missing)] = None
    name: Annotated[ModelName | None, BeforeValidator(_missing)] = None
    stream: bool | None = None
    verbose: Any = None  # the answer is always whole
    # Nothing is downloaded.
    insecure: Any = None
    username: Any = None
    password: Any = None

    @property
    def named(self) -> str:
        """Raises `InvalidRequest`."""
        if (name := self.model or self.name) is None:
            raise InvalidRequest("model is missing.", code="missing_required_parameter", param="model")
        return name


class OllamaRequest(Body):
    """What the requests have in common. `priority` and `timeout` are Penstock's own."""

    model: ModelName
    options: Options | None = None
    keep_alive: KeepAlive = None
    priority: Priority | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @property
    def without_effect(self) -> Iterator[str]:
        if self.options:
            yield from self.options.without_effect

    @property
    def endpoint(self) -> Endpoint:
        """Where the request is answered that means the same."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """The body of that request."""
        return self.model_dump(include=_SAME, exclude_none=True)


class _Answered(OllamaRequest):
    """A request for text. Answers stream unless `stream` is false."""

    stream: bool | None = None
    format: Format = None
    think: Think = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Accepted without effect: a prompt that does not fit is refused.
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def without_effect(self) -> Iterator[str]:
        yield from super().without_effect
        yield from (name for name in ("truncate", "shift") if getattr(self, name))

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def only_loads(self) -> bool:
        """Whether nothing is asked: the model is to be loaded, or unloaded if `keep_alive` is 0."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        body = super().body() | (self.options.parameters if self.options else {})
        body |= {"stream": self.streams, "fit_max_tokens": True}
        if isinstance(self.format, dict):
            body |= schema_format(self.format)
        elif self.format:
            body["response_format"] = {"type": "json_object"}
        return body

    def _of_chat(self) -> dict[str, Any]:
        """The parameters that only a chat has."""
        body: dict[str, Any] = {}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.think is False:
            body["reasoning_effort"] = "none"
        elif self.think:
            body |= thought_options(None if self.think is True else self.think, thinks=True)
        return body


class ChatRequest(_Answered):
    """Body of `/api/chat`."""

    messages: Annotated[list[ChatMessage] | None, Field(max_length=MOST_MESSAGES)] = None
    tools: list[dict[str, Any]] | None = None

    @property
    def endpoint(self) -> Endpoint:
        return "/v1/chat/completions"

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def body(self) -> dict[str, Any]:
        """Raises `InvalidRequest` for a tool's message without a call."""
        body = super().body() | self._of_chat() | {"messages": chat_messages(self.messages or [])}
        if self.tools:
            body["tools"] = list(map(chat_tool, self.tools))
        return body


class GenerateRequest(_Answered):
    """Body of `/api/generate`: a prompt as one turn of a chat, or as it stands with `raw` or before a `suffix`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = MappingProxyType(
        {
            "context": Unsupported((None, []), "send the conversation to /api/chat"),
            "template": Unsupported((None, ""), "the model's own is used; with raw the prompt stays as it is"),
            "width": Unsupported((None, 0)),
            "height": Unsupported((None, 0)),
            "steps": Unsupported((None, 0)),
        }
    )

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None

    @property
    def endpoint(self) -> Endpoint:
        return "/v1/completions" if self.raw or self.suffix else "/v1/chat/completions"

    @property
    def only_loads(self) -> bool:
        return not (self.prompt or self.suffix or self.images)

    def body(self) -> dict[str, Any]:
        """Raises `InvalidRequest` for what only a chat has, beside a prompt that is none."""
        if self.endpoint == "/v1/chat/completions":
            turns = [ChatMessage(role="user", content=self.prompt, images=self.images)]
            if self.system:
                turns.insert(0, ChatMessage(role="system", content=self.system))
            return super().body() | self._of_chat() | {"messages": chat_messages(turns)}
        for name in ("system", "images", "think"):
            if getattr(self, name):
                fault = f"{name} cannot be combined with {'raw' if self.raw else 'suffix'}; leave one of them out."
                raise InvalidRequest(fault, param=name)
        body = super().body() | {"prompt": self.prompt or ""}
        body |= {"suffix": self.suffix} if self.suffix else {}
        return body | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})


class _Embedded(OllamaRequest):
    """A request for vectors, or of nothing, for which the model is loaded. What embeds is never unloaded, so
    `keep_alive` has no effect."""

    @property
    def without_effect(self) -> Iterator[str]:
        yield from super().without_effect
        if self.keep_alive is not None:
            yield "keep_alive"

    @property
    def only_loads(self) -> bool:
        raise NotImplementedError

    @property
    def endpoint(self) -> Endpoint:
        return "/v1/embeddings"

    def body(self) -> dict[str, Any]:
        body = super().body() | {"encoding_format": "float"}
        body.pop("keep_alive", None)
        return body


class EmbedRequest(_Embedded):
    """Body of `/api/embed`."""

    input: Annotated[str | list[str] | None, BeforeValidator(_is_input)] = None
    truncate: bool | None = None  # without effect: an input that does not fit is refused
    dimensions: int | None = None

    @property
    def without_effect(self) -> Iterator[str]:
        yield from super().without_effect
        if self.truncate:
            yield "truncate"

    @property
    def only_loads(self) -> bool:
        return not self.input

    def body(self) -> dict[str, Any]:
        body = super().body() | {"input": self.input}
        return body | ({"dimensions": self.dimensions} if self.dimensions else {})


class EmbeddingsRequest(_Embedded):
    """Body of `/api/embeddings`, which `/api/embed` has replaced."""

    prompt: str | None = None

    @property
    def only_loads(self) -> bool:
        return not self.prompt

    def body(self) -> dict[str, Any]:
        return super().body() | {"input": self.prompt}

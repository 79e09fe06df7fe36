"""Ollama's requests, strictly typed, and the requests of OpenAI's API that mean the same.

This module checks only the shape; the check of OpenAI's requests then validates the values. `without_effect` names the
fields of a request that change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field

from ..errors import InvalidRequest
from ..jobs import Endpoint, Priority
from ..openai.body import Body, ModelName, OpenBody, Unsupported
from ..openai.chat import MOST_MESSAGES
from ..openai.completions import KeepAlive
from .options import Options

_THINKS = {"enable_thinking": True, "thinking": True}  # the names of the switch in chat templates
_SAME = {"model", "keep_alive", "priority", "timeout"}


def _is_effort(value: object) -> object:
    if value is None or isinstance(value, bool) or value in ("low", "medium", "high", "max"):
        return value
    raise ValueError('must be true, false, "low", "medium", "high" or "max"')


def _is_format(value: object) -> object:
    if value in (None, "", "json") or isinstance(value, dict):
        return value
    raise ValueError('must be "json" or a JSON Schema')


Think = Annotated[bool | str | None, BeforeValidator(_is_effort)]
Format = Annotated[dict[str, Any] | str | None, BeforeValidator(_is_format)]


class CalledFunction(OpenBody):
    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class Call(OpenBody):
    function: CalledFunction
    id: str | None = None


class ChatMessage(OpenBody):
    """`images` are in base64. A tool's message answers the call that `tool_call_id` names, or else the first one
    that has no answer yet, of the tool `tool_name` if that is given."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ModelRequest(Body):
    """Names a model. `model` was once called `name`."""

    model: ModelName | None = None
    name: ModelName | None = None
    stream: bool | None = None
    verbose: Any = None  # the answer is always whole
    insecure: Any = None  # nothing is downloaded

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
            schema = {"name": "output", "schema": self.format}  # not strict: properties may be optional
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.format:
            body["response_format"] = {"type": "json_object"}
        return body

    def _of_chat(self) -> dict[str, Any]:
        """The parameters that only a chat has. Templates of models that cannot think ignore those for thoughts."""
        body: dict[str, Any] = {}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.think is False:
            body["reasoning_effort"] = "none"
        elif self.think:
            effort = {} if self.think is True else {"reasoning_effort": "xhigh" if self.think == "max" else self.think}
            body["chat_template_kwargs"] = {**_THINKS, **effort}
        return body


class ChatRequest(_Answered):
    """Body of `/api/chat`."""

    messages: Annotated[list[ChatMessage], Field(max_length=MOST_MESSAGES)] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    @property
    def endpoint(self) -> Endpoint:
        return "/v1/chat/completions"

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def body(self) -> dict[str, Any]:
        """Raises `InvalidRequest` for a tool's message without a call."""
        body = super().body() | self._of_chat() | {"messages": _chat_messages(self.messages)}
        if self.tools:
            body["tools"] = [{"type": "function", **tool} for tool in self.tools]
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
            return super().body() | self._of_chat() | {"messages": _chat_messages(turns)}
        for name in ("system", "images", "think"):
            if getattr(self, name):
                fault = f"{name} cannot be combined with {'raw' if self.raw else 'suffix'}; leave one of them out."
                raise InvalidRequest(fault, param=name)
        body = super().body() | {"prompt": self.prompt or ""}
        body |= {"suffix": self.suffix} if self.suffix else {}
        return body | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})


class EmbedRequest(OllamaRequest):
    """Body of `/api/embed`."""

    input: str | list[str]
    truncate: bool | None = None  # without effect: an input that does not fit is refused
    dimensions: int | None = None

    @property
    def without_effect(self) -> Iterator[str]:
        yield from super().without_effect
        if self.truncate:
            yield "truncate"

    @property
    def endpoint(self) -> Endpoint:
        return "/v1/embeddings"

    def body(self) -> dict[str, Any]:
        body = super().body() | {"input": self.input, "encoding_format": "float"}
        body.pop("keep_alive", None)  # what embeds is never unloaded
        return body | ({"dimensions": self.dimensions} if self.dimensions else {})


class EmbeddingsRequest(OllamaRequest):
    """Body of `/api/embeddings`, which `/api/embed` has replaced."""

    prompt: str

    @property
    def endpoint(self) -> Endpoint:
        return "/v1/embeddings"

    def body(self) -> dict[str, Any]:
        body = super().body() | {"input": self.prompt, "encoding_format": "float"}
        body.pop("keep_alive", None)
        return body


def _chat_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Each message as one of a chat request; calls get ids, by which the answers of tools name them."""
    chat: list[dict[str, Any]] = []
    waiting: dict[str, str] = {}  # id → name of the tool, of calls without an answer
    for index, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.images:
            shown = [{"type": "image_url", "image_url": {"url": _url(image)}} for image in message.images]
            said = [{"type": "text", "text": message.content}] if message.content else []
            turn["content"] = [*shown, *said]
        if message.thinking:
            turn["reasoning"] = message.thinking
        if message.tool_calls:
            calls = {call.id or f"call_{index}_{number}": call for number, call in enumerate(message.tool_calls)}
            waiting |= {id: call.function.name for id, call in calls.items()}
            turn["tool_calls"] = [_call(id, call.function) for id, call in calls.items()]
        if message.role == "tool":
            turn["tool_call_id"] = id = _answered(message, waiting, f"messages[{index}]")
            waiting.pop(id, None)
        chat.append(turn)
    return chat


def _answered(message: ChatMessage, waiting: Mapping[str, str], path: str) -> str:
    """The id of the call that a tool's message answers. Raises `InvalidRequest` if there is none."""
    if message.tool_call_id:
        return message.tool_call_id
    for id, name in waiting.items():
        if message.tool_name in (None, name):
            return id
    what = f"a call of {message.tool_name!r}" if message.tool_name else "a call"
    raise InvalidRequest(f"{path}: before this tool's message there must be {what} without an answer.", param=path)


def _call(id: str, function: CalledFunction) -> dict[str, Any]:
    given = function.arguments
    arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _url(image: str) -> str:
    return image if image.startswith("data:") else f"data:;base64,{image}"

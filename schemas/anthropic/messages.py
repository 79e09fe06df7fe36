"""Anthropic's Messages request, strictly typed, and the chat request that means the same.

This module checks only the shape; the check of chat requests then validates the values. Fields that ask for a service
of Anthropic's which does not change the prompt, or only shortens it, are accepted and have no effect; `without_effect`
names those of a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from ..errors import InvalidRequest
from ..jobs import Priority
from ..openai.body import Body, ModelName, OpenBody, Unsupported
from ..openai.chat import MOST_MESSAGES
from ..openai.dialects import schema_format, thought_options
from ..openai.result_images import ResultImages
from .blocks import (
    Block,
    DocumentBlock,
    ImageBlock,
    Marked,
    RedactedThinkingBlock,
    Result,
    SearchResultBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    as_blocks,
)
from .tools import ClientTool, is_of_client

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OF_TOOLS = ("defer_loading", "input_examples", "allowed_callers")  # fields of a tool without effect
_SAME = {"max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "priority", "timeout"}
_SAME |= {"seed", "min_p", "repetition_penalty"}


class InputMessage(OpenBody):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(as_blocks, json_schema_input_type=str | list[Block])]


class Tool(Marked):
    """The model sees every tool from the start and calls it itself; the last three fields have no effect."""

    name: str
    description: str | None = None
    input_schema: Annotated[dict[str, Any], Field(serialization_alias="parameters")]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # no effect: arguments always stream
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None

    @property
    def function(self) -> dict[str, Any]:
        """The tool as the function of a chat request."""
        kept = {"name", "description", "input_schema", "strict"}
        function = self.model_dump(include=kept, by_alias=True, exclude_none=True)
        return function | {"may_omit": True} if self.strict else function


class ServerTool(Marked):
    """A tool that Anthropic's servers run; the model does not see it."""

    type: str
    name: str


_is_of_server = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_(regex|bm25))(_[0-9]{8})?").fullmatch


def _tool_kind(tool: object) -> str | None:
    if not isinstance(tool, dict):
        return "<custom>"
    if _is_of_server(str(kind := tool.get("type"))):
        return "<server>"
    return "<client>" if is_of_client(kind) else "<custom>" if kind in (None, "custom") else None


AnyTool = Annotated[
    Annotated[ServerTool, Tag("<server>")] | Annotated[ClientTool, Tag("<client>")] | Annotated[Tool, Tag("<custom>")],
    Discriminator(
        _tool_kind,
        custom_error_type="tool_type",
        custom_error_message="Input should be a tool of type custom, bash, text_editor or memory, or one that "
        "Anthropic's servers run, which has no effect; there are no others",
    ),
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_where_due(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("must have name if and only if its type is tool")
        return self


class Thinking(Body):
    """`budget_tokens` has no effect: `max_tokens` limits thoughts and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None  # no effect: the response has every thought in full


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


def _clearing(kind: str) -> str:
    if not re.fullmatch("clear_(thinking|tool_uses)_[0-9]{8}", kind):
        raise ValueError("must clear thoughts or tool uses; this server compacts no conversation")
    return kind


class ContextEdit(OpenBody):
    """Accepted without effect: the prompt keeps what Anthropic would clear to save context."""

    type: Annotated[str, AfterValidator(_clearing)]


class ContextManagement(Body):
    edits: list[ContextEdit] = Field(default_factory=list)


class CountRequest(Body):
    """Body of `/v1/messages/count_tokens`: the fields that make the prompt."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = MappingProxyType(
        {
            "container": Unsupported(),
            "mcp_servers": Unsupported((None, []), "send the tools of MCP servers to /v1/responses"),
        }
    )

    model: ModelName
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Annotated[Texts, BeforeValidator(lambda given: [] if given is None else given)] = Field(
        default_factory=list
    )
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the former name of output_config.format
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    speed: str | None = None

    @property
    def without_effect(self) -> Iterable[str]:
        """The paths of the fields that have no effect."""
        if self.context_management and self.context_management.edits:
            yield "context_management"
        if self.speed not in (None, "standard"):
            yield "speed"
        if self.thinking and self.thinking.budget_tokens:
            yield "thinking.budget_tokens"
        if self.thinking and self.thinking.display:
            yield "thinking.display"
        if self.output_config and self.output_config.task_budget:
            yield "output_config.task_budget"
        blocks = [block for message in self.messages for block in message.content]
        if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
            yield "messages[].content[redacted_thinking]"
        if any(isinstance(block, TextBlock | DocumentBlock | SearchResultBlock) and block.cites for block in blocks):
            yield "messages[].content[].citations"
        for tool in self.tools or ():
            if isinstance(tool, ServerTool):
                yield f"tools[{tool.type}]"
            else:
                yield from (f"tools[].{name}" for name in _OF_TOOLS if getattr(tool, name))

    def chat_body(self) -> dict[str, Any]:
        """The body of a chat request. Raises `InvalidRequest` for a block that its message cannot hold."""
        body: dict[str, Any] = {"model": self.model, "messages": _chat_messages(self.system, self.messages)}
        if tools := [tool for tool in self.tools or () if not isinstance(tool, ServerTool)]:
            functions = [tool.function for tool in tools]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        if choice := self.tool_choice:
            named = {"type": "function", "function": {"name": choice.name}}
            body["tool_choice"] = _CHOICES.get(choice.type, named)
            if choice.disable_parallel_tool_use:
                body["parallel_tool_calls"] = False
        body |= self._reasoning()
        if form := (self.output_config and self.output_config.format) or self.output_format:
            body |= schema_format(form.schema_)
        return body

    def _reasoning(self) -> dict[str, Any]:
        if self.thinking and self.thinking.type == "disabled":
            return {"reasoning_effort": "none"}
        effort = self.output_config.effort if self.output_config else None
        return thought_options(effort, thinks=self.thinking is not None)


class MessagesRequest(CountRequest):
    """Body of `/v1/messages`. From `priority` on, the fields are Penstock's own, named as in chat requests."""

    max_tokens: int
    stop_sequences: Annotated[list[str] | None, Field(serialization_alias="stop")] = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, str | None] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # both mean the normal lane
    priority: Priority | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def chat_body(self) -> dict[str, Any]:
        body = super().chat_body() | self.model_dump(include=_SAME, by_alias=True, exclude_none=True)
        body["fit_max_tokens"] = True  # required, so clients send the maximum of the model they were made for
        user = (self.metadata or {}).get("user_id")
        return body | ({"user": user} if user else {})


def _chat_messages(system: list[TextBlock], messages: list[InputMessage]) -> list[dict[str, Any]]:
    """Merge consecutive turns of one role, as Anthropic does; a tool's result gets a role of its own."""
    chat: list[dict[str, Any]] = []
    for part in system:
        _add(chat, "system", "content", part.text)
    called: set[str] = set()
    images = ResultImages()
    for index, message in enumerate(messages):
        param = f"messages[{index}].content"
        for block in message.content:
            if not isinstance(block, ToolResultBlock):
                _show(chat, images)
            match block, message.role:
                case TextBlock(), role:
                    _add(chat, role, "content", block.text)
                case SearchResultBlock(), "user":
                    _add(chat, "user", "content", block.text)
                case DocumentBlock(), "user":
                    for piece in block.pieces:
                        if piece["type"] == "text":
                            _add(chat, "user", "content", piece["text"])
                        else:
                            _parts(_turn(chat, "user")).append(piece)
                case ImageBlock(), "user":
                    _parts(_turn(chat, "user")).append(block.part)
                case ThinkingBlock(), "assistant":
                    _add(chat, "assistant", "reasoning", block.thinking)
                case RedactedThinkingBlock(), "assistant":
                    pass  # no other model can read them
                case ToolUseBlock(), "assistant":
                    called.add(block.id)
                    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
                    call = {"id": block.id, "type": "function", "function": function}
                    _turn(chat, "assistant").setdefault("tool_calls", []).append(call)
                case ToolResultBlock(), "user":
                    if block.tool_use_id not in called:
                        fault = f"{param}: no tool_use before it has the id {block.tool_use_id!r}."
                        raise InvalidRequest(fault, param=param)
                    text = images.text([piece for one in block.content for piece in _pieces(one)], "\n")
                    text = f"Error: {text}" if block.is_error else text  # a chat message has no field for errors
                    chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
                case _:
                    raise InvalidRequest(
                        f"{param}: the role {message.role} cannot have a block of type {block.type}; leave it out.",
                        param=param,
                    )
    _show(chat, images)
    return chat


def _pieces(block: Result) -> list[str | dict[str, Any]]:
    """What the result of a tool has of a block: texts, and images and documents as parts of a chat message."""
    match block:
        case ImageBlock():
            return [block.part]
        case DocumentBlock():
            return [part["text"] if part["type"] == "text" else part for part in block.pieces]
    return [block.text]


def _show(chat: list[dict[str, Any]], images: ResultImages) -> None:
    """Put the images and documents of the results of tools behind these."""
    if parts := images.take():
        _parts(_turn(chat, "user")).extend(parts)


def _turn(chat: list[dict[str, Any]], role: str) -> dict[str, Any]:
    if not chat or chat[-1]["role"] != role:
        chat.append({"role": role, "content": ""})
    return chat[-1]


def _parts(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """The content of a turn as a list of parts."""
    if isinstance(turn["content"], str):
        turn["content"] = [{"type": "text", "text": turn["content"]}] if turn["content"] else []
    parts: list[dict[str, Any]] = turn["content"]
    return parts


def _add(chat: list[dict[str, Any]], role: str, field: str, text: str) -> None:
    turn = _turn(chat, role)
    if isinstance(parts := turn.get(field), list):
        if parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += f"\n{text}"
        else:
            parts.append({"type": "text", "text": text})
    else:
        turn[field] = f"{parts}\n{text}" if parts else text

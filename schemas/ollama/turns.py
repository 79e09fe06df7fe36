"""The messages and tools of Ollama's chats, and those of OpenAI's API that mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field

from ..errors import InvalidRequest
from ..openai.body import OpenBody


def _is_object(value: object) -> object:
    if value is None or isinstance(value, dict | str):
        return value
    raise ValueError("must be an object")


def _lowered(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class CalledFunction(OpenBody):
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[dict[str, Any] | str | None, BeforeValidator(_is_object)] = None


class Call(OpenBody):
    function: CalledFunction
    id: str | None = None


class ChatMessage(OpenBody):
    """`images` are in base64. A tool's message answers the call that `tool_call_id` names, or else the first one
    that has no answer yet, of the tool `tool_name`, or `name`, if that is given."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_lowered)]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as one of a chat request, without the null with which Ollama's own client says that it has no arguments,
    or requires none."""
    tool = {**tool, "type": tool.get("type") or "function"}
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(parameters := function.get("parameters"), dict):
        given = {name: value for name, value in parameters.items() if value is not None}
        tool["function"] = {**function, "parameters": given}
    return tool


def chat_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
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
            ids = [call.id or f"call_{index}_{number}" for number, call in enumerate(message.tool_calls)]
            functions = [call.function for call in message.tool_calls]
            waiting |= {id: function.name for id, function in zip(ids, functions, strict=True)}
            turn["tool_calls"] = list(map(_call, ids, functions))
        if message.role == "tool":
            turn["tool_call_id"] = id = _answered(message, waiting, f"messages[{index}]")
            waiting.pop(id, None)
        chat.append(turn)
    return chat


def _answered(message: ChatMessage, waiting: Mapping[str, str], path: str) -> str:
    """The id of the call that a tool's message answers. Raises `InvalidRequest` if there is none."""
    if message.tool_call_id:
        return message.tool_call_id
    tool = message.tool_name or message.name or None
    for id, name in waiting.items():
        if tool in (None, name):
            return id
    what = f"a call of {tool!r}" if tool else "a call"
    raise InvalidRequest(f"{path}: before this tool's message there must be {what} without an answer.", param=path)


def _call(id: str, function: CalledFunction) -> dict[str, Any]:
    given = function.arguments or {}
    arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _url(image: str) -> str:
    return image if image.startswith("data:") else f"data:;base64,{image}"

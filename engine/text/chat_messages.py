"""Chat messages as OpenAI's clients send them, made into what chat templates understand."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ...schemas.bounds import load_arguments
from ...schemas.errors import InvalidRequest

_LOOPS_OVER_CONTENT = re.compile(r"\bfor\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])")


def normalise(
    messages: Sequence[Mapping[str, Any]], template: str, *, objects_alone: bool = False
) -> list[dict[str, Any]]:
    """Messages in the shape that `template` expects; the originals stay as they are.

    Role "developer" becomes "system", content parts become one string (or the other way round for a template that only
    takes parts), null content an empty string, and arguments of tool calls, JSON in a string, become objects. Those
    that are no JSON object, or are nested too deep, stay text, as the model wrote them, or are left out with
    `objects_alone`. Content with parts of type "image", which are marks without data, stays as it is.
    Raises `InvalidRequest` for content that is neither.
    """
    takes_parts = reads_parts(template) and "is string" not in template
    return [_message(message, takes_parts, objects_alone) for message in messages]


def has_other_arguments(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the arguments of some call are no JSON object."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return not all(isinstance(_arguments(function["arguments"]), dict) for function in functions)


def reads_parts(template: str) -> bool:
    """Whether a template reads lists of parts as content, at least where they are no strings."""
    return _LOOPS_OVER_CONTENT.search(template) is not None


def has_marks(content: object) -> bool:
    """Whether some part of the content is the mark of an image."""
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") == "image" for part in content
    )


def flatten(content: object) -> str:
    """Text of a message's content, be it null, a string or an array of text parts. Raises `InvalidRequest`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest("a message's content must be a string or an array of parts", param="messages")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(f"this model takes text alone; a content part is of type {kind!r}", param="messages")
    return "".join(texts)


def close_thinking(prompt: str, vocabulary: Container[str]) -> str:
    """Make a model that thinks in <think> tags answer at once, where its template has no switch for it.

    An empty thought is written in the model's name; a model without these tokens does not think to begin with.
    """
    if "</think>" not in vocabulary:
        return prompt
    return prompt.removesuffix("\n").removesuffix("<think>") + "<think>\n\n</think>\n\n"


def _message(message: Mapping[str, Any], takes_parts: bool, objects_alone: bool) -> dict[str, Any]:
    result = dict(message)
    if result.get("role") == "developer":
        result["role"] = "system"
    if not has_marks(result.get("content")):
        text = flatten(result.get("content"))
        result["content"] = [{"type": "text", "text": text}] if takes_parts else text
    if calls := result.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call, objects_alone) for call in calls]
    return result


def _tool_call(call: Mapping[str, Any], objects_alone: bool) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    arguments = _arguments(function["arguments"])
    if objects_alone and not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(text: object) -> object:
    """The object that a call's arguments are; of a text that is none, itself."""
    if not isinstance(text, str):
        return text
    try:
        found = load_arguments(text) if text.strip() else {}
    except ValueError:
        return text
    return found if isinstance(found, dict) else text

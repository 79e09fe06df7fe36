"""Converts items of OpenAI's Responses API to chat messages.

The items must be complete, as `items.input_items` and `turn_items.TurnItems` make them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from ...errors import InvalidRequest
from ...loops import Items, LoopTool
from ..custom_tools import arguments_of
from ..result_images import ResultImages
from .built_in_items import TOOLS, arguments_of_built_in, result_of_built_in

_REFUSED = "The user did not approve this call."
_UNFINISHED = "This call was not finished."
_OF_FILES = ("filename", "file_data", "file_id", "file_url", "detail")
_of_turn = re.compile(r"[a-z]+_([0-9a-f]{32}[0-9]{4})").match  # response and turn: see `turn_items.item_id`


def chat_messages(
    items: Items,
    instructions: str | None,
    *,
    tools: Sequence[LoopTool] = (),
    namespaced: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    before: int = 0,
    images: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The chat messages of these items. The text, thoughts and calls of one turn are one message. A call that a person
    approved is placed where the model asked for it; a call that still waits for approval is left out.

    `tools` has the model's names of the servers' tools, `namespaced` those of functions in namespaces (see
    `response_tools`); the first `before` items come before the request's input. Of the images that servers' tools have
    returned, the model sees those with files among `images`, and the marks of the others.

    Raises `InvalidRequest` for an output without its call and for a reference to an unknown item.
    """
    names = {(tool.label, tool.tool): tool.name for tool in tools}
    functions = {key: name for name, key in namespaced.items()}
    asked = {item["id"] for item in items if item["type"] == "mcp_approval_request"}
    answers = {
        item["approval_request_id"]: item
        for item in items
        if item.get("approval_request_id") in asked and (item["type"] == "mcp_call" or not item["approve"])
    }
    known: set[str] = set()
    chat = _Chat()
    if instructions:
        chat.say("system", instructions)
    for index, item in enumerate(items):
        match item["type"]:
            case "message" if item["role"] == "assistant":
                turn = chat.turn(item)
                turn["content"] += _text(item["content"])
            case "message":
                chat.say(item["role"], _content(item["content"]))
            case "reasoning":
                turn = chat.turn(item)
                thought = _text(item.get("content") or item["summary"])
                turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), thought)))
            case "function_call":
                own: str = item["name"]
                chat.call(item, item["call_id"], functions.get((item.get("namespace", ""), own), own))
            case "custom_tool_call":
                chat.call(item, item["call_id"], item["name"])
            case "shell_call" | "local_shell_call" | "apply_patch_call" as kind:
                chat.call(item, item["call_id"], TOOLS[kind])
            case (
                "function_call_output"
                | "custom_tool_call_output"
                | "shell_call_output"
                | "local_shell_call_output"
                | "apply_patch_call_output"
            ) as kind:
                is_built_in = kind.removesuffix("_output") in TOOLS
                output = result_of_built_in(item) if is_built_in else item["output"]
                if not chat.answer(item["call_id"], output) and index >= before:
                    param = f"input[{index - before}].call_id"
                    raise InvalidRequest(f"{param}: no call before it has the id {item['call_id']!r}.", param=param)
                chat.answered = True
            case "mcp_call" | "mcp_approval_request" if item.get("approval_request_id") not in asked:
                answer = item if item["type"] == "mcp_call" else answers.get(item["id"])
                if answer is not None:
                    name: str = item["name"]
                    chat.call(item, item["id"], names.get((item["server_label"], name), name))
                    chat.answer(item["id"], _with_images(_outcome(answer), answer.get("images"), images))
            case "item_reference" if item["id"] not in known and index >= before:
                param = f"input[{index - before}].id"
                raise InvalidRequest(f"{param}: there is no item {item['id']!r} before it.", param=param)
        known.add(item["id"])
    chat.close()
    return chat.messages


class _Chat:
    """Builds the messages. The assistant's last turn and the results of its tools stay open until an item that is not
    part of the turn."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.answered = False  # the client has sent a result, so the turn is over; set by chat_messages
        self._turn: dict[str, Any] | None = None
        self._key: str | None = None  # response and turn, if the ids of the items have them
        self._results: list[dict[str, Any]] = []
        self._images = ResultImages()
        self._shown: list[dict[str, Any]] = []  # the content of the last message with images of results
        self._called: dict[str, str] = {}  # the calls' ids, by what results name them

    def say(self, role: str, content: str | list[dict[str, Any]]) -> None:
        self.close()
        if role == "user" and self.messages and self.messages[-1]["content"] is self._shown:
            self._shown += [{"type": "text", "text": content}] if isinstance(content, str) else content
        else:
            self.messages.append({"role": role, "content": content})

    def turn(self, item: dict[str, Any]) -> dict[str, Any]:
        """The assistant's message that the item is part of."""
        found = _of_turn(item["id"])
        key = found[1] if found else None
        if self._turn is None or self.answered:
            same = False
        elif key and self._key:
            same = key == self._key
        else:  # an item of unknown origin: thoughts, text and calls come in this order
            same = not self._results and not (item["type"] in ("message", "reasoning") and self._turn["content"])
        if not same or self._turn is None:
            self.close()
            self._turn, self._key = {"role": "assistant", "content": ""}, None
            self.messages.append(self._turn)
        self._key = self._key or key
        return self._turn

    def call(self, item: dict[str, Any], call_id: str, name: str) -> None:
        match item["type"]:
            case "custom_tool_call":
                arguments = arguments_of(item["input"])
            case kind if kind in TOOLS:
                arguments = arguments_of_built_in(item)
            case _:
                arguments = _arguments(item["arguments"])
        function = {"name": name, "arguments": arguments}
        calls = self.turn(item).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self._called[call_id] = call_id
        if item["type"] == "local_shell_call":  # some results name the item
            self._called.setdefault(item["id"], call_id)

    def answer(self, call_id: str, output: str | list[dict[str, Any]]) -> bool:
        """Add the result of a call; return False if there is no such call."""
        known = self._called.get(call_id)
        if known is None:
            return False
        call_id = known
        content = _content(output)
        if not isinstance(content, str):
            content = self._images.text([part.get("text", part) for part in content], "\n")
        result = {"role": "tool", "tool_call_id": call_id, "content": content}
        if call_id in self._calls():
            self._results.append(result)
        else:
            self.close()
            self.messages.append(result)
        return True

    def close(self) -> None:
        """End the turn; its results get the order of its calls."""
        order = self._calls()
        self.messages += sorted(self._results, key=lambda result: order.index(result["tool_call_id"]))
        self._turn, self._results, self.answered = None, [], False
        if images := self._images.take():
            self._shown = images
            self.messages.append({"role": "user", "content": images})

    def _calls(self) -> list[str]:
        return [call["id"] for call in (self._turn or {}).get("tool_calls", [])]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal", "") for part in content)


def _content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content: one text, or parts where there are images or documents."""
    if isinstance(content, str) or all(part["type"] not in ("input_image", "input_file") for part in content):
        return _text(content)
    return [_part(part) for part in content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    match part["type"]:
        case "input_image":
            image = {"url": part.get("image_url"), "file_id": part.get("file_id"), "detail": part.get("detail")}
            return {"type": "image_url", "image_url": _given(image)}
        case "input_file":
            return {"type": "file", "file": _given({name: part.get(name) for name in _OF_FILES})}
    return {"type": "text", "text": _text([part])}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _arguments(text: str) -> str:
    """`text` if it is a JSON object, else an empty one, as chat templates accept only objects."""
    try:
        return text if isinstance(orjson.loads(text), dict) else "{}"
    except orjson.JSONDecodeError:
        return "{}"


def _outcome(item: dict[str, Any]) -> str:
    """The result of a call as text for the model."""
    if item["type"] == "mcp_approval_response":
        return " ".join(filter(None, (_REFUSED, item.get("reason"))))
    if (error := item.get("error")) is None:
        output: str | None = item.get("output")
        return _UNFINISHED if output is None else output
    text = error if isinstance(error, str) else error.get("message") or error.get("content")
    if isinstance(text, list) and all(isinstance(part, dict) and "text" in part for part in text):
        text = "\n".join(str(part["text"]) for part in text)
    return f"Error: {text if isinstance(text, str) else orjson.dumps(text).decode()}"


def _with_images(text: str, files: Sequence[str] | None, shown: Collection[str]) -> str | list[dict[str, Any]]:
    """The result of a call, with those of its images that are `shown` in the places of their marks."""
    parts: list[dict[str, Any]] = []
    for file in files or ():
        if file in shown:
            said, _, text = text.partition(f"[image {file}]")
            parts += [{"type": "input_text", "text": said}, {"type": "input_image", "file_id": file}]
    if not parts:
        return text
    return [part for part in (*parts, {"type": "input_text", "text": text}) if part.get("text") != ""]

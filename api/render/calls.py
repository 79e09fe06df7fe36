"""Renders tool calls as OpenAI's chats do: of functions with arguments in JSON, of custom tools with a text. Other
wires have the arguments as an object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from ...schemas.errors import GenerationFailed
from ...schemas.events import Token, ToolCallDelta
from ...schemas.openai.custom_tools import InputReader, input_of


class CallDeltas:
    """The pieces of a stream's calls. It must see every token of a choice in order; `custom` are the names of custom
    tools."""

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom
        self._inputs: dict[int, dict[int, InputReader]] = {}  # by choice and index of the call, of custom tools

    def deltas(self, token: Token) -> list[dict[str, Any]]:
        """What a token adds to calls. The one that ends its choice adds what is left of their inputs."""
        found = [self._delta(call, token.choice) for call in token.tool_calls]
        if token.finish_reason is not None:
            left = {index: reader.end() for index, reader in self._inputs.pop(token.choice, {}).items()}
            found += [{"index": index, "custom": {"input": text}} for index, text in left.items() if text]
        return found

    def _delta(self, call: ToolCallDelta, choice: int) -> dict[str, Any]:
        if call.name in self._custom:
            self._inputs.setdefault(choice, {})[call.index] = InputReader()
        reader = self._inputs.get(choice, {}).get(call.index)
        kind, field = ("function", "arguments") if reader is None else ("custom", "input")
        said = call.arguments if reader is None else reader.feed(call.arguments)
        head = {"index": call.index} if call.id is None else {"index": call.index, "id": call.id, "type": kind}
        return {**head, kind: {field: said} if call.name is None else {"name": call.name, field: said}}


def call_json(call: ToolCallDelta, *, is_custom: bool) -> dict[str, Any]:
    """A whole call."""
    if is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def arguments_object(call: ToolCallDelta) -> orjson.Fragment:
    """A call's arguments as Anthropic's client reads them from a stream: as much as is there of those that were cut
    off, with numbers of any size. Raises `GenerationFailed` if they are no JSON object."""
    try:
        found = from_json(call.arguments or "{}", allow_partial=True)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise GenerationFailed(f"The model called {call.name} with arguments that are not a JSON object; try again.")
    return orjson.Fragment(to_json(found, inf_nan_mode="null"))


def join_calls(tokens: Iterable[Token]) -> list[ToolCallDelta]:
    """The tool calls of one choice, whole, in order."""
    calls: dict[int, ToolCallDelta] = {}
    for piece in (piece for token in tokens for piece in token.tool_calls):
        begun = calls.get(piece.index)
        calls[piece.index] = replace(begun, arguments=begun.arguments + piece.arguments) if begun else piece
    return [calls[index] for index in sorted(calls)]

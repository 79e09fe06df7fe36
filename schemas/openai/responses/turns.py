"""Converts the tokens of one turn to items of OpenAI's Responses API, the same for every reader.

The items follow each other: a new one ends the one before, since clients add each delta to the newest item. Text that
arrives between the pieces of a call waits until the call has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ...events import FinishReason, Token, TokenLogprob, ToolCallDelta
from ...loops import Items, TurnId
from ..custom_tools import InputReader
from .base import PREFIXES
from .built_in_items import TOOLS, begun_call, built_in_call

_WHOLE: tuple[FinishReason, ...] = ("stop", "stop_sequence", "tool_calls")


class Change(NamedTuple):
    """What happened to an item: it has "begun" (`item` is still empty), got "more" (`delta`, with the log-probabilities
    of its tokens), or is "whole": the model adds nothing, and only an `mcp_call` may still be in progress."""

    kind: Literal["begun", "more", "whole"]
    item: dict[str, Any]
    delta: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()


def item_id(kind: str, turn: TurnId, number: int) -> str:
    """The id of the item `number` of a turn; items before the first turn belong to turn 0."""
    position = f"{turn.turn:04}{turn.attempt:04}{number:04}"
    return f"{PREFIXES[kind]}_{turn.response.removeprefix('resp_')}{position}"


class TurnItems:
    """Takes the tokens of the turn `job` in order. `calls` is as in the event `Turn`; names that it lacks are functions
    of the client, some in namespaces (`namespaced`, as in `response_tools`), or its `custom` tools, or
    tools that are `built_in`. A call that a person must approve becomes an approval request; this, and the calls of
    tools that are built in, appear when they are complete. One of the latter whose arguments are cut off, or not what
    the tool takes, appears as the call of a function."""

    def __init__(
        self,
        job: str,
        calls: Mapping[str, Mapping[str, Any]],
        *,
        namespaced: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        custom: frozenset[str] = frozenset(),
        built_in: frozenset[str] = frozenset(),
        logprobs: bool = False,
    ) -> None:
        """Raises `ValueError` for a job that is not a turn."""
        turn = TurnId.of(job)
        if turn is None:
            raise ValueError(f"{job} is not a turn of a response.")
        self._turn = turn
        self._calls = calls
        self._namespaced = namespaced
        self._custom = custom
        self._built_in = built_in
        self._logprobs = logprobs
        self._closed: Items = []
        self._call = -1  # index of the newest call
        self._open: dict[str, Any] | None = None  # as it began
        self._is_hidden = False  # the open item, a call that a person must approve or of a tool that is built in
        self._input: InputReader | None = None  # of the open item, if it is a call of a custom tool
        self._texts: list[str] = []  # of the open item
        self._open_logprobs: list[dict[str, Any]] = []  # log-probabilities of the open item
        self._pending_logprobs: tuple[TokenLogprob, ...] = ()  # of tokens whose text has not arrived yet
        self._waiting: list[tuple[str, str, tuple[dict[str, Any], ...]]] = []  # text that arrived while a call was open

    @property
    def items(self) -> Items:
        """All items so far; the last may be in progress."""
        if self._open is None or self._is_hidden:
            return list(self._closed)
        return [*self._closed, self._whole(self._open, "in_progress")]

    def feed(self, token: Token) -> list[Change]:
        return list(self._read(token))

    def finish(self, reason: FinishReason) -> list[Change]:
        """End the turn; an item that `reason` cuts off is incomplete."""
        return list(self._close("completed" if reason in _WHOLE else "incomplete"))

    def _read(self, token: Token) -> Iterator[Change]:
        logprobs = self._logprobs_of(token)
        yield from self._say("reasoning", token.reasoning)
        yield from self._say("message", token.text, logprobs)
        for call in token.tool_calls:
            if call.index > self._call:
                yield from self._close("completed")
                self._call = call.index
                yield from self._called(call)
            yield from self._add(self._input.feed(call.arguments) if self._input else call.arguments)

    def _logprobs_of(self, token: Token) -> tuple[dict[str, Any], ...]:
        """Those of this token, and of earlier ones without text."""
        found = self._pending_logprobs + (token.logprobs or ()) if self._logprobs else ()
        has_output = token.text or token.reasoning or token.tool_calls
        self._pending_logprobs = () if has_output else found
        return tuple(map(logprob_json, found))

    def _say(self, kind: str, text: str, logprobs: tuple[dict[str, Any], ...] = ()) -> Iterator[Change]:
        if not text:
            return
        if self._open is not None and ("arguments" in self._open or "input" in self._open):
            self._waiting.append((kind, text, logprobs))
            return
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, {**fields, "content": [], "status": "in_progress"})
        yield from self._add(text, logprobs)

    def _called(self, call: ToolCallDelta) -> Iterator[Change]:
        known = call.name or ""
        source = self._calls.get(known)
        if source is None and known in self._custom:
            yield from self._begin(
                "custom_tool_call", {"call_id": call.id, "name": known, "input": "", "status": "in_progress"}
            )
            self._input = InputReader()
        elif source is None:
            space, name = self._namespaced.get(known, (None, known))
            named = {"call_id": call.id, "name": name, "arguments": "", "status": "in_progress"}
            named |= {"namespace": space} if space else {}
            yield from self._begin("function_call", named, hidden=known in self._built_in)
        else:
            named = {"server_label": source["label"], "name": source["tool"], "arguments": "", "status": "in_progress"}
            unanswered = {"approval_request_id": None, "output": None, "error": None}
            yield from self._begin("mcp_call", named | unanswered, hidden=source["approval"])

    def _begin(self, kind: str, fields: dict[str, Any], *, hidden: bool = False) -> Iterator[Change]:
        self._open = {"id": self._id(kind), "type": kind, **fields}
        self._is_hidden = hidden
        self._texts, self._open_logprobs = [], []
        if not hidden:
            yield Change("begun", self._open)

    def _add(self, text: str, logprobs: tuple[dict[str, Any], ...] = ()) -> Iterator[Change]:
        if text and self._open is not None:
            self._texts.append(text)
            self._open_logprobs += logprobs
            if not self._is_hidden:
                yield Change("more", self._open, text, logprobs)

    def _close(self, status: str) -> Iterator[Change]:
        while self._open is not None:
            if self._input is not None:
                yield from self._add(self._input.end())
                self._input = None
            # Text after a call shows that the call is complete.
            whole = self._whole(self._open, "completed" if self._waiting else status)
            if self._is_hidden and whole["type"] == "mcp_approval_request":
                yield Change("begun", whole)
            elif self._is_hidden and whole["type"] in TOOLS:
                yield Change("begun", begun_call(whole))
            elif self._is_hidden:
                yield Change("begun", self._open)
                if whole["arguments"]:
                    yield Change("more", self._open, whole["arguments"])
            self._open = None
            self._closed.append(whole)
            yield Change("whole", whole)
            waiting, self._waiting = self._waiting, []
            for kind, text, logprobs in waiting:
                yield from self._say(kind, text, logprobs)

    def _whole(self, item: dict[str, Any], status: str) -> dict[str, Any]:
        """The open item with all of its text. Only a complete call becomes an approval request."""
        text = "".join(self._texts)
        match item["type"]:
            case "reasoning":
                return item | {"content": [{"type": "reasoning_text", "text": text}], "status": status}
            case "message":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._open_logprobs)}
                return item | {"content": [part], "status": status}
            case "mcp_call" if self._is_hidden and status == "completed":
                kind = "mcp_approval_request"
                named = {"server_label": item["server_label"], "name": item["name"]}
                return {"id": self._id(kind), "type": kind, **named, "arguments": text}
            case "function_call" if (
                self._is_hidden
                and status == "completed"
                and (made := built_in_call(item["name"], item["call_id"], text)) is not None
            ):
                return {"id": self._id(made["type"]), **made}
            case "mcp_call" if status == "completed":
                return item | {"arguments": text}
            case "custom_tool_call":
                return item | {"input": text, "status": status}
            case _:
                return item | {"arguments": text, "status": status}

    def _id(self, kind: str) -> str:
        return item_id(kind, self._turn, len(self._closed))


def logprob_json(entry: TokenLogprob) -> dict[str, Any]:
    """OpenAI's form of log-probabilities, in chats and responses."""
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": list(entry.bytes),
        "top_logprobs": [
            {"token": rival.token, "logprob": rival.logprob, "bytes": list(rival.bytes)} for rival in entry.top
        ],
    }

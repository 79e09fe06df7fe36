"""Renders the events of a response and of its turns, which are chat requests, for OpenAI's Responses API. Pure.

The same events give the same bytes at any bridge and time, so a client whose stream broke can resume it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ...schemas.events import (
    FINAL,
    Accepted,
    Cancelled,
    Done,
    ErrorBody,
    Event,
    Expired,
    Failed,
    ItemEvent,
    Queued,
    Token,
    Turn,
)
from ...schemas.openai.custom_tools import custom_names
from ...schemas.openai.responses.built_in_tools import built_in_names
from ...schemas.openai.responses.request import wants_logprobs
from ...schemas.openai.responses.tools import namespaced
from ...schemas.openai.responses.turns import Change, TurnItems
from .anthropic import sse
from .response_object import CUT, response_at, response_head

_Object = dict[str, Any]

_TEXTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
    "mcp_call": "mcp_call_arguments",
}
_PARTS: dict[str, _Object] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
_SAID = {"function_call": ("name", "arguments"), "custom_tool_call": ("input",)}  # of a whole call
_RUN = ("mcp_call", "mcp_list_tools")  # what Penstock does itself, and tells how it went
_EMPTY: dict[str, _Object] = {
    "mcp_call": {"arguments": "", "status": "in_progress", "output": None, "error": None},
    "mcp_list_tools": {"tools": [], "error": None},
}
_INCOMPLETE = {"status": "incomplete"}


def repeats_no_more(event: Event) -> bool:
    """Whether from this event of a response or its turns on it must not be asked for again: a call of a tool has begun,
    or a turn has ended."""
    return isinstance(event, Done) or (isinstance(event, ItemEvent) and event.item["type"] == "mcp_call")


class ResponseRenderer:
    """Renders one response from its own events and those of its turns, in order; it omits messages up to
    `starting_after`. `body` is the request as it came, and not read before it was accepted; `created` is in Unix
    seconds."""

    def __init__(self, id: str, body: Mapping[str, Any], created: int, *, model: str, starting_after: int = -1) -> None:
        self.started = False  # whether the response's first message was rendered
        self.finished = False
        self._id = id
        self._body = body
        self._created = created
        self._model = model
        self._ending: _Object = {"status": "queued" if body.get("background") else "in_progress"}
        self._starting_after = starting_after
        self._sequence = 0
        self._output_indices: dict[str, int] = {}  # item id → output index
        self._output: dict[str, _Object] = {}  # item id → item, in order
        self._unfinished: list[str] = []  # ids of items
        self._turn: TurnItems | None = None
        self._job = ""  # the turn's request, while it runs
        self._usages: list[Mapping[str, int]] = []  # of turns that have ended
        self._fallbacks: list[str | None] = []  # the backends of these turns, where it was not the configured one

    def render(self, event: Event) -> bytes:
        """The SSE messages of an event; none for queue positions, nor behind the end."""
        if self.finished or isinstance(event, Queued):
            return b""
        return b"".join(self._tell(event) if event.request == self._id else self._tell_turn(event))

    def broken(self, error: ErrorBody) -> bytes:
        """The last message of a stream whose response was refused, or continues at another bridge."""
        number = max(self._sequence, self._starting_after + 1)
        said = {"code": error.code, "message": error.message, "param": error.param}
        return sse({"type": "error", **said, "sequence_number": number})

    def response(self) -> _Object:
        """The response as it stands."""
        open_items = {item["id"]: item for item in self._turn.items} if self._turn else {}
        output = [open_items.get(id, item) if id in self._unfinished else item for id, item in self._output.items()]
        head = response_head(self._id, self._body, self._created, self._model)
        return response_at(head, output, self._usages, self._fallbacks, **self._ending)

    def _tell(self, event: Event) -> Iterator[bytes]:
        if not self.started and isinstance(event, FINAL):  # whose request may be anything
            self.finished = True
            if isinstance(event, Failed | Expired):
                yield self.broken(event.error)
            return
        if not self.started:
            yield from self._begin(event)
        match event:
            case Accepted():
                pass
            case ItemEvent():
                yield from self._tell_item(event.item, finished=event.finished)
            case Turn():
                yield from self._leave_turn()
                logprobs = wants_logprobs(self._body.get("top_logprobs"), self._body.get("include"))
                tools = self._body.get("tools") or []
                self._job = event.job
                self._turn = TurnItems(
                    event.job,
                    event.calls,
                    namespaced=namespaced(tools),
                    custom=custom_names(tools),
                    built_in=built_in_names(tools),
                    logprobs=logprobs,
                )
            case Done():
                reason = CUT.get(event.finish_reasons[0])
                status = "incomplete" if reason else "completed"
                yield from self._end({"status": status, "at": event.at, "reason": reason})
            case Failed() | Expired():
                yield from self._end({"status": "failed", "error": event.error})
            case Cancelled():
                yield from self._end({"status": "cancelled"})
            case _:
                raise ValueError(f"No response has an event {event.type} of its own.")

    def _begin(self, event: Event) -> Iterator[bytes]:
        self.started = True
        if isinstance(event, Accepted):
            self._created = event.created
        yield self._message("created", response=self.response())
        if self._body.get("background"):
            yield self._message("queued", response=self.response())
        self._ending = {"status": "in_progress"}
        yield self._message("in_progress", response=self.response())

    def _end(self, ending: _Object) -> Iterator[bytes]:
        yield from self._leave_turn()
        self._ending = ending
        self.finished = True
        # OpenAI has no event for a cancellation: clients take "incomplete" for an end, and "failed" for an error.
        name = "incomplete" if ending["status"] == "cancelled" else ending["status"]
        yield self._message(name, response=self.response())

    def _tell_turn(self, event: Event) -> Iterator[bytes]:
        if self._turn is None or event.request != self._job:
            return
        match event:
            case Token():
                yield from self._tell_changes(self._turn.feed(event))
            case Done():
                self._job = ""
                self._usages.append(asdict(event.usage))
                self._fallbacks.append(event.fallback)
                yield from self._tell_changes(self._turn.finish(event.finish_reasons[0]))
            case _:  # the response's own events say how it continues
                pass

    def _leave_turn(self) -> Iterator[bytes]:
        """Finish every item that was begun; those of a turn that broke off are not part of the response."""
        is_void = self._turn is not None and bool(self._job or self._unfinished)
        if self._turn and self._job:
            yield from self._tell_changes(self._turn.finish("error"))
        elif is_void:
            self._usages.pop()
            self._fallbacks.pop()
        for item in [self._output[id] for id in self._unfinished]:
            broken = {"error": "The response ended before."} if item["type"] == "mcp_list_tools" else _INCOMPLETE
            yield from self._finish(item | broken)
        for item in self._turn.items if self._turn and is_void else ():
            del self._output[item["id"]]

    def _tell_changes(self, changes: list[Change]) -> Iterator[bytes]:
        for change in changes:
            match change.kind:
                case "begun":
                    yield from self._add(change.item)
                case "more":
                    yield self._delta(change)
                case "whole":
                    yield from self._whole(change.item)

    def _tell_item(self, item: _Object, *, finished: bool) -> Iterator[bytes]:
        kind, id = item["type"], item["id"]
        if id not in self._output_indices:
            yield from self._add(item | _EMPTY.get(kind, {}))
            if kind == "mcp_call":
                if item["arguments"]:
                    yield self._delta(Change("more", item, item["arguments"]))
                yield from self._whole(item | _EMPTY[kind] | {"arguments": item["arguments"]})
        if finished and id in self._unfinished:
            yield from self._finish(item)

    def _add(self, item: _Object) -> Iterator[bytes]:
        id, kind = item["id"], item["type"]
        index = self._output_indices[id] = len(self._output_indices)
        self._output[id] = item
        self._unfinished.append(id)
        yield self._message("output_item.added", output_index=index, item=item)
        if kind in _RUN:
            yield self._message(f"{kind}.in_progress", **self._position(item))
        if kind in _PARTS:
            yield self._message("content_part.added", **self._position(item), part=_PARTS[kind])

    def _delta(self, change: Change) -> bytes:
        kind = change.item["type"]
        logprobs = {"logprobs": change.logprobs} if kind == "message" else {}
        return self._message(f"{_TEXTS[kind]}.delta", **self._position(change.item), delta=change.delta, **logprobs)

    def _whole(self, item: _Object) -> Iterator[bytes]:
        kind, position = item["type"], self._position(item)
        self._output[item["id"]] = item
        if kind in _PARTS:
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield self._message(f"{_TEXTS[kind]}.done", **position, text=part["text"], **logprobs)
            yield self._message("content_part.done", **position, part=part)
        elif kind in _TEXTS:
            said = {name: item[name] for name in _SAID.get(kind, ("arguments",))}
            yield self._message(f"{_TEXTS[kind]}.done", **position, **said)
        elif kind == "shell_call":
            yield from self._tell_commands(item)
        if item.get("status") != "in_progress":
            yield from self._finish(item)

    def _tell_commands(self, item: _Object) -> Iterator[bytes]:
        for index, command in enumerate(item["action"]["commands"]):
            place = {"output_index": self._output_indices[item["id"]], "command_index": index}
            yield self._message("shell_call_command.added", **place, command="")
            yield self._message("shell_call_command.delta", **place, delta=command)
            yield self._message("shell_call_command.done", **place, command=command)

    def _finish(self, item: _Object) -> Iterator[bytes]:
        id, kind = item["id"], item["type"]
        self._output[id] = item
        self._unfinished.remove(id)
        if kind in _RUN and item.get("status") != "incomplete":
            outcome = "completed" if item["error"] is None else "failed"
            yield self._message(f"{kind}.{outcome}", **self._position(item))
        yield self._message("output_item.done", output_index=self._output_indices[id], item=item)

    def _position(self, item: _Object) -> _Object:
        position = {"item_id": item["id"], "output_index": self._output_indices[item["id"]]}
        return position | {"content_index": 0} if item["type"] in _PARTS else position

    def _message(self, name: str, /, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        if number <= self._starting_after:
            return b""
        return sse({"type": f"response.{name}", **fields, "sequence_number": number})

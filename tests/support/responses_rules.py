"""One judge of every stream of the Responses API that a test receives: what the official client's types demand, and
what its helpers, the Agents SDK and LangChain trip over."""

from __future__ import annotations

import re
from typing import Any

import orjson
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

Event = dict[str, Any]

# What the public schema of Open Responses requires, where the official client's types are content without.
_FIELDS = """
    id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key
"""
_REQUIRED = frozenset(_FIELDS.split())
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_TEXTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
    "mcp_call": "mcp_call_arguments",
}
_SAID = r"content_part\.added( {0}\.delta)+ {0}\.done content_part\.done output_item\.done"
_CALLED = r"({0}\.delta )*{0}\.done"
_RUN = r" ({0}\.(completed|failed) )?output_item\.done"
_ORDERS = {  # of an item's events behind its beginning, by its type
    "message": _SAID.format("output_text"),
    "reasoning": _SAID.format("reasoning_text"),
    "function_call": _CALLED.format("function_call_arguments") + r" output_item\.done",
    "custom_tool_call": _CALLED.format("custom_tool_call_input") + r" output_item\.done",
    "mcp_call": r"mcp_call\.in_progress " + _CALLED.format("mcp_call_arguments") + _RUN.format("mcp_call"),
    "mcp_list_tools": r"mcp_list_tools\.in_progress" + _RUN.format("mcp_list_tools"),
    "mcp_approval_request": r"output_item\.done",
    "shell_call": r"(shell_call_command\.added shell_call_command\.delta shell_call_command\.done )+output_item\.done",
    "local_shell_call": r"output_item\.done",
    "apply_patch_call": r"output_item\.done",
}
_FILLED = ("action", "operation")  # what a call asks the client to do is empty as it begins
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_STATUSES = {
    "response.completed": ("completed",),
    "response.incomplete": ("incomplete", "cancelled"),
    "response.failed": ("failed",),
}


def read_events(body: bytes) -> list[Event]:
    """The events of a whole SSE body, each as the client's types will have it. Comments and ids are passed over."""
    assert not body or body.endswith(b"\n\n"), "the last message is cut"
    events = []
    for block in body.split(b"\n\n")[:-1]:
        lines = [line for line in block.split(b"\n") if line and not line.startswith((b":", b"id: "))]
        if not lines:
            continue
        assert [line.partition(b": ")[0] for line in lines] == [b"event", b"data"], lines
        event = orjson.loads(lines[1].removeprefix(b"data: "))
        assert lines[0].removeprefix(b"event: ").decode() == event["type"]
        _EVENTS.validate_python(event, strict=True)
        events.append(event)
    return events


def check_responses(body: bytes, *, starting_after: int = -1, may_drop: bool = False) -> Event:
    """The response that a whole stream ends with. Raises `AssertionError` where the stream breaks a rule.

    Of a stream that was resumed, only the order and the end are judged. `may_drop`: a turn was asked for again, and
    what it had said before is no part of the end; as where the response failed or was cancelled.
    """
    events = read_events(body)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(starting_after + 1, starting_after + 1 + len(events))), "sequence numbers are dense"
    assert [event["type"] in _ENDS for event in events] == [False] * (len(events) - 1) + [True], "one end, at the end"
    final: Event = events[-1]["response"]
    check_response(final)
    assert final["status"] in _STATUSES[events[-1]["type"]]
    if starting_after < 0:
        _check_head(events, final)
        _Items().check(events, final, may_drop=may_drop)
    return final


def check_response(response: Event) -> None:
    """Judge one whole response, from a stream or not."""
    Response.model_validate(response, strict=True)
    status, usage = response["status"], response["usage"]
    assert not _REQUIRED - response.keys()
    assert (response["completed_at"] or 0) % 1 == 0, "Unix seconds are whole; the official client makes floats of them"
    for tool in response["tools"]:
        missing = {"name", "description", "parameters", "strict"} - tool.keys()
        assert tool["type"] != "function" or not missing, f"a function's {missing} may be null, but not missing"
    assert (response["error"] is not None) == (status == "failed")
    assert (response["incomplete_details"] is not None) == (status == "incomplete")
    if status in ("queued", "in_progress"):
        return
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]
    assert all(item.get("status") != "in_progress" for item in response["output"]), "every item is finished"
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)


def _check_head(events: list[Event], final: Event) -> None:
    heads = ["response.created", "response.in_progress"]
    if final["background"]:
        heads.insert(1, "response.queued")
    assert [event["type"] for event in events[: len(heads)]] == heads
    changing = {"status", "output", "usage", "error", "incomplete_details", "completed_at", "fallback_backend"}
    for event in events[: len(heads)]:
        response = event["response"]
        assert response["output"] == [], "clients take what is there already for items that were added"
        assert {name: response[name] for name in response.keys() - changing} == {
            name: final[name] for name in final.keys() - changing
        }
    assert not any(event["type"] in heads for event in events[len(heads) :])


class _Items:
    """Follows every item from its beginning to its end."""

    def __init__(self) -> None:
        self._begun: list[Event] = []  # as added; the place is the output index
        self._told: list[list[str]] = []  # by place: the events, in short
        self._texts: list[str] = []
        self._heard: list[list[Any]] = []  # log-probabilities
        self._done: dict[int, Event] = {}

    def check(self, events: list[Event], final: Event, *, may_drop: bool) -> None:
        for event in events:
            if event["type"] == "response.output_item.added":
                self._add(event)
            elif "output_index" in event:
                self._go_on(event)
        assert len(self._done) == len(self._begun), "every item is finished"
        kept = {item["id"] for item in final["output"]}
        done = [self._done[place] for place in sorted(self._done)]
        assert final["output"] == [item for item in done if item["id"] in kept], "the end says what was said before"
        if not may_drop and final["status"] in ("completed", "incomplete"):
            assert len(kept) == len(done), "nothing is left out"

    def _add(self, event: Event) -> None:
        item = event["item"]
        assert event["output_index"] == len(self._begun), "output indices are dense"
        assert item["id"] not in [other["id"] for other in self._begun]
        if item["type"] != "mcp_approval_request":
            assert item.get("status", "in_progress") == "in_progress"
            for name in ("arguments", "content", "output", "error", "tools"):
                assert not item.get(name), "clients add what comes to what is there"
        self._begun.append(item)
        self._told.append([])
        self._texts.append("")
        self._heard.append([])

    def _go_on(self, event: Event) -> None:
        place = event["output_index"]
        item, told = self._begun[place], self._told[place]
        assert place not in self._done, "an item goes on after its end"
        is_whole = event["type"] == "response.output_item.done"
        if "command_index" not in event:
            assert (event["item"]["id"] if is_whole else event["item_id"]) == item["id"]
        assert event.get("content_index", 0) == 0
        name, text = event["type"].removeprefix("response."), _TEXTS.get(item["type"])
        told.append(name)
        if name == f"{text}.delta":
            assert place == len(self._begun) - 1, "some clients take a delta for the newest item's"
            assert event["delta"]
            self._texts[place] += event["delta"]
            self._heard[place] += event.get("logprobs", ())
        elif name == f"{text}.done":
            assert event.get("text", event.get("arguments", event.get("input"))) == self._texts[place]
            assert event.get("logprobs", []) == self._heard[place]
            # OpenAI's schema requires it, and clients in Java that are generated from it; the official types forget it.
            assert item["type"] != "function_call" or event["name"] == item["name"]
        elif name == "shell_call_command.delta":
            self._texts[place] += event["delta"]
        elif name == "shell_call_command.done":
            assert self._texts[place].endswith(event["command"])
        elif name == "content_part.added":
            assert not event["part"]["text"]
        elif name == "content_part.done":
            self._check_part(event["part"], place)
        elif is_whole:
            self._check_done(event["item"], place)
            self._done[place] = event["item"]

    def _check_part(self, part: Event, place: int) -> None:
        assert part["text"] == self._texts[place]
        assert part.get("logprobs", []) == self._heard[place]

    def _check_done(self, item: Event, place: int) -> None:
        begun, kind = self._begun[place], item["type"]
        assert re.fullmatch(_ORDERS[kind], " ".join(self._told[place])), self._told[place]
        fixed = begun.keys() - {"status", "content", "arguments", "input", "output", "error", "tools", *_FILLED}
        assert {name: item[name] for name in fixed} == {name: begun[name] for name in fixed}
        if kind in ("message", "reasoning"):
            [part] = item["content"]
            self._check_part(part, place)
        elif kind in _TEXTS:
            assert item["input" if kind == "custom_tool_call" else "arguments"] == self._texts[place]
        if kind == "shell_call":
            assert "".join(item["action"]["commands"]) == self._texts[place]
        if kind in ("mcp_call", "mcp_list_tools"):
            assert (f"{kind}.failed" in self._told[place]) == (item["error"] is not None)
        if kind == "mcp_call":
            outcome = self._told[place][-2].removeprefix("mcp_call.")
            assert item["status"] == (outcome if outcome in ("completed", "failed") else "incomplete")
            assert (item["status"] == "completed") == (item["output"] is not None)
        elif "status" in item:
            assert item["status"] in ("completed", "incomplete")

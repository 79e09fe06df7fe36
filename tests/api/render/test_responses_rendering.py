"""What the renderer makes of a response's events, held against the official client and against what is stored of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import httpx2
import openai
import orjson
import pytest
from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from openai.types.responses import Response as OpenAIResponse
from responses_rules import check_response, check_responses, read_events

from penstock.api.render.response_object import response_object
from penstock.api.render.responses import ResponseRenderer
from penstock.schemas.events import (
    Accepted,
    Cancelled,
    Done,
    ErrorBody,
    Event,
    Expired,
    Failed,
    FinishReason,
    ItemEvent,
    Queued,
    Token,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Turn,
    Usage,
)
from penstock.schemas.loops import Begun, Ended, Items, LoopJob, Turned, TurnId
from penstock.schemas.openai.responses.turns import TurnItems, item_id

EXAMPLES = settings(max_examples=50, deadline=None)
ID = "resp_" + "0123456789abcdef" * 2
CALLS = {
    "search": {"label": "docs", "tool": "search", "approval": False},
    "delete": {"label": "docs", "tool": "delete", "approval": True},
}
BUSY = ErrorBody(429, "Too many requests.", "rate_limit_error", "quota_exceeded", retry_after=1.0)
LATE = ErrorBody(408, "The deadline passed.", "timeout_error", "deadline_exceeded")
BROKEN = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "No such page."}]}
LOGPROBS = "message.output_text.logprobs"
MCP_TOOL = {"type": "mcp", "server_label": "docs", "server_url": "https://example.com/mcp", "require_approval": "never"}
FUNCTION = {"type": "function", "name": "own", "description": "Mine.", "parameters": {"type": "object"}, "strict": True}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


class Run:
    """A response as the stage `tools` takes it through its turns: the events that it tells, and what it stores."""

    def __init__(self, **body: Any) -> None:
        self.body: dict[str, Any] = {"model": "m", "input": "Hello", "include": None, **body}
        self.events: list[Event] = [Accepted(ID, "m", 1700, 0)]
        self.items: Items = []  # from before the first turn
        self.turns: list[Turned] = []
        self.ended: Ended | None = None
        self.asked_again = False
        self._fold: TurnItems | None = None
        self._told = 0

    @property
    def _wants_logprobs(self) -> bool:
        return bool(self.body.get("top_logprobs")) or LOGPROBS in (self.body["include"] or ())

    @property
    def begun(self) -> Begun:
        job = LoopJob(
            id=ID, tenant="t", priority="normal", bridge="b", created=1700.25, deadline=2000.0, body=self.body
        )
        return Begun(job=job, sources=(), tools=(), history=[], input=[], items=self.items, index=0)

    def list_tools(self, error: str | None = None) -> None:
        id = item_id("mcp_list_tools", TurnId(ID, 0), len(self.items))
        empty: dict[str, Any] = {"id": id, "type": "mcp_list_tools", "server_label": "docs", "tools": [], "error": None}
        found = [{"name": "search", "description": "", "input_schema": {"type": "object"}, "annotations": None}]
        self._show(empty, finished=False)
        self.items.append(empty | ({"error": error} if error else {"tools": found}))
        self._show(self.items[-1])

    def call_approved(self, *, announced: bool) -> None:
        id = item_id("mcp_call", TurnId(ID, 0), len(self.items))
        call: dict[str, Any] = {
            "id": id,
            "type": "mcp_call",
            "server_label": "docs",
            "name": "delete",
            "arguments": '{"all":1}',
        }
        call |= {"approval_request_id": "mcpr_1", "status": "in_progress", "output": None, "error": None}
        if announced:
            self._show(call, finished=False)
        self.items.append(call | {"status": "completed", "output": "Gone."})
        self._show(self.items[-1])

    def turn(self, *tokens: Token, attempt: int = 0) -> None:
        """Begin a turn, and say this much."""
        turn = TurnId(ID, len(self.turns) + 1, attempt)
        self._fold = TurnItems(str(turn), CALLS, logprobs=self._wants_logprobs)
        self.events += [Turn(ID, self._count(), str(turn), CALLS), Queued(str(turn), 2)]
        self.events.append(Accepted(str(turn), "m", 1701, 12))
        for token in tokens:
            self.events.append(Token(str(turn), *[getattr(token, name) for name in token.__slots__[1:-1]]))
            self._fold.feed(token)

    def fail_turn(self, error: ErrorBody) -> None:
        self.events.append(Failed(self._job, error))

    def cancel_turn(self) -> None:
        self.events.append(Cancelled(self._job, Usage(12, 3, 15)))

    def finish_turn(
        self, reason: FinishReason, failing: int = 0, *, stays: int | None = None, fallback: str | None = None
    ) -> None:
        """End a turn and make its calls; bit k of `failing` fails call k. With `stays` only so many are made."""
        assert self._fold is not None
        usage = Usage(12, 7, 19, cached_tokens=4, reasoning_tokens=2)
        self.events.append(Done(self._job, (reason,), usage, fallback=fallback))
        self._fold.finish(reason)
        items = self._fold.items
        waiting = [place for place, item in enumerate(items) if item.get("status") == "in_progress"]
        for number, place in enumerate(waiting[:stays]):
            is_bad = failing >> number & 1
            result = {"status": "failed", "error": BROKEN} if is_bad else {"status": "completed", "output": "Found."}
            items[place] = {**items[place], **result}
            self._show(items[place])
        if stays is None or stays >= len(waiting):
            number = len(self.turns) + 1
            turned = Turned(
                turn=number, items=items, reason=reason, usage=asdict(usage), index=self._told, fallback=fallback
            )
            self.turns.append(turned)

    def end(self, event: Event) -> None:
        match event:
            case Done():
                status = "incomplete" if "length" in event.finish_reasons else "completed"
                self.ended = Ended.model_validate({"status": status, "at": 1800.5})
            case Failed() | Expired():
                self.ended = Ended(status="failed", at=1800.5, error=asdict(event.error))
            case _:
                self.ended = Ended(status="cancelled", at=1800.5)
        self.events.append(event)

    def done(self, reason: FinishReason = "stop") -> Run:
        self.end(Done(ID, (reason,), Usage(0, 0, 0)))
        return self

    @property
    def _job(self) -> str:
        return next(event.job for event in reversed(self.events) if isinstance(event, Turn))

    def _show(self, item: dict[str, Any], *, finished: bool = True) -> None:
        self.events.append(ItemEvent(ID, self._count(), item, finished))

    def _count(self) -> int:
        self._told += 1
        return self._told - 1

    def renderer(self, starting_after: int = -1) -> ResponseRenderer:
        return ResponseRenderer(ID, self.body, 1699, model="m", starting_after=starting_after)

    def messages(self, starting_after: int = -1) -> Iterator[bytes]:
        renderer = self.renderer(starting_after)
        return (renderer.render(event) for event in self.events)

    @property
    def stored(self) -> dict[str, Any]:
        return response_object(self.begun, self.turns, self.ended)


def say(text: str = "", think: str = "", *calls: ToolCallDelta, logprobs: bool = False) -> Token:
    rivals = (TopLogprob("b", 2, -1.5, (98,)),)
    heard = (TokenLogprob(text, 1, -0.5, tuple(text.encode()), rivals),) if logprobs else None
    return Token("", 0, 0, (1,), text, heard, reasoning=think, tool_calls=calls)


def call(index: int, arguments: str, name: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(index, arguments, f"call_{index}" if name else None, name)


@st.composite
def answers(draw: st.DrawFn, *, logprobs: bool) -> list[Token]:
    """What a model may say in a turn: thoughts, text and calls, in any order and cut anyhow."""
    tokens: list[Token] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["think", "text", "mixed", "call", "call"]), max_size=6)):
        pieces = draw(st.lists(texts, min_size=1, max_size=3))
        if kind == "call":
            name = draw(st.sampled_from(["own", *CALLS]))
            heads = [call(calls, pieces[0], name), *(call(calls, piece) for piece in pieces[1:])]
            calls += 1
            tokens += [say(draw(texts), draw(texts), head, logprobs=logprobs) for head in heads]
        else:
            thoughts = pieces if kind != "text" else [""] * len(pieces)
            said = pieces if kind != "think" else [""] * len(pieces)
            tokens += [say(text, think, logprobs=logprobs) for text, think in zip(said, thoughts, strict=True)]
    return tokens


@st.composite
def runs(draw: st.DrawFn) -> Run:
    logprobs = draw(st.booleans())
    run = Run(include=[LOGPROBS] if logprobs else [], background=draw(st.booleans()), tools=[MCP_TOOL, FUNCTION])
    for error in draw(st.lists(st.sampled_from([None, "No answer."]), max_size=2)):
        run.list_tools(error)
    if draw(st.booleans()):
        run.call_approved(announced=draw(st.booleans()))
    for _ in range(draw(st.integers(1, 3))):
        failures = draw(st.sampled_from([0, 0, 0, 1, 2]))
        for attempt in range(failures):
            run.asked_again = True
            run.turn(*draw(answers(logprobs=logprobs)), attempt=attempt)
            run.fail_turn(BUSY)
        run.turn(*draw(answers(logprobs=logprobs)), attempt=failures)
        fallback = draw(st.sampled_from([None, "hf"]))
        match draw(
            st.sampled_from(["go on", "go on", "go on", "length", "late", "failed", "cancelled", "left", "in a call"])
        ):
            case "go on":
                reasons: list[FinishReason] = ["stop", "stop_sequence", "tool_calls"]
                run.finish_turn(draw(st.sampled_from(reasons)), draw(st.integers(0, 7)), fallback=fallback)
            case "length":
                run.finish_turn("length", draw(st.integers(0, 7)))
                return run.done("length")
            case "late":
                run.finish_turn("deadline")
                run.end(Expired(ID, LATE))
                return run
            case "failed":
                run.fail_turn(BUSY)
                run.end(Failed(ID, BUSY))
                return run
            case "cancelled":
                run.cancel_turn()
                run.end(Cancelled(ID, Usage(0, 0, 0)))
                return run
            case "left":
                run.end(Cancelled(ID, Usage(0, 0, 0)))
                return run
            case _:
                run.finish_turn("tool_calls", stays=draw(st.integers(0, 1)), fallback=fallback)
                run.end(Expired(ID, LATE))
                return run
    return run.done()


def plain(value: dict[str, Any]) -> dict[str, Any]:
    return dict(orjson.loads(orjson.dumps(value)), completed_at=None)  # a Done of these tests says no time


@EXAMPLES
@given(runs())
def test_every_stream_keeps_the_rules_and_ends_with_what_is_stored(run: Run) -> None:
    renderer = run.renderer()
    final = check_responses(b"".join(map(renderer.render, run.events)), may_drop=run.asked_again)
    assert renderer.started and renderer.finished
    assert plain(renderer.response()) == final == plain(run.stored)
    assert final.get("fallback_backend") == ("hf" if any(turn.fallback for turn in run.turns) else None)
    check_response(run.stored)


@EXAMPLES
@given(runs())
def test_every_response_comes_back_from_json(run: Run) -> None:
    """P25: read into the official client's type and written again, it is what it was."""
    stored = orjson.dumps(response_object(run.begun, run.turns, run.ended))
    read = OpenAIResponse.model_validate_json(stored)
    assert orjson.loads(read.model_dump_json(exclude_unset=True, by_alias=True)) == orjson.loads(stored)


@EXAMPLES
@given(runs(), st.data())
def test_a_client_that_was_cut_off_gets_the_rest(run: Run, data: st.DataObject) -> None:
    whole = b"".join(run.messages())
    messages = [message + b"\n\n" for message in whole.split(b"\n\n")[:-1]]
    had = data.draw(st.integers(-1, len(messages) - 1))
    waits = data.draw(st.lists(st.integers(0, len(run.events)), max_size=3))
    for place in waits:  # how long it had to wait is news of the moment, and no part of the stream
        run.events.insert(place, Queued(ID, place + 1))
    rest = b"".join(run.messages(had))
    assert rest == b"".join(messages[had + 1 :])
    if rest:
        check_responses(rest, starting_after=had, may_drop=run.asked_again)


@EXAMPLES
@given(runs())
def test_while_it_runs_the_response_has_what_was_said_so_far(run: Run) -> None:
    renderer = run.renderer()
    begun: list[str] = []
    before = renderer.response()
    assert before["status"] == ("queued" if run.body["background"] else "in_progress")
    check_response(before)
    for event in run.events[:-1]:
        begun += [
            told["item"]["id"]
            for told in read_events(renderer.render(event))
            if told["type"] == "response.output_item.added"
        ]
        response = plain(renderer.response())
        check_response(response)
        assert response["usage"] is None
        shown = [item["id"] for item in response["output"]]
        assert shown == [id for id in begun if id in shown]
    assert not renderer.finished


def agent_run(**body: Any) -> Run:
    """A thought, a call that Penstock makes, and in the next turn an answer and a call that is the client's."""
    run = Run(tools=[MCP_TOOL, FUNCTION], **body)
    run.list_tools()
    run.turn(
        say(think="Let me "), say(think="look."), say("", "", call(0, '{"q"', "search")), say("", "", call(0, ":1}"))
    )
    run.finish_turn("tool_calls")
    run.turn(say("It is "), say("there."), say("", "", call(0, '{"a":', "own")), say("", "", call(0, "1}")))
    run.finish_turn("tool_calls")
    return run.done()


def test_every_kind_of_event_comes_where_it_belongs() -> None:
    run = agent_run(background=True)
    told = [event["type"].removeprefix("response.") for event in read_events(b"".join(run.messages()))]
    assert told == [
        *("created", "queued", "in_progress"),
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.delta"),
        *("mcp_call_arguments.done", "mcp_call.completed", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_failures_of_tools_are_told() -> None:
    run = Run(tools=[MCP_TOOL])
    run.list_tools("No answer.")
    run.turn(say("", "", call(0, "{}", "search")), say("", "", call(1, "{}", "delete")))
    run.finish_turn("tool_calls", failing=1)
    body = b"".join(run.done().messages())
    told = [event["type"] for event in read_events(body)]
    assert "response.mcp_list_tools.failed" in told and "response.mcp_call.failed" in told
    listed, made, asked = check_responses(body)["output"]
    assert listed["error"] == "No answer." and made["error"] == BROKEN and made["status"] == "failed"
    assert (asked["type"], asked["name"], asked["server_label"]) == ("mcp_approval_request", "delete", "docs")


def test_usage_is_that_of_all_turns() -> None:
    assert plain(agent_run().stored)["usage"] == {
        "input_tokens": 24,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 14,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 38,
    }


def test_logprobs_come_where_they_were_asked_for() -> None:
    for asked, heard in (
        ({"include": [LOGPROBS]}, ["Yes"]),
        ({"include": [LOGPROBS], "top_logprobs": 1}, ["Yes"]),
        ({"include": None, "top_logprobs": 1}, ["Yes"]),
        ({"include": [], "top_logprobs": 0}, []),
        ({}, []),
    ):
        run = Run(**asked)
        run.turn(say("Yes", logprobs=True))
        run.finish_turn("stop")
        body = b"".join(run.done().messages())
        [item] = check_responses(body)["output"]
        assert [entry["token"] for entry in item["content"][0]["logprobs"]] == heard
        [delta] = [event for event in read_events(body) if event["type"] == "response.output_text.delta"]
        assert [entry["token"] for entry in delta["logprobs"]] == heard


def test_a_request_is_echoed_without_its_secrets() -> None:
    secret = {"authorization": "sesame", "headers": {"x-key": "sesame"}, "sealed": "sesame"}
    run = agent_run()
    run.body["tools"] = [MCP_TOOL | secret]
    whole = b"".join(run.messages())
    assert b"sesame" not in whole + orjson.dumps(run.stored)
    assert check_responses(whole)["tools"] == [MCP_TOOL]


def test_what_was_not_asked_for_has_the_api_s_defaults() -> None:
    run = agent_run(temperature=None, text={"verbosity": "low"}, reasoning={"effort": "low"}, service_tier="auto")
    response = run.stored
    assert (response["temperature"], response["top_p"], response["tool_choice"]) == (1.0, 1.0, "auto")
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["service_tier"] == "default" and response["conversation"] is None
    assert response["store"] is True and response["background"] is False and response["metadata"] == {}


def test_what_was_asked_for_is_echoed() -> None:
    asked = {"temperature": 0.0, "store": False, "metadata": {"a": "b"}, "instructions": "Be brief.", "user": "u"}
    asked |= {"parallel_tool_calls": False, "tool_choice": "required", "max_output_tokens": 5, "max_tool_calls": 2}
    asked |= {"previous_response_id": "resp_1", "top_logprobs": 3, "service_tier": "flex"}
    response = agent_run(**asked).stored
    assert {name: response[name] for name in asked} == asked
    for given_as in ("conv_1", {"id": "conv_1"}):
        assert agent_run(conversation=given_as).stored["conversation"] == {"id": "conv_1"}
    assert type(agent_run(max_output_tokens=5.0).stored["max_output_tokens"]) is int


@pytest.mark.parametrize(
    ("error", "code"),
    [(BUSY, "rate_limit_exceeded"), (LATE, "server_error"), (ErrorBody(400, "No.", "x"), "invalid_prompt")],
)
def test_a_failure_says_why_in_the_client_s_words(error: ErrorBody, code: str) -> None:
    run = Run()
    run.turn(say("It"))
    run.fail_turn(error)
    run.end(Failed(ID, error))
    response = check_responses(b"".join(run.messages()))
    assert response["error"] == {"code": code, "message": error.message, "type": error.type, "param": None}


def test_a_cancelled_response_ends_its_stream_as_incomplete() -> None:
    run = Run()
    run.turn(say("It"))
    run.end(Cancelled(ID, Usage(0, 0, 0)))
    body = b"".join(run.messages())
    assert read_events(body)[-1]["type"] == "response.incomplete"
    assert check_responses(body)["status"] == "cancelled"


@pytest.mark.parametrize("body", [{"reasoning": 1}, {"tools": [1]}, {"include": 1}, {"text": "x", "background": 1}])
def test_of_a_request_that_was_refused_only_the_error_is_told(body: dict[str, Any]) -> None:
    renderer = ResponseRenderer(ID, body, 1700, model="None")
    [event] = read_events(renderer.render(Failed(ID, BUSY)))
    assert (event["type"], event["message"], event["code"]) == ("error", BUSY.message, BUSY.code)
    assert renderer.finished and not renderer.started
    renderer = ResponseRenderer(ID, body, 1700, model="None")
    assert renderer.render(Cancelled(ID, Usage(0, 0, 0))) == b"" and renderer.finished


def test_a_turn_whose_calls_were_not_all_made_is_left_out_as_it_is_where_it_is_stored() -> None:
    run = Run()
    run.turn(say("", "", call(0, "{}", "search")))
    run.finish_turn("tool_calls")
    run.turn(say("", "", call(0, "{}", "search")), say("", "", call(1, "{}", "search")))
    run.finish_turn("tool_calls", stays=1)
    run.end(Expired(ID, LATE))
    final = check_responses(b"".join(run.messages()))
    assert len(final["output"]) == 1 and final["usage"]["total_tokens"] == 19
    assert final == plain(run.stored)


def test_an_attempt_that_is_over_says_nothing_more() -> None:
    run = Run()
    run.turn(say("It"))
    late = Token(f"{ID}-1", 0, 1, (1,), " is")
    run.fail_turn(BUSY)
    run.turn(say("Yes"), attempt=1)
    run.events.append(late)
    run.finish_turn("stop")
    assert [*_said(check_responses(b"".join(run.done().messages()), may_drop=True))] == ["Yes"]


def _said(response: dict[str, Any]) -> Iterator[str]:
    return (item["content"][0]["text"] for item in response["output"])


def test_an_item_that_is_told_twice_is_shown_once() -> None:
    run = Run()
    run.list_tools()
    run.events.append(run.events[-1])
    assert len(check_responses(b"".join(run.done().messages()))["output"]) == 1


def test_tools_that_were_never_listed_have_failed() -> None:
    run = Run()
    run.list_tools()
    del run.events[2:]
    run.end(Expired(ID, LATE))
    [listed] = check_responses(b"".join(run.messages()))["output"]
    assert listed["error"]


def test_what_was_said_before_shows_while_it_is_said() -> None:
    run = Run()
    run.turn(say("It is "), say("there"))
    renderer = run.renderer()
    for event in run.events:
        renderer.render(event)
    [item] = renderer.response()["output"]
    assert (item["status"], item["content"][0]["text"]) == ("in_progress", "It is there")


def test_nothing_follows_the_end() -> None:
    run = agent_run()
    renderer = run.renderer()
    for event in run.events:
        renderer.render(event)
    assert [renderer.render(event) for event in run.events] == [b""] * len(run.events)


def test_a_stream_that_breaks_says_so_behind_what_the_client_has() -> None:
    renderer = agent_run().renderer(starting_after=5)
    [event] = read_events(renderer.broken(LATE))
    said = {"type": "error", "code": "deadline_exceeded", "message": "The deadline passed.", "param": None}
    assert event == said | {"sequence_number": 6}


def test_the_time_of_the_end_is_kept() -> None:
    at = agent_run().stored["completed_at"]
    assert (at, type(at)) == (1800, int)
    run = agent_run()
    run.ended = None
    assert run.stored["status"] == "in_progress" and run.stored["completed_at"] is None
    check_response(run.stored)


class Server(httpx2.MockTransport):
    """Answers a request to `/v1/responses` with the runs at hand, one after the other."""

    def __init__(self, *runs: Run) -> None:
        self._runs = iter(runs)
        super().__init__(self._answer)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        run = next(self._runs)
        asked = orjson.loads(request.content or b"{}")
        if request.method == "GET":
            messages = run.messages(int(request.url.params["starting_after"]))
        elif not asked.get("stream"):
            return httpx2.Response(200, json=plain(run.stored))
        else:
            messages = run.messages()
        return httpx2.Response(200, content=b"".join(messages), headers={"content-type": "text/event-stream"})


def client(*runs: Run) -> openai.OpenAI:
    http = httpx2.Client(transport=Server(*runs))
    return openai.OpenAI(api_key="none", http_client=http, _strict_response_validation=True)


def test_the_official_client_reads_all_of_it_strictly() -> None:
    run = agent_run()
    with client(run, run, run, run) as official:
        whole = official.responses.create(model="m", input="Hello")
        assert whole.output_text == "It is there."
        with official.responses.create(model="m", input="Hello", stream=True) as stream:
            events = list(stream)
        assert events[-1].type == "response.completed" and events[-1].response == whole
        with official.responses.stream(model="m", input="Hello") as helper:
            assert "".join(event.delta for event in helper if event.type == "response.output_text.delta")
            assert helper.get_final_response().output_text == "It is there."
        with official.responses.retrieve(ID, stream=True, starting_after=7) as resumed:
            assert [event.sequence_number for event in resumed] == list(range(8, len(events)))


@pytest.mark.filterwarnings("ignore")  # the SDK's own
def test_an_agent_runs_on_it() -> None:
    first, second = agent_run(), Run()
    second.turn(say("Do"), say("ne."))
    second.finish_turn("stop")
    asked: list[int] = []

    @function_tool
    def own(a: int) -> str:
        """Mine."""
        asked.append(a)
        return "well"

    async def run() -> str:
        async with httpx2.AsyncClient(transport=Server(first, second.done())) as http:
            model = OpenAIResponsesModel("m", openai.AsyncOpenAI(api_key="none", http_client=http))
            agent = Agent(name="A", model=model, tools=[own])
            result = Runner.run_streamed(agent, "Hello", run_config=RunConfig(tracing_disabled=True))
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    assert asyncio.run(run()) == "Done."
    assert asked == [1]


@pytest.mark.filterwarnings("ignore")  # LangChain's own
def test_langchain_joins_the_pieces() -> None:
    with httpx2.Client(transport=Server(agent_run())) as http:
        chat = ChatOpenAI(model="m", api_key="none", http_client=http, use_responses_api=True)
        chunks = list(chat.stream("Hello"))
    joined = sum(chunks[1:], chunks[0])
    assert isinstance(joined, AIMessageChunk)
    assert [(made["name"], made["args"]) for made in joined.tool_calls] == [("own", {"a": 1})]
    assert joined.text == "It is there."
    assert joined.usage_metadata and joined.usage_metadata["total_tokens"] == 38

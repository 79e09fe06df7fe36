"""Anthropic's official client against `/v1/messages`: a real server, and streams of made-up events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from applications import Script
from asgi import ask, messages
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from serving import Served

from penstock.api.render.anthropic import MessageRenderer
from penstock.schemas.anthropic.messages import CountRequest, MessagesRequest
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.events import (
    Accepted,
    Done,
    ErrorBody,
    Event,
    Expired,
    Failed,
    FinishReason,
    Queued,
    Token,
    ToolCallDelta,
    Usage,
)
from penstock.schemas.openai.completions import parse_body, parse_request

PATH = "/v1/messages"
HELLO: dict[str, Any] = {"model": "echo", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello 🙂"}]}
TOOL = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def client(echo_server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=echo_server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_a_message_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**HELLO)
    (block,) = whole.content
    assert block.type == "text" and "Hello 🙂" in block.text
    assert (whole.stop_reason, whole.role, whole.model) == ("end_turn", "assistant", "echo")
    assert whole._request_id == whole.id
    with client.messages.stream(**HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    same = {"id": whole.id, "usage": whole.usage}
    assert final.model_copy(update=same).to_dict(exclude_none=True) == whole.to_dict(exclude_none=True)
    counted = client.messages.count_tokens(model="echo", messages=HELLO["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_parameters_reach_the_model(client: anthropic.Anthropic) -> None:
    short = client.messages.create(
        **HELLO | {"max_tokens": 3}, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    )
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = client.messages.create(**HELLO, stop_sequences=["llo"], system="Be kind.", metadata={"user_id": "u"})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "llo")
    (block,) = stopped.content
    assert block.type == "text" and "Be kind." in block.text and block.text.endswith("He")


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "nobody"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"system": "x" * 200_000, "timeout": 60}, anthropic.BadRequestError, "prompt is too long: more than 196"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"extra_headers": {"Penstock-Resumable": "true"}}, anthropic.BadRequestError, "Idempotency-Key"),
        ({"extra_body": {"system": "x" * (8 << 20)}}, anthropic.RequestTooLargeError, "max_body_size"),
    ],
    ids=lambda value: str(value)[:80],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_refusals_are_the_clients_own(
    client: anthropic.Anthropic,
    change: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    says: str,
    streaming: bool,
) -> None:
    with pytest.raises(kind) as refused:
        client.messages.create(**HELLO | change, stream=streaming)
    body: Any = refused.value.body
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert says in body["error"]["message"]
    assert body["request_id"] == refused.value.request_id


class Told:
    """What the official client makes of an answer in these events; the request goes to a pipeline that is the test."""

    def __init__(self, script: Script) -> None:
        self.script = script
        transport = httpx2.ASGITransport(script.app)
        self.client = anthropic.AsyncAnthropic(
            base_url="http://localhost",
            api_key="none",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
            _strict_response_validation=True,
        )

    async def whole(self, events: list[Event], **asked: Any) -> Message:
        asking = asyncio.create_task(self.client.messages.create(**asked, stream=False))
        await self._tell(events)
        message: Message = await asking
        return message

    async def streamed(self, events: list[Event], **asked: Any) -> Message:
        async def read() -> Message:
            async with self.client.messages.stream(**asked) as stream:
                return Message.model_validate((await stream.get_final_message()).to_dict())

        return (await asyncio.gather(read(), self._tell(events)))[0]

    async def _tell(self, events: list[Event]) -> None:
        await self.script.tell(events, await self.script.job())


def said(*tokens: Token, reason: FinishReason = "stop", usage: Usage | None = None) -> list[Event]:
    numbered = [
        Token("", 0, place, (place,), token.text, None, token.finish_reason, token.reasoning, token.tool_calls)
        for place, token in enumerate(tokens)
    ]
    last = Token("", 0, len(tokens), (), "", None, reason)
    usage = usage or Usage(9, len(tokens), 9 + len(tokens))
    return [Accepted("", "echo", 7, 9), Queued("", 2), *numbered, last, Done("", (reason,), usage)]


def token(text: str = "", reasoning: str = "", *calls: ToolCallDelta) -> Token:
    return Token("", 0, 0, (), text, reasoning=reasoning, tool_calls=calls)


CALLING = [
    token(reasoning="Hm, "),
    token(reasoning="weather. ", text="Let me"),
    token(" look."),
    token("", "", ToolCallDelta(0, '{"city": ', "toolu_1", "weather")),
    token("", "", ToolCallDelta(0, '"Bern"}'), ToolCallDelta(1, "", "toolu_2", "weather")),
]


async def test_thoughts_text_and_calls_are_blocks_of_their_own() -> None:
    told = Told(await Script.start())
    events = said(*CALLING, reason="tool_calls", usage=Usage(9, 5, 14, cached_tokens=4, reasoning_tokens=2))
    whole, streamed = await told.whole(events, **HELLO), await told.streamed(events, **HELLO)
    for message in (whole, streamed):
        thought, text, first, second = message.content
        assert thought.type == "thinking" and thought.thinking == "Hm, weather. " and thought.signature
        assert text.type == "text" and text.text == "Let me look."
        assert first.type == "tool_use" and (first.id, first.name, first.input) == (
            "toolu_1",
            "weather",
            {"city": "Bern"},
        )
        assert second.type == "tool_use" and (second.id, second.input) == ("toolu_2", {})
        assert message.stop_reason == "tool_use"
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (5, 4)
        assert message.usage.output_tokens == 5
        assert message.usage.output_tokens_details and message.usage.output_tokens_details.thinking_tokens == 2


REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "stop_sequence": "stop_sequence",
    "tool_calls": "tool_use",
    "deadline": "pause_turn",
}


@pytest.mark.parametrize("reason", REASONS)
async def test_why_it_stopped(reason: FinishReason) -> None:
    told = Told(await Script.start())
    for message in (await told.whole(said(reason=reason), **HELLO), await told.streamed(said(reason=reason), **HELLO)):
        assert (message.stop_reason, message.stop_sequence, message.content) == (REASONS[reason], None, [])
    dictated = await told.streamed(said(*CALLING, reason="stop"), **HELLO)
    assert dictated.stop_reason == "tool_use"


async def test_a_number_in_a_call_may_have_any_size() -> None:
    """JSON has no largest number, and a model may write one that fits into no machine's."""
    told = Told(await Script.start())
    events = said(token("", "", ToolCallDelta(0, f'{{"line": {10**60}}}', "t", "edit")), reason="tool_calls")
    for message in (await told.whole(events, **HELLO), await told.streamed(events, **HELLO)):
        assert message.content[0].to_dict()["input"] == {"line": 10**60}


async def test_a_call_that_was_cut_off_is_the_same_streamed_or_not() -> None:
    told = Told(await Script.start())
    events = said(token("", "", ToolCallDelta(0, '{"a": [1, {"b": "x', "t", "weather")), reason="length")
    whole, streamed = await told.whole(events, **HELLO), await told.streamed(events, **HELLO)
    assert whole.content[0].to_dict() == streamed.content[0].to_dict()
    assert whole.content[0].to_dict()["input"] == {"a": [1, {}]}
    with pytest.raises(anthropic.InternalServerError, match="not a JSON object"):
        await told.whole(said(token("", "", ToolCallDelta(0, "[1]", "t", "weather"))), **HELLO)


@pytest.mark.parametrize(
    ("status", "kind", "type"),
    [
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (503, anthropic.OverloadedError, "overloaded_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (408, anthropic.APIStatusError, "timeout_error"),
    ],
)
async def test_failures_before_and_in_a_stream(status: int, kind: type[anthropic.APIStatusError], type: str) -> None:
    told = Told(await Script.start())
    error = ErrorBody(status, "It is so.", "x", retry_after=3.0)
    final: Event = Expired("", error) if status == 408 else Failed("", error)
    for ask_for in (told.whole, told.streamed):
        with pytest.raises(kind) as refused:
            await ask_for([final], **HELLO)
        body: Any = refused.value.body
        assert body["error"] == {"type": type, "message": "It is so."}
        assert refused.value.status_code == (529 if status == 503 else status)
        assert refused.value.response.headers["retry-after"] == "3"
    response = await told.script.answer([*said(*CALLING)[:4], final], "POST", PATH, HELLO | {"stream": True})
    *_, last = messages(response.body)
    assert last.event == "error" and last.data["error"]["type"] == type


async def test_a_wrong_key_is_told_in_anthropics_form() -> None:
    script = await Script.start(api_keys=("team=sk-right",))
    response = await ask(script.app, "POST", PATH, HELLO, {"x-api-key": "sk-wrong"})
    assert (response.status, orjson.loads(response.body)["error"]["type"]) == (401, "authentication_error")
    other = await ask(script.app, "POST", "/v1/chat/completions", HELLO, {"x-api-key": "sk-wrong"})
    assert other.error["code"]


async def test_what_waits_is_kept_alive_with_comments() -> None:
    script = await Script.start(keepalive_interval=0.001)
    asking = asyncio.create_task(ask(script.app, "POST", PATH, HELLO | {"stream": True}, leave_after=3))
    await script.tell([Accepted("", "echo", 7, 9), Queued("", 4)], await script.job())
    sent = (await asking).body
    assert [message.event for message in messages(sent)] == ["message_start"]
    assert b"queued" not in sent and sent.endswith(b"\n\n: ping\n\n")


async def test_a_page_of_a_foreign_origin_is_refused_in_anthropics_form() -> None:
    script = await Script.start(cors_origins=("https://here.example",))
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    response = await ask(script.app, "OPTIONS", PATH, None, headers)
    assert response.status == 403
    body = orjson.loads(response.body)
    assert (body["type"], body["error"]["type"]) == ("error", "permission_error")
    assert "--cors-origins https://elsewhere.example" in body["error"]["message"]


def chat(**change: Any) -> dict[str, Any]:
    body = parse_body(MessagesRequest, HELLO | change).chat_body()
    parse_request("/v1/chat/completions", body)  # raises where it is none
    return body


def test_the_images_of_results_follow_them_as_the_users() -> None:
    def image(data: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def part(data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def result(id: str, *blocks: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": id, "content": [*blocks]}

    def said(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    uses: list[dict[str, Any]] = [{"type": "tool_use", "id": id, "name": "look", "input": {}} for id in ("a", "b", "c")]
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": uses[:2]},
        {"role": "user", "content": [result("a", said("It is"), image("AAAA"), said("so."))]},
        {"role": "user", "content": [result("b", image("BBBB"), image("CCCC")), said("And?")]},
        {"role": "assistant", "content": uses[2:]},
        {"role": "user", "content": [result("c", image("DDDD"))]},
    ]
    messages = chat(messages=turns)["messages"]
    roles = ["user", "assistant", "tool", "tool", "user", "assistant", "tool", "user"]
    assert [message["role"] for message in messages] == roles
    told = [message["content"] for message in messages if message["role"] == "tool"]
    assert told == ["It is\n[image 1]\nso.", "[image 2]\n[image 3]", "[image 4]"]
    shown = [said("[image 1]"), part("AAAA"), said("[image 2]"), part("BBBB"), said("[image 3]"), part("CCCC")]
    assert messages[4]["content"] == [*shown, said("And?")]
    assert messages[7]["content"] == [said("[image 4]"), part("DDDD")]


def test_a_conversation_with_tools_is_a_chat() -> None:
    turns = [
        {"role": "user", "content": "Is it warm"},
        {"role": "user", "content": [{"type": "text", "text": "in Bern?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "thinking", "thinking": "There."},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "20 °C"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no city", "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    body = chat(messages=turns, system=[{"type": "text", "text": "Be brief."}], tools=[TOOL | {"strict": True}])
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
    other = {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it warm\nin Bern?"},
        {"role": "assistant", "content": "One moment.", "reasoning": "Look.\nThere.", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "t1", "content": "20 °C"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no city"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It is"},
    ]
    function: dict[str, Any] = {"name": "weather", "description": "Of a city", "parameters": TOOL["input_schema"]}
    function |= {"strict": True, "may_omit": True}
    assert body["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        ({"stop_sequences": ["a", "b"], "top_k": 4}, {"stop": ["a", "b"], "top_k": 4}),
        ({"service_tier": "standard_only", "priority": "low"}, {"priority": "low"}),
        ({"seed": 5, "min_p": 0.1, "repetition_penalty": 1.2}, {"seed": 5, "min_p": 0.1, "repetition_penalty": 1.2}),
        ({"metadata": {"user_id": "u1"}, "stream": True}, {"user": "u1", "stream": True}),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {"reasoning_effort": "none"}),
        ({"output_config": {"effort": "max"}}, {"chat_template_kwargs": {"reasoning_effort": "xhigh"}}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": {"type": "object"}},
                }
            },
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": {"type": "object"}},
                }
            },
        ),
    ],
    ids=str,
)
def test_what_each_parameter_means(change: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(**change, tools=[TOOL]) == chat(tools=[TOOL]) | expected


EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]}
IN_VAIN: dict[str, dict[str, Any]] = {
    "context_management": {"context_management": EDITS},
    "speed": {"speed": "fast"},
    "thinking.budget_tokens": {"thinking": {"type": "disabled", "budget_tokens": 1024}},
    "thinking.display": {"thinking": {"type": "disabled", "display": "omitted"}},
    "output_config.task_budget": {"output_config": {"task_budget": {"type": "tokens", "total": 20_000}}},
    "tools[].defer_loading": {"tools": [TOOL | {"defer_loading": True}, TOOL | {"name": "n", "defer_loading": True}]},
    "tools[].input_examples": {"tools": [TOOL | {"input_examples": [{"city": "Bern"}]}]},
    "tools[].allowed_callers": {"tools": [TOOL | {"allowed_callers": ["direct", "code_execution_20250825"]}]},
    "tools[web_search_20250305]": {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
}
NEUTRAL: dict[str, Any] = {
    "system": None,
    "container": None,
    "mcp_servers": [],
    "speed": "standard",
    "context_management": {},
}


@pytest.mark.parametrize("path", IN_VAIN)
def test_what_has_no_effect_is_taken_and_named(path: str) -> None:
    asked = parse_body(MessagesRequest, HELLO | IN_VAIN[path])
    assert dict.fromkeys(asked.without_effect) == {path: None}
    kept = {name: value for name, value in IN_VAIN[path].items() if name in ("thinking", "tools")}
    plain = {"tools": [TOOL | {"name": tool["name"]} for tool in kept.get("tools", ()) if "input_schema" in tool]}
    without = {"thinking": {"type": "disabled"}} if "thinking" in kept else plain if plain["tools"] else {}
    assert asked.chat_body() == chat(**without)


def test_what_asks_for_nothing_is_not_named() -> None:
    asked = parse_body(MessagesRequest, HELLO | NEUTRAL)
    assert not [*asked.without_effect] and asked.chat_body() == chat()


def test_citations_of_an_earlier_answer_are_taken_and_those_that_are_there_named() -> None:
    for citations, named in ((None, []), ([], []), ([{"type": "page_location"}], ["messages[].content[].citations"])):
        answer = {"role": "assistant", "content": [{"type": "text", "text": "Blue.", "citations": citations}]}
        asked = parse_body(MessagesRequest, HELLO | {"messages": [*HELLO["messages"], answer]})
        assert [*asked.without_effect] == named
        assert asked.chat_body()["messages"][-1] == {"role": "assistant", "content": "Blue."}


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
async def test_a_conversation_of_the_servers_is_refused_as_clients_expect(path: str) -> None:
    script = await Script.start()
    response = await ask(script.app, "POST", path, HELLO | {"thread": {"type": "create"}})
    error = orjson.loads(response.body)["error"]
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_more_tokens_than_there_is_room_for_are_cut(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**HELLO | {"max_tokens": 10_000_000, "timeout": 60})
    assert message.stop_reason == "end_turn"


def test_fields_that_clients_add_to_a_history_are_passed_over() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Go", "provider_specific_fields": {}}], "id": "m1"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}, "x": 1}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": "weather"}],
                    "x": 1,
                }
            ],
        },
    ]
    messages = chat(messages=turns, tools=[TOOL])["messages"]
    assert [message["content"] for message in messages] == ["Go", "", "Tool found: weather"]


async def test_a_session_that_another_model_began_goes_on() -> None:
    """Anthropic's models leave thoughts in the history that they alone can read."""
    hidden = {"type": "redacted_thinking", "data": "EmwKAhgB", "cache_control": None}
    turns = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": [hidden, {"type": "text", "text": "Gone"}]},
        {"role": "user", "content": "On"},
        {"role": "assistant", "content": [hidden]},
        {"role": "user", "content": "and on"},
    ]
    messages = chat(messages=turns)["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "Go"),
        ("assistant", "Gone"),
        ("user", "On\nand on"),
    ]
    script = await Script.start()
    response = await script.answer(said(Token("", 0, 0, (7,), "Hi")), "POST", PATH, HELLO | {"messages": turns})
    assert response.status == 200
    assert response.headers["penstock-ignored"] == "messages[].content[redacted_thinking]"


def content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (content({"type": "server_tool_use"}), "messages[0].content[0]: Input should be a block of type text"),
        (content({"type": "image", "source": {"type": "ftp"}}), "should be a source of type base64, url or file"),
        (content({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.file_id is missing"),
        (content({"type": "text"}), "messages[0].content[0].text is missing"),
        (
            content({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "audio"}]}),
            "messages[0].content[0].content[0]: Input should be a block of type text, image, document, search_result",
        ),
        (content({"type": "tool_result", "tool_use_id": "t9"}), "no tool_use before it has the id 't9'"),
        (content({"type": "tool_use", "id": "t", "name": "n", "input": {}}), "cannot have a block of type tool_use"),
        (content("Hello"), "messages[0].content[0]"),
        (content(role="tool"), "messages[0].role"),
        (
            {"tools": [{"type": "computer_20250124", "name": "bash"}]},
            "tools[0]: Input should be a tool of type custom, bash",
        ),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "type: must clear thoughts or tool uses"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported here; send the tools of MCP servers to"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: must have name if and only if its type is tool"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"container": "c"}, "container is not supported here"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(MessagesRequest, HELLO | change).chat_body()
    assert says in str(refused.value)


def test_what_is_counted_has_no_limit_of_tokens() -> None:
    asked = {"model": "echo", "messages": HELLO["messages"]}
    assert parse_body(CountRequest, asked).chat_body() == asked
    with pytest.raises(InvalidRequest, match="max_tokens is not a known parameter"):
        parse_body(CountRequest, HELLO)


texts = st.text(max_size=4)


@st.composite
def tellings(draw: st.DrawFn) -> tuple[list[Token], Done]:
    """Thoughts, text and calls in any order, at any cut; calls follow each other."""
    tokens, begun = [], 0
    for _ in range(draw(st.integers(0, 8))):
        calls = []
        for _ in range(draw(st.integers(0, 3))):
            if not begun or draw(st.booleans()):
                begun += 1
                calls.append(ToolCallDelta(begun - 1, "{", f"t{begun}", "weather"))
            else:
                calls.append(ToolCallDelta(begun - 1, draw(st.sampled_from(["", " "]))))
        tokens.append(token(draw(texts), draw(texts), *calls))
    reason: FinishReason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    return tokens, Done("r", (reason,), Usage(3, len(tokens), 3 + len(tokens)))


EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@settings(max_examples=300, deadline=None)
@given(tellings())
def test_every_stream_is_blocks_one_after_the_other(told: tuple[list[Token], Done]) -> None:
    tokens, done = told
    renderer = MessageRenderer("msg-1", "m")
    sent = [*renderer.start(Accepted("r", "m", 7, 3)), *(chunk for token in tokens for chunk in renderer.chunks(token))]
    pieces = [message.data for message in messages(b"".join([*sent, *renderer.end(done)]))]
    kinds = [EVENTS.validate_python(piece, strict=True).type for piece in pieces]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert [kinds.count(kind) for kind in ("message_start", "message_delta", "message_stop")] == [1, 1, 1]
    is_open, count = False, 0
    for piece in pieces[1:-2]:
        match piece["type"]:
            case "content_block_start":
                assert not is_open and piece["index"] == count
                is_open, count = True, count + 1
            case "content_block_delta":
                assert is_open and piece["index"] == count - 1
            case "content_block_stop":
                assert is_open and piece["index"] == count - 1
                is_open = False
    assert not is_open
    streamed, begun = None, dict[int, bytes]()
    for piece in pieces:
        event = EVENTS.validate_python(piece)
        streamed = accumulate_event(event=event, current_snapshot=streamed, json_bufs=begun)
    whole = MessageRenderer("msg-1", "m").whole(tokens, done)
    assert streamed is not None
    for content in (streamed.content, Message.model_validate_json(whole).content):
        calls = [block for block in content if block.type == "tool_use"]
        assert [call.id for call in calls] == [f"t{place + 1}" for place in range(len(calls))]
        assert len(calls) == len({call.index for token in tokens for call in token.tool_calls})
        for kind in ("text", "reasoning"):
            name = "thinking" if kind == "reasoning" else kind
            found = "".join(getattr(block, name) for block in content if block.type == name)
            assert found == "".join(getattr(token, kind) for token in tokens)


# What Anthropic's schema (of 2026-05-31) requires; its own client in Python does without, those of others do not.
ENDED = {"stop_reason", "stop_sequence", "stop_details", "container"}
COUNTED = {"input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"}
COUNTED |= {"output_tokens_details", "server_tool_use"}
BLOCKS = {"text": {"text", "citations"}, "thinking": {"thinking", "signature"}}
BLOCKS["tool_use"] = {"id", "name", "input", "caller"}


def test_every_field_that_anthropics_schema_requires_is_there() -> None:
    done = Done("r", ("tool_calls",), Usage(9, 5, 14))
    renderer = MessageRenderer("msg-1", "m")
    sent = [*renderer.start(Accepted("r", "m", 7, 3)), *(chunk for one in CALLING for chunk in renderer.chunks(one))]
    pieces = [message.data for message in messages(b"".join([*sent, *renderer.end(done)]))]
    whole = orjson.loads(MessageRenderer("msg-1", "m").whole(CALLING, done))
    for message in (whole, pieces[0]["message"]):
        assert message.keys() >= {"id", "type", "role", "model", "content", "usage"} | ENDED
        assert message["usage"].keys() >= COUNTED | {"cache_creation", "inference_geo", "service_tier"}
        assert message["usage"]["cache_creation"].keys() == {"ephemeral_1h_input_tokens", "ephemeral_5m_input_tokens"}
    begun = [piece["content_block"] for piece in pieces if piece["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    for block in (*begun, *whole["content"]):
        assert block.keys() == {"type"} | BLOCKS[block["type"]]
        assert block.get("caller", {"type": "direct"}) == {"type": "direct"}
        assert block.get("citations", []) == []  # what Vercel's AI SDK takes, besides none at all
    assert pieces[-2]["delta"].keys() == ENDED
    assert pieces[-2]["usage"].keys() == COUNTED

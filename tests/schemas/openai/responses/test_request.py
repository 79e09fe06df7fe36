"""Responses bodies: every fault is named, real clients are understood, and each turn is a valid chat request."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from agents import Agent, HostedMCPTool, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.loops import LoopTool, TurnId
from penstock.schemas.openai.chat import NamedTool
from penstock.schemas.openai.completions import ChatRequest, generation_params, parse_request
from penstock.schemas.openai.responses.items import input_items
from penstock.schemas.openai.responses.messages import chat_messages
from penstock.schemas.openai.responses.request import ResponsesRequest, parse_responses
from penstock.schemas.openai.responses.turns import item_id

RESPONSE = "resp_" + "0a" * 16
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
MCP = {"type": "mcp", "server_label": "files", "server_url": "https://example.com/mcp"}
READ = LoopTool(name="read_1", label="files", tool="read", parameters={"type": "object"})
WRITE = LoopTool(name="write", label="files", tool="write", description="Writes.", parameters={"type": "object"})
FIND = LoopTool(name="find", label="web", tool="find", parameters={"type": "object"})
SECRET = "sesame-5b1f"

Body = dict[str, Any]


def tool(kind: Body, **changes: Any) -> Body:
    return {"tools": [kind | changes]}


def choose(choice: Any, *tools: Body) -> Body:
    return {"tools": list(tools), "tool_choice": choice}


def item(kind: str = "message", **fields: Any) -> Body:
    return {"input": [{"type": kind} | fields]}


def said(*content: Body) -> Body:
    return item(role="user", content=list(content))


def allowed(*tools: Body) -> Body:
    return choose({"type": "allowed_tools", "mode": "auto", "tools": list(tools)}, FUNCTION)


# By code: what is added to a body that is right, and the parameter that is named.
MALFORMED: dict[str, list[tuple[Body, str]]] = {
    "missing_required_parameter": [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{}]}, "input[0].id"),
        (item(role="user"), "input[0].content"),
        (item("function_call", name="f", arguments="{}"), "input[0].call_id"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].server_label"),
        (tool(MCP, require_approval={"never": {}}), "tools[0].require_approval.never.tool_names"),
    ],
    "unknown_parameter": [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"max_tokens": 5}, "max_tokens"),
        (tool(MCP, connector_id="connector_gmail"), "tools[0].connector_id"),
        (tool(MCP, allowed_tools={"tool_names": [], "read_only": True}), "tools[0].allowed_tools.read_only"),
    ],
    "unsupported_parameter": [
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ],
    "invalid_type": [
        ({"model": None}, "model"),
        ({"input": 3}, "input"),
        (item(role="user", content=3), "input[0].content"),
        (said({"type": "input_text", "text": 3}), "input[0].content[0].text"),
        (item("function_call", call_id="c", name="f", arguments={}), "input[0].arguments"),
        (item("mcp_approval_response", approval_request_id="m", approve="yes"), "input[0].approve"),
        ({"conversation": {"id": "c", "x": 1}}, "conversation"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        (tool(MCP, require_approval=1), "tools[0].require_approval"),
    ],
    "invalid_value": [
        ({"model": ""}, "model"),
        ({"input": ["hi"]}, "input[0]"),
        (item("computer_call", id="c"), "input[0]"),
        (item(role="tool", content="x"), "input[0].role"),
        (said({"type": "input_image", "detail": "low"}), "input[0].content[0]"),
        (said({"type": "input_image", "image_url": "data:", "file_id": "file-1"}), "input[0].content[0]"),
        (said({"type": "input_file", "filename": "a.txt"}), "input[0].content[0]"),
        (said({"type": "input_file", "file_data": "eA==", "file_id": "file-1"}), "input[0].content[0]"),
        (item(role="system", content=[{"type": "input_image", "image_url": "data:"}]), "input[0]"),
        (said({"type": "text", "text": "x"}), "input[0].content[0]"),
        (said({"type": "refusal", "refusal": "no"}), "input[0]"),
        (item("reasoning", id="rs_1", summary=[], encrypted_content="x"), "input[0]"),
        (item("function_call_output", call_id="c", output=[{"type": "input_file"}]), "input[0].output[0]"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"previous_response_id": "resp.1"}, "previous_response_id"),
        ({"conversation": {"id": "*"}}, "conversation"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"input": [{"type": None, "role": "user", "content": "x"}]}, "input[0]"),
        ({"include": ["everything"]}, "include[0]"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turns": 101}, "max_turns"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"background": True, "store": False}, "background"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"service_tier": "flex", "priority": "high"}, "service_tier"),
        ({"timeout": 0}, "timeout"),
        ({"tools": [{"type": "remote_shell"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION, FUNCTION]}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION]}] * 2}, "tools[1].name"),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "a", "tools": [FUNCTION | {"name": "b__c"}]},
                    {"type": "namespace", "name": "a__b", "tools": [FUNCTION | {"name": "c"}]},
                    FUNCTION | {"name": "b__c"},
                    FUNCTION | {"name": "c"},
                ]
            },
            "tools",
        ),
        (tool(FUNCTION, name="a b"), "tools[0].name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tools": [MCP, MCP]}, "tools[1].server_label"),
        ({"tools": [FUNCTION] * 1025}, "tools"),
        (tool(MCP, server_url="file:///etc"), "tools[0].server_url"),
        (tool(MCP, server_url=f"https://a:{SECRET}@b.c"), "tools[0].server_url"),
        (tool(MCP, headers={"X": f"{SECRET}\r\nY: z"}), "tools[0].headers.X"),
        (tool(MCP, authorization=f"{SECRET} x"), "tools[0].authorization"),
        (tool(MCP, authorization=SECRET, headers={"AUTHORIZATION": SECRET}), "tools[0].authorization"),
        (tool(MCP, authorization=SECRET, sealed="s"), "tools[0].sealed"),
        (tool(MCP, require_approval="some"), "tools[0].require_approval"),
        (choose("any", FUNCTION), "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (choose({"type": "function", "name": "g"}, FUNCTION), "tool_choice"),
        (choose({"type": "mcp", "server_label": "x"}, MCP), "tool_choice"),
        (choose({"type": "mcp"}, FUNCTION), "tool_choice"),
        (allowed(), "tool_choice.tools"),
        (allowed({"type": "function", "name": "g"}), "tool_choice"),
    ],
}


def parsed(**changes: Any) -> ResponsesRequest:
    return parse_responses({"model": "m", "input": "hi"} | changes)


def chat(request: ResponsesRequest, *tools: LoopTool, first: bool = True, allowed: bool = True) -> ChatRequest:
    """One turn as the next stage reads it."""
    body = request.chat_body([{"role": "user", "content": "hi"}], tools, first=first, tools_allowed=allowed)
    turn = parse_request("/v1/chat/completions", json.loads(json.dumps(body)))
    assert isinstance(turn, ChatRequest)
    return turn


@pytest.mark.parametrize(
    ("changes", "param", "code"), [(*case, code) for code, cases in MALFORMED.items() for case in cases]
)
def test_every_fault_is_named(changes: Body, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**changes)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert SECRET not in str(caught.value)


def test_what_changes_nothing_is_accepted() -> None:
    nothing = {name: None for name in ResponsesRequest.model_fields if name not in ("model", "input")}
    parsed(**nothing, prompt=None, context_management=[], moderation=None)
    parsed(
        include=["reasoning.encrypted_content", "web_search_call.results"],
        reasoning={"summary": "auto", "effort": None},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        truncation="auto",
        text={"format": {"type": "text"}, "verbosity": "medium"},
    )


def test_input_may_be_what_came_before() -> None:
    assert parsed(input=None, previous_response_id="resp_1").previous_response_id == "resp_1"
    assert parsed(input=[], conversation={"id": "conv_1"}).conversation == "conv_1"


def test_secrets_stay_where_they_are() -> None:
    request = parsed(**tool(MCP, headers={"X-Key": SECRET}, authorization=f"t-{SECRET}"))
    assert SECRET not in repr(request)
    assert request.mcp_tools[0].secrets == {"X-Key": SECRET, "Authorization": f"Bearer t-{SECRET}"}
    with pytest.raises(InvalidRequest) as caught:
        request.sources()
    assert caught.value.param == "tools[0].headers" and SECRET not in str(caught.value)
    (source,) = parsed(**tool(MCP, sealed="abc")).sources()
    assert (source.label, source.url, source.sealed) == ("files", "https://example.com/mcp", "abc")


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        (None, {"a", "b", "c"}),
        ("always", {"a", "b", "c"}),
        ("never", set()),
        ({}, {"a", "b", "c"}),
        ({"always": {"tool_names": ["a"]}}, {"a"}),
        ({"always": {"tool_names": []}}, set()),
        ({"never": {"tool_names": ["a"]}}, {"b", "c"}),
        ({"never": {"tool_names": []}}, {"a", "b", "c"}),
        ({"always": {"tool_names": ["a", "b"]}, "never": {"tool_names": ["b"]}}, {"a", "b", "c"}),
    ],
)
def test_who_needs_approval(rule: Any, asked: set[str]) -> None:
    (source,) = parsed(**tool(MCP, require_approval=rule)).sources()
    assert {name for name in "abc" if source.needs_approval(name)} == asked


@pytest.mark.parametrize("allowed", [["a"], {"tool_names": ["a"]}])
def test_allowed_tools_in_both_forms(allowed: Any) -> None:
    (source,) = parsed(**tool(MCP, allowed_tools=allowed)).sources()
    assert source.allowed == ("a",)


WEB = {"type": "mcp", "server_label": "web"}
ALL = ["f", "read_1", "write", "find"]
READING = {"type": "mcp", "server_label": "files", "name": "read"}


@pytest.mark.parametrize(
    ("choice", "shown", "first", "later"),
    [
        (None, ALL, "auto", "auto"),
        ("auto", ALL, "auto", "auto"),
        ("none", ALL, "none", "none"),
        ("required", ALL, "required", "auto"),
        ({"type": "function", "name": "f"}, ALL, "f", "auto"),
        (READING, ALL, "read_1", "auto"),
        ({"type": "mcp", "server_label": "files"}, ["read_1", "write"], "required", "auto"),
        ({"type": "mcp"}, ["read_1", "write", "find"], "required", "auto"),
    ],
)
def test_a_choice_is_forced_in_the_first_turn_alone(choice: Any, shown: list[str], first: str, later: str) -> None:
    request = parsed(**choose(choice, FUNCTION, MCP, WEB))
    forced = chat(request, READ, WRITE, FIND)
    assert [one.function.name for one in forced.tools or ()] == shown
    mode = forced.tool_choice
    assert (mode.function.name if isinstance(mode, NamedTool) else mode) == first
    after = chat(request, READ, WRITE, FIND, first=False)
    assert [one.function.name for one in after.tools or ()] == ALL
    assert after.tool_choice == later
    assert chat(request, READ, WRITE, FIND, allowed=False).tool_choice == "none"


@pytest.mark.parametrize(("mode", "later"), [("auto", "auto"), ("required", "auto")])
def test_allowed_tools_hold_in_every_turn(mode: str, later: str) -> None:
    named = [{"type": "function", "name": "f"}, READING, {"type": "mcp", "server_label": "web"}]
    request = parsed(**choose({"type": "allowed_tools", "mode": mode, "tools": named}, FUNCTION, MCP, WEB))
    for first, expected in ((True, mode), (False, later)):
        turn = chat(request, WRITE, FIND, READ, first=first)
        assert [one.function.name for one in turn.tools or ()] == ["f", "find", "read_1"]
        assert turn.tool_choice == expected


def test_a_choice_of_what_no_server_has() -> None:
    request = parsed(**choose(READING, MCP))
    with pytest.raises(InvalidRequest, match="'read'") as caught:
        chat(request, WRITE)
    assert caught.value.param == "tool_choice"


def test_too_many_tools_of_servers() -> None:
    many = [LoopTool(name=f"t{n}", label="files", tool=f"t{n}", parameters={}) for n in range(1025)]
    with pytest.raises(InvalidRequest, match="allowed_tools") as caught:
        chat(parsed(tools=[MCP]), *many)
    assert caught.value.param == "tools"


def test_no_tools_no_choice() -> None:
    turn = chat(parsed(), allowed=False)
    assert turn.tools is None and turn.tool_choice is None


def test_what_a_turn_is_made_of() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, None], "default": None}}}
    request = parsed(
        max_output_tokens=50,
        reasoning={"effort": "max"},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True}],
        chat_template_kwargs={"x": None},
        temperature=0.5,
        service_tier="priority",
        timeout=5,
    )
    messages = [{"role": "user", "content": "hi"}]
    body = request.chat_body(messages, [WRITE], first=True, tools_allowed=True, spent=20)
    assert body == {
        "model": "m",
        "messages": messages,
        "add_generation_prompt": True,
        "max_completion_tokens": 30,
        "reasoning_effort": "xhigh",
        "logprobs": True,
        "top_logprobs": 3,
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "chat_template_kwargs": {"x": None},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": schema, "strict": True},
            },
            {
                "type": "function",
                "function": {"name": "write", "description": "Writes.", "parameters": {"type": "object"}},
            },
        ],
        "tool_choice": "auto",
    }
    assert parsed(text={"format": {"type": "json_object"}}).chat_body([], [], first=True, tools_allowed=True)[
        "response_format"
    ] == {"type": "json_object"}


parts = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(1, 99),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 10),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "max_output_tokens": st.integers(1, 1000),
    "parallel_tool_calls": st.booleans(),
    "include": st.just(["message.output_text.logprobs"]),
    "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["none", "low", "max", None])}),
    "text": st.fixed_dictionaries(
        {"format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, None])},
        optional={"verbosity": st.none()},
    ),
    "tools": st.sampled_from([[], [FUNCTION], [MCP], [MCP, FUNCTION]]),
    "tool_choice": st.sampled_from(["none", "auto"]),
    "metadata": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    "background": st.booleans(),
    "priority": st.sampled_from(["high", "low"]),
}


def test_a_nucleus_of_nothing_is_the_likeliest_token() -> None:
    params = generation_params(chat(parsed(top_p=0, temperature=1.5)), room=1000, seed=7)
    assert (params.top_p, params.temperature) == (1.0, 0.0)


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional=parts), st.booleans(), st.booleans())
def test_every_turn_of_a_good_request_is_a_good_chat(changes: Body, first: bool, allowed: bool) -> None:
    request = parsed(**changes)
    turn = chat(request, *([READ, WRITE] if request.mcp_tools else []), first=first, allowed=allowed)
    params = generation_params(turn, room=1000, seed=7)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"):
        if name in changes:
            assert getattr(params, name) == changes[name]
    assert params.max_tokens == changes.get("max_output_tokens", 1000)
    assert params.logprobs == (0 if "include" in changes else None)


# --- what real clients send


class Sky(BaseModel):
    sky: str


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"clear in {city}"


def answer() -> Body:
    turn = TurnId(RESPONSE, 1)
    words = {"type": "output_text", "text": '{"sky": "clear"}', "annotations": [], "logprobs": []}
    return {
        "id": RESPONSE,
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": [
            {
                "id": item_id("reasoning", turn, 0),
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
                "status": "completed",
            },
            {
                "id": item_id("message", turn, 1),
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [words],
            },
            {
                "id": item_id("mcp_call", turn, 2),
                "type": "mcp_call",
                "server_label": "files",
                "name": "read",
                "arguments": "{}",
                "approval_request_id": None,
                "output": "text",
                "error": None,
                "status": "completed",
            },
            {
                "id": item_id("function_call", turn, 3),
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": '{"city": "Rome"}',
                "status": "completed",
            },
        ],
    }


Told = tuple[str, str, str | None, list[str]]


class Wire:
    """A server that answers each request with a call of `weather`, and then with an object; it keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.bodies.append(json.loads(request.content))
        response = answer()
        if len(self.bodies) % 2 == 0:
            response["output"] = response["output"][1:2]
        return httpx2.Response(400 if self.bodies[-1].get("stream") else 200, json=response)

    def http(self) -> Any:
        return httpx2.AsyncClient(transport=httpx2.MockTransport(self))

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=self.http())

    def turns(self) -> list[list[Told]]:
        """Per body, the messages of the chat that it comes to: role, text, thought, calls."""
        found: list[list[Told]] = []
        for body in self.bodies:
            request = parse_responses(body)
            messages = chat_messages(input_items(request.input, RESPONSE), request.instructions)
            chat_body = request.chat_body(messages, [], first=True, tools_allowed=True)
            turn = parse_request("/v1/chat/completions", chat_body)
            assert isinstance(turn, ChatRequest)
            found.append(
                [
                    (one.role, one.text, one.reasoning_content, [call.function.name for call in one.tool_calls or ()])
                    for one in turn.messages
                ]
            )
        return found


ANSWER: list[Told] = [
    ("assistant", '{"sky": "clear"}', "Hm.", ["read", "weather"]),
    ("tool", "text", None, []),
]


@pytest.mark.filterwarnings("ignore")  # the SDK's own
async def test_the_agents_sdk_is_understood() -> None:
    wire = Wire()
    hosted: Any = MCP | {"require_approval": {"never": {"tool_names": ["read"]}}}
    settings = ModelSettings(
        temperature=0.5,
        max_tokens=30,
        top_logprobs=2,
        parallel_tool_calls=False,
        truncation="disabled",
        store=False,
        metadata={"a": "b"},
        tool_choice="required",
    )
    async with wire.openai() as client:
        agent = Agent(
            name="Forecaster",
            instructions="Tell the weather.",
            model=OpenAIResponsesModel(model="m", openai_client=client),
            model_settings=settings,
            tools=[weather, HostedMCPTool(tool_config=hosted)],
            output_type=Sky,
        )
        quiet = RunConfig(tracing_disabled=True)
        result = await Runner.run(agent, "In Rome?", run_config=quiet)
        assert result.final_output == Sky(sky="clear")
        start: list[Told] = [("system", "Tell the weather.", None, []), ("user", "In Rome?", None, [])]
        assert wire.turns() == [start, [*start, *ANSWER, ("tool", "clear in Rome", None, [])]]
        first = parse_responses(wire.bodies[0])
        assert first.store is False and first.top_logprobs == 2 and first.tool_choice == "required"
        assert first.text is not None and first.text.format is not None
        assert not first.sources()[0].needs_approval("read")

        await Runner.run(agent, "And in Oslo?", run_config=quiet, previous_response_id=RESPONSE)
        assert parse_responses(wire.bodies[-1]).previous_response_id == RESPONSE
        streamed = Runner.run_streamed(agent, "And?", run_config=quiet, conversation_id="conv_1")
        with pytest.raises(openai.BadRequestError):
            assert [event async for event in streamed.stream_events()]
    last = parse_responses(wire.bodies[-1])
    assert last.stream and last.conversation == "conv_1"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_version": "responses/v1"},
        {"output_version": "v1"},
        {"store": False, "include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": "low", "summary": "auto"}, "verbosity": "medium"},
    ],
    ids=str,
)
async def test_langchain_is_understood(options: Body) -> None:
    wire = Wire()
    async with wire.http() as http:
        model = ChatOpenAI(
            model="m",
            api_key=SecretStr("none"),
            base_url="http://test/v1",
            use_responses_api=True,
            http_async_client=http,
            temperature=0.2,
            max_completion_tokens=50,
            **options,
        )
        bound = model.bind_tools([{"name": "weather", "description": "d", "parameters": {}}], tool_choice="weather")
        asked: list[Any] = [("system", "Be brief."), ("user", "In Rome?")]
        called = await bound.ainvoke(asked)
        await bound.ainvoke([*asked, called, ToolMessage("clear", tool_call_id="call_1")])
        start: list[Told] = [("system", "Be brief.", None, []), ("user", "In Rome?", None, [])]
        before, result = ANSWER
        thought = None if options.get("store") is False else "Hm."
        turn = (*before[:2], thought, before[3])
        assert wire.turns() == [start, [*start, turn, result, ("tool", "clear", None, [])]]
        assert chat(parse_responses(wire.bodies[0])).tool_choice is not None

        await model.with_structured_output(Sky, method="json_schema").ainvoke("Where?")
        assert chat(parse_responses(wire.bodies[-1])).response_format is not None
        with pytest.raises(openai.BadRequestError):
            await anext(model.astream("Where?"))
        assert parse_responses(wire.bodies[-1]).stream


async def test_the_official_client_is_understood() -> None:
    wire = Wire()
    async with wire.openai() as client:
        first = await client.responses.create(
            model="m",
            input="hi",
            tools=[{"type": "mcp", "server_label": "files", "require_approval": "never"}],
            extra_body={"max_turns": 3, "priority": "low", "top_k": 5, "timeout": 9.5},
        )
        whole: Any = [{"role": "user", "content": "hi"}, *(one.model_dump() for one in first.output)]
        await client.responses.parse(
            model="m",
            input=[*whole, {"type": "function_call_output", "call_id": "call_1", "output": "x"}],
            text_format=Sky,
        )
    assert parse_responses(wire.bodies[0]).max_turns == 3
    assert wire.turns()[1] == [("user", "hi", None, []), *ANSWER, ("tool", "x", None, [])]

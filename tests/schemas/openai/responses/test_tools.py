"""Functions in namespaces: what the model calls them, and what the client reads of that."""

from __future__ import annotations

from typing import Any

from penstock.schemas.events import Token, ToolCallDelta
from penstock.schemas.openai.completions import ChatRequest, parse_request
from penstock.schemas.openai.responses.items import input_items
from penstock.schemas.openai.responses.messages import chat_messages
from penstock.schemas.openai.responses.request import ResponsesRequest, parse_responses
from penstock.schemas.openai.responses.tools import hosted, namespaced
from penstock.schemas.openai.responses.turns import TurnItems

RESPONSE = "resp_" + "0" * 32


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}


def space(name: str, *functions: str) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "d", "tools": [function(each) for each in functions]}


SERVER = {"type": "mcp", "server_label": "docs", "server_url": "https://example.com/mcp"}
TOOLS = [function("open"), space("crm", "find", "open"), {"type": "web_search"}, space("web", "find", "look"), SERVER]
KNOWN = {
    "crm__find": ("crm", "find"),
    "crm__open": ("crm", "open"),
    "web__find": ("web", "find"),
    "look": ("web", "look"),
}


def asked(**changes: Any) -> ResponsesRequest:
    return parse_responses({"model": "m", "input": "hi", "tools": TOOLS} | changes)


def test_a_function_keeps_its_name_unless_another_has_it_too() -> None:
    assert namespaced(TOOLS) == asked().namespaced == KNOWN
    assert [tool.name for tool in asked().client_tools] == ["open", *KNOWN]
    custom = {"type": "custom", "name": "look"}
    assert asked(tools=[custom, space("web", "look")]).namespaced == {"web__look": ("web", "look")}
    (long,) = namespaced([space("s" * 100, "f" * 100), function("f" * 100)])
    assert len(long) == 128


def test_the_model_is_told_of_functions_alone() -> None:
    body = asked().chat_body([{"role": "user", "content": "hi"}], [], first=True, tools_allowed=True)
    chat = parse_request("/v1/chat/completions", body)
    assert isinstance(chat, ChatRequest)
    assert [tool.function.name for tool in chat.tools or ()] == ["open", *KNOWN]
    alone = asked(tools=[{"type": "web_search"}])
    assert "tools" not in alone.chat_body([{"role": "user", "content": "hi"}], [], first=True, tools_allowed=True)


def test_a_function_in_a_namespace_can_be_chosen() -> None:
    choice = {"type": "function", "name": "crm__find"}
    body = asked(tool_choice=choice).chat_body([], [], first=True, tools_allowed=True)
    assert body["tool_choice"] == {"type": "function", "function": {"name": "crm__find"}}


def test_a_call_is_of_the_clients_own_name() -> None:
    turn = TurnItems(f"{RESPONSE}-1", {}, namespaced=KNOWN)
    calls = (ToolCallDelta(0, "{}", "c1", "crm__find"), ToolCallDelta(1, "{}", "c2", "open"))
    turn.feed(Token("", 0, 0, (), "", tool_calls=calls))
    turn.finish("tool_calls")
    assert [(item.get("namespace"), item["name"]) for item in turn.items] == [("crm", "find"), (None, "open")]
    back = input_items(parse_responses({"model": "m", "input": turn.items}).input, RESPONSE)
    assert back == turn.items
    (message,) = chat_messages(back, None, namespaced=KNOWN)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["crm__find", "open"]


def test_a_call_of_what_is_offered_no_more_keeps_its_name() -> None:
    call = {"type": "function_call", "call_id": "c", "namespace": "gone", "name": "find", "arguments": "{}"}
    items = input_items(parse_responses({"model": "m", "input": [call]}).input, RESPONSE)
    assert chat_messages(items, None, namespaced=KNOWN)[0]["tool_calls"][0]["function"]["name"] == "find"


def test_tools_of_openais_servers_are_known_by_their_types() -> None:
    kinds = ["web_search", "web_search_2025_08_26", "web_search_preview_2025_03_11", "file_search", "code_interpreter"]
    kinds += ["image_generation", "computer_use_preview", "computer", "tool_search"]
    others = ["function", "mcp", "namespace", "custom", "local_shell", "web_searches", "", None]
    assert hosted([{"type": kind} for kind in (*others, *kinds)]) == kinds
    assert hosted(None) == hosted([3]) == []

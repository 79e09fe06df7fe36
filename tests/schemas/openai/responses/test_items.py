"""Items of the Responses API: taken as clients send them, kept in full, and told to the model in order."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.loops import Items, LoopTool, TurnId
from penstock.schemas.openai.completions import ChatRequest, parse_request
from penstock.schemas.openai.responses.items import Approval, InputItem, approved_calls, input_items
from penstock.schemas.openai.responses.messages import chat_messages
from penstock.schemas.openai.responses.turns import item_id

RESPONSE = "resp_" + "0a" * 16
REFUSED = "The user did not approve this call."

_wire: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
_official: TypeAdapter[Any] = TypeAdapter(ResponseItem)


def full(*items: Any) -> Items:
    """As they are kept, from what a client sends."""
    return input_items(_wire.validate_python(json.loads(json.dumps(items))), RESPONSE)


def text(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": one} for one in texts]}


def called(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, said: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def mcp(number: int, turn: int = 1, **more: Any) -> dict[str, Any]:
    found = {"type": "mcp_call", "server_label": "files", "name": "read", "arguments": "{}", "output": f"out {number}"}
    return found | {"id": item_id("mcp_call", TurnId(RESPONSE, turn), number)} | more


def question(number: int, turn: int = 1) -> dict[str, Any]:
    place = item_id("mcp_approval_request", TurnId(RESPONSE, turn), number)
    return {"type": "mcp_approval_request", "id": place, "server_label": "files", "name": "read", "arguments": "{}"}


def verdict(request: dict[str, Any], approve: bool, **more: Any) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve} | more


# Each as a client may send it, with all that it may hold.
ITEMS: dict[str, dict[str, Any]] = {
    "easy": {"role": "user", "content": "hi"},
    "easy assistant": {"role": "assistant", "content": "hi", "phase": "final_answer"},
    "message": {
        "type": "message",
        "role": "developer",
        "status": None,
        "content": [{"type": "input_text", "text": ""}],
    },
    "answer": {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "incomplete",
        "phase": None,
        "content": [
            {
                "type": "output_text",
                "text": "a",
                "annotations": [{"type": "file_path", "file_id": "x", "index": 0}],
                "logprobs": [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}],
            },
            {"type": "output_text", "text": "b", "annotations": [], "logprobs": None},
            {"type": "refusal", "refusal": "c"},
        ],
    },
    "reasoning": {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "short"}],
        "content": [{"type": "reasoning_text", "text": "long"}],
        "encrypted_content": None,
        "status": "completed",
    },
    "call": called("call_1") | {"id": "fc_1", "status": "completed", "namespace": None, "caller": None},
    "output": output("call_1", "text"),
    "output of parts": output("call_1", [{"type": "input_text", "text": "a"}]) | {"id": "fco_1", "status": "completed"},
    "list": {
        "type": "mcp_list_tools",
        "id": "mcpl_1",
        "server_label": "files",
        "tools": [{"name": "read", "input_schema": {"type": "object"}, "description": None, "annotations": {"a": 1}}],
        "error": None,
    },
    "mcp call": mcp(1, error=None, approval_request_id=None, status="completed"),
    "mcp call failed": mcp(1, output=None, error={"type": "http_error", "code": 500, "message": "m"}, status="failed"),
    "question": question(1),
    "verdict": verdict(question(1), False, reason="no"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_go_in_and_out_as_they_are(name: str) -> None:
    item = ITEMS[name]
    (kept,) = full(item)
    for key, value in item.items():
        if value is not None and key != "content":
            given = {one: part for one, part in value.items() if part is not None} if isinstance(value, dict) else value
            assert kept[key] == given or name == "list"
    if name in ("answer", "message"):
        assert [part.get("text") for part in kept["content"]] == [part.get("text") for part in item["content"]]
        assert kept["content"][0] == item["content"][0]
    assert full(kept) == [kept]
    shown = _official.validate_python(kept)
    assert shown.type == kept["type"] and shown.id == kept["id"]


@pytest.mark.parametrize("name", ITEMS)
def test_fields_that_clients_add_are_passed_over(name: str) -> None:
    item = ITEMS[name]
    marked = item | {"provider_specific_fields": {"a": 1}, "cache_control": {"type": "ephemeral"}}
    if isinstance(parts := item.get("content"), list):
        marked["content"] = [part | {"extra_content": 1} for part in parts]
    assert full(marked) == full(item)


def test_short_forms_are_made_whole() -> None:
    stem = RESPONSE.removeprefix("resp_")
    assert input_items("hi", RESPONSE) == [
        {
            "id": f"msg_{stem}i0",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": "hi"}],
        }
    ]
    assert input_items(None, RESPONSE) == []
    call, answer, easy = full(called("c"), output("c"), {"role": "assistant", "content": "hi"})
    assert (call["id"], call["status"]) == (f"fc_{stem}i0", "completed")
    assert (answer["id"], answer["status"]) == (f"fco_{stem}i1", "completed")
    assert easy["content"] == [{"type": "output_text", "annotations": [], "text": "hi"}]
    (mixed,) = full({"role": "user", "content": [{"type": "output_text", "text": "a", "annotations": []}]})
    assert mixed["content"] == [{"type": "input_text", "text": "a"}]


def said(message: dict[str, Any]) -> tuple[Any, ...]:
    calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", [])]
    return (
        message["role"],
        message["content"],
        *([message["reasoning_content"]] if "reasoning_content" in message else []),
        *calls,
    )


def test_a_turn_is_one_message() -> None:
    turn = TurnId(RESPONSE, 1)
    items = full(
        {"role": "user", "content": "hi"},
        {"type": "mcp_list_tools", "server_label": "files", "tools": []},
        {
            "type": "reasoning",
            "id": item_id("reasoning", turn, 0),
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        text("assistant", "one, ") | {"id": item_id("message", turn, 1)},
        mcp(2),
        text("assistant", "two") | {"id": item_id("message", turn, 3)},
        called("call_4") | {"id": item_id("function_call", turn, 4)},
        mcp(5),
        mcp(6, turn=2),
        mcp(7, turn=2, output=""),
        output("call_4"),
    )
    *_, a, b, c, d = (item["id"] for item in items if item["type"] == "mcp_call")
    tool = LoopTool(name="files_read", label="files", tool="read", parameters={})
    chat = chat_messages(items, "Be kind.", tools=[tool])
    assert [said(message) for message in chat] == [
        ("system", "Be kind."),
        ("user", "hi"),
        ("assistant", "one, two", "hm", (a, "files_read"), ("call_4", "f"), (b, "files_read")),
        ("tool", "out 2"),
        ("tool", "out 5"),
        ("assistant", "", (c, "files_read"), (d, "files_read")),
        ("tool", "out 6"),
        ("tool", ""),
        ("tool", "done"),
    ]
    assert [message["tool_call_id"] for message in chat if message["role"] == "tool"] == [a, b, c, d, "call_4"]


def test_the_images_of_results_follow_them_as_the_users() -> None:
    def image(data: str) -> dict[str, Any]:
        return {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "low"}

    def part(data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "low"}}

    def mark(number: int) -> dict[str, Any]:
        return {"type": "text", "text": f"[image {number}]"}

    both = [{"type": "input_text", "text": "It is"}, image("BBBB")]
    items = [called("a"), called("b"), output("b") | {"output": both}, output("a") | {"output": [image("AAAA")]}]
    chat = chat_messages(full(*items, text("user", "Well?"), text("assistant", "so"), text("user", "Oh.")), None)
    assert [message["role"] for message in chat] == ["assistant", "tool", "tool", "user", "assistant", "user"]
    assert [(one["tool_call_id"], one["content"]) for one in chat[1:3]] == [
        ("a", "[image 2]"),
        ("b", "It is\n[image 1]"),
    ]
    well = {"type": "text", "text": "Well?"}
    assert chat[3]["content"] == [mark(1), part("BBBB"), mark(2), part("AAAA"), well]
    assert chat[5] == {"role": "user", "content": "Oh."}
    alone = chat_messages(full(*items), None)
    assert alone[3] == {"role": "user", "content": [mark(1), part("BBBB"), mark(2), part("AAAA")]}
    assert chat_messages(full(*items, text("assistant", "so")), None)[3:] == [alone[3], chat[4]]


def test_of_images_that_servers_return_those_that_are_there_are_shown() -> None:
    marks = "One: [image file-1] and\n[image file-2][image file-3]"
    items = full(text("user", "Look."), mcp(0, output=marks, images=["file-1", "file-2", "file-3"]))
    assert items[1]["images"] == ["file-1", "file-2", "file-3"], "kept as they are, and taken back"
    *_, call, result, shown = chat_messages(items, None, images={"file-1", "file-3"})
    assert [one["function"]["name"] for one in call["tool_calls"]] == ["read"]
    assert result["content"] == "One: \n[image 1]\n and\n[image file-2]\n[image 2]"
    images = [{"type": "image_url", "image_url": {"file_id": id}} for id in ("file-1", "file-3")]
    texts = [{"type": "text", "text": f"[image {number}]"} for number in (1, 2)]
    assert shown == {"role": "user", "content": [texts[0], images[0], texts[1], images[1]]}
    *_, result = chat_messages(items, None)
    assert (result["role"], result["content"]) == ("tool", marks)
    cut = full(text("user", "Look."), mcp(0, output="One: [image fi", images=["file-1"]))
    assert chat_messages(cut, None, images={"file-1"})[-2]["content"] == "One: [image fi\n[image 1]"


def test_results_go_in_the_order_of_the_calls() -> None:
    chat = chat_messages(full(called("a"), called("b"), output("b"), output("a"), text("assistant", "so")), None)
    assert [said(message) for message in chat] == [
        ("assistant", "", ("a", "f"), ("b", "f")),
        ("tool", "done"),
        ("tool", "done"),
        ("assistant", "so"),
    ]
    assert [message.get("tool_call_id") for message in chat] == [None, "a", "b", None]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([text("assistant", "a"), text("assistant", "b")], [("assistant", "a"), ("assistant", "b")]),
        ([called("a"), text("assistant", "x")], [("assistant", "x", ("a", "f"))]),
        ([text("assistant", "x"), called("a")], [("assistant", "x", ("a", "f"))]),
        (
            [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
                called("a"),
                output("a"),
                called("b"),
            ],
            [("assistant", "", "s", ("a", "f")), ("tool", "done"), ("assistant", "", ("b", "f"))],
        ),
        (
            [mcp(1, id="mcp_1"), mcp(2, id="mcp_2"), text("assistant", "x")],
            [
                ("assistant", "", ("mcp_1", "read")),
                ("tool", "out 1"),
                ("assistant", "", ("mcp_2", "read")),
                ("tool", "out 2"),
                ("assistant", "x"),
            ],
        ),
        ([text("user", "a", "b")], [("user", "ab")]),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], [("assistant", "no")]),
    ],
)
def test_turns_of_unknown_origin(items: list[Any], expected: list[Any]) -> None:
    assert [said(message) for message in chat_messages(full(*items), None)] == expected


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (mcp(1, output=None, error="gone"), "Error: gone"),
        (mcp(1, output=None, error={"type": "http_error", "code": 5, "message": "down"}), "Error: down"),
        (mcp(1, output=None, error={"type": "mcp_tool_execution_error", "content": "bad"}), "Error: bad"),
        (mcp(1, output=None, error={"type": "mcp_tool_execution_error", "content": [1]}), "Error: [1]"),
        (mcp(1, output=None, status="incomplete"), "This call was not finished."),
    ],
)
def test_what_the_model_reads_of_a_failed_call(call: dict[str, Any], told: str) -> None:
    assert chat_messages(full(call), None)[1]["content"] == told


@pytest.mark.parametrize("arguments", ["", '{"a": 1', "[1]", "3"])
def test_arguments_that_are_none_reach_no_template(arguments: str) -> None:
    (message,) = chat_messages(full(called("a", arguments=arguments)), None)
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([text("user", "x"), output("call_1")], "input[1].call_id"),
        ([output("call_1"), called("call_1")], "input[0].call_id"),
        ([{"type": "item_reference", "id": "msg_9"}], "input[0].id"),
        ([{"id": "msg_9"}], "input[0].id"),
    ],
)
def test_what_refers_to_nothing_is_named(items: list[Any], param: str) -> None:
    before = full(text("user", "a"), text("assistant", "b"))
    with pytest.raises(InvalidRequest) as caught:
        chat_messages([*before, *full(*items)], None, before=len(before))
    assert caught.value.param == param


def test_a_reference_to_what_is_there_adds_nothing() -> None:
    assert len(chat_messages(full(text("user", "a") | {"id": "msg_1"}, {"id": "msg_1"}), None)) == 1


# --- approvals


def test_an_approved_call_stands_where_it_was_asked_for() -> None:
    asked = [question(1), question(2), question(3)]
    items = full(
        text("user", "hi"),
        text("assistant", "May I?") | {"id": item_id("message", TurnId(RESPONSE, 1), 0)},
        *asked,
        verdict(asked[1], False, reason="Too dear."),
        verdict(asked[0], True),
        text("user", "Go on."),
        mcp(9, turn=0, approval_request_id=asked[0]["id"]),
        text("assistant", "Done."),
    )
    assert [said(message) for message in chat_messages(items, None)] == [
        ("user", "hi"),
        ("assistant", "May I?", (asked[0]["id"], "read"), (asked[1]["id"], "read")),
        ("tool", "out 9"),
        ("tool", f"{REFUSED} Too dear."),
        ("user", "Go on."),
        ("assistant", "Done."),
    ]


def test_approved_calls_in_the_order_of_the_answers() -> None:
    first, second = question(1), question(2)
    history = full(text("user", "hi"), first, second)
    given = full(verdict(second, False, reason="no"), verdict(first, True))
    assert approved_calls(history, given) == [Approval(second, False, "no"), Approval(first, True, None)]
    assert approved_calls([], full(first, verdict(first, True))) == [Approval(first, True, None)]
    other = first | {"arguments": '{"all": true}'}
    assert approved_calls(history, full(other, verdict(first, True))) == [Approval(first, True, None)]


def test_an_answer_to_nothing_and_a_second_answer_are_refused() -> None:
    asked = question(1)
    answers = [
        ([], [verdict(asked, True)], 0),
        ([], [verdict(asked, True), asked], 0),
        ([asked], [text("user", "x"), verdict(asked, True), verdict(asked, False)], 2),
        ([asked, verdict(asked, False)], [verdict(asked, True)], 0),
        ([asked, mcp(1, approval_request_id=asked["id"])], [verdict(asked, True)], 0),
    ]
    for history, new, place in answers:
        with pytest.raises(InvalidRequest) as caught:
            approved_calls(full(*history), full(*new))
        assert caught.value.param == f"input[{place}].approval_request_id"


def test_what_a_client_repeats_is_not_run_again() -> None:
    asked = question(1)
    repeated = full(asked, verdict(asked, True), mcp(1, approval_request_id=asked["id"]), text("user", "and?"))
    assert approved_calls([], repeated) == []


# --- any conversation


class Turn(NamedTuple):
    user: str | None
    thought: str | None
    text: str | None
    calls: list[str]  # kinds


turns = st.lists(
    st.builds(
        Turn,
        st.none() | st.text(max_size=4),
        st.none() | st.text(min_size=1, max_size=4),
        st.none() | st.text(min_size=1, max_size=4),
        st.lists(st.sampled_from(["function", "mcp", "error", "approved", "denied"]), max_size=3),
    ),
    min_size=1,
    max_size=5,
)


def told(conversation: list[Turn]) -> tuple[list[dict[str, Any]], list[tuple[Any, ...]]]:
    """The items of a conversation, and role and text of its messages, with the results' calls by place."""
    items: list[dict[str, Any]] = []
    expected: list[tuple[Any, ...]] = []
    for number, turn in enumerate(conversation, start=1):
        place = TurnId(RESPONSE, number)
        late: list[dict[str, Any]] = []
        if turn.user is not None:
            items.append(text("user", turn.user))
            expected.append(("user", turn.user))
        if turn.thought:
            content = [{"type": "reasoning_text", "text": turn.thought}]
            items.append({"type": "reasoning", "id": item_id("reasoning", place, 0), "summary": [], "content": content})
        if turn.text:
            items.append(text("assistant", turn.text) | {"id": item_id("message", place, 1)})
        ids = []
        results = []
        for at, kind in enumerate(turn.calls, start=2):
            result = f"{number}.{at}"
            match kind:
                case "function":
                    ids.append(f"call_{result}")
                    items.append(called(ids[-1]) | {"id": item_id("function_call", place, at)})
                    late.append(output(ids[-1], result))
                case "mcp" | "error":
                    items.append(mcp(at, number, output=result) if kind == "mcp" else mcp(at, number, error=result))
                    ids.append(items[-1]["id"])
                    result = result if kind == "mcp" else f"Error: {result}"
                case _:
                    items.append(question(at, number))
                    ids.append(items[-1]["id"])
                    late.append(verdict(items[-1], kind == "approved", reason=result))
                    if kind == "approved":
                        late.append(mcp(at, 0, id=f"mcp_{result}", output=result, approval_request_id=ids[-1]))
                    else:
                        result = f"{REFUSED} {result}"
            results.append(("tool", result, ids[-1]))
        if turn.thought or turn.text or ids:
            thought = (turn.thought,) if turn.thought else ()
            expected.append(("assistant", turn.text or "", *thought, *((one,) for one in ids)))
        items += late
        expected += results
    return items, expected


@settings(max_examples=200, deadline=None)
@given(turns)
def test_any_conversation_is_told_in_order(conversation: list[Turn]) -> None:
    items, expected = told(conversation)
    chat = chat_messages(full(*items), None)
    found = []
    for message in chat:
        thought = [message["reasoning_content"]] if "reasoning_content" in message else []
        ids = [(call["id"],) for call in message.get("tool_calls", [])]
        result = [message["tool_call_id"]] if message["role"] == "tool" else []
        found.append((message["role"], message["content"], *thought, *ids, *result))
    assert found == expected
    if chat:
        assert isinstance(parse_request("/v1/chat/completions", {"model": "m", "messages": chat}), ChatRequest)


@settings(max_examples=200, deadline=None)
@given(turns, st.data())
def test_without_ids_nothing_is_lost(conversation: list[Turn], data: st.DataObject) -> None:
    items, expected = told(conversation)
    for item in items:
        if item["type"] != "mcp_approval_request" and data.draw(st.booleans()):
            item.pop("id", None)
    chat = chat_messages(full(*items), None)
    assert "".join(m["content"] for m in chat if m["role"] != "tool") == "".join(
        m[1] for m in expected if m[0] != "tool"
    )
    results = [message["content"] for message in chat if message["role"] == "tool"]
    assert sorted(results) == sorted(message[1] for message in expected if message[0] == "tool")
    open_calls: list[str] = []
    for message in chat:
        open_calls += [call["id"] for call in message.get("tool_calls", [])]
        if message["role"] == "tool":
            open_calls.remove(message["tool_call_id"])
    assert open_calls == []
    if chat:
        parse_request("/v1/chat/completions", {"model": "m", "messages": chat})

"""`/v1/responses` through the whole pipeline, with a model that says what the test wrote for it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Any

import orjson
import pytest
from asgi import Response, ask
from office import Office, call, functions, kinds, results, said, server
from responses_rules import check_responses, read_events

from penstock.api.http.answers import FOR_EVER
from penstock.schemas.events import Accepted, Cancelled, Delta, Done, Event, Failed
from penstock.schemas.jobs import Job
from penstock.schemas.loops import Source, Step, ToolResult, is_response
from penstock.schemas.openai.lark_patterns import lark_pattern
from penstock.schemas.registry import ModelRefusal, StageCard
from penstock.schemas.wire import codec
from penstock.stages.tools.calls import UNKNOWN, Calls
from penstock.streams.port import Message
from penstock.streams.stores.responses import CallKey, ResponseLog
from penstock.streams.topology import OBJECT_DATA, RESPONSES

SECRET = "Bearer swordfish-1234"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def whole(runner: asyncio.Runner) -> Iterator[Office]:
    office = Office(runner)
    yield office
    office.close()


@pytest.fixture
def office(whole: Office) -> Office:
    whole.done.clear()
    whole.goes = asyncio.Event()
    whole.waiting = asyncio.Semaphore(0)
    whole.model.asked.clear()
    return whole


WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_kept_and_shown_by_any_bridge(office: Office, stream: bool) -> None:
    made = office.create("All is well.", input="How is it?", stream=stream, metadata={"a": "b"})
    assert (made["status"], said(made), made["metadata"]) == ("completed", "All is well.", {"a": "b"})
    kept = office.stored(made["id"])
    assert kept == made and kept["completed_at"] >= kept["created_at"]
    assert made["usage"]["total_tokens"] == made["usage"]["input_tokens"] + made["usage"]["output_tokens"] > 0


def test_a_tool_is_run_and_the_model_goes_on(office: Office) -> None:
    made = office.create(call("add", a=2, b=3), "It is 5.", input="2 + 3?", tools=functions(), stream=True)
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "message"]
    assert (made["output"][1]["output"], made["output"][1]["error"], said(made)) == ("5", None, "It is 5.")
    assert office.done == [("add", 2, 3)]
    first, second = office.model.asked
    assert '"add"' in first and "2 + 3?" in first
    assert "5" in second.split("</tool_call>")[-1]
    assert office.stored(made["id"])["output"] == made["output"]


def test_calls_of_one_turn_run_at_once_and_are_answered_in_their_order(office: Office) -> None:
    office.model.texts = [call("wait", name="one") + call("wait", name="two"), "Done."]

    async def both() -> Response:
        asking = asyncio.create_task(
            ask(
                office.apps[0],
                "POST",
                "/v1/responses",
                {"model": "echo", "input": "Go.", "tools": functions(), "stream": True},
            )
        )
        async with asyncio.timeout(30):
            await office.waiting.acquire()
            await office.waiting.acquire()
            office.goes.set()
            return await asking

    made = check_responses(office.run(both()).body)
    assert [item["output"] for item in made["output"] if item["type"] == "mcp_call"] == [
        "one has waited",
        "two has waited",
    ]
    assert office.model.asked[1].index("one has waited") < office.model.asked[1].index("two has waited")


def test_a_stream_goes_on_behind_any_event_at_another_bridge(office: Office) -> None:
    office.model.texts = [call("add", a=20, b=22), "It is 42."]
    whole = office.ask(
        "POST", "/v1/responses", {"model": "echo", "input": "20 + 22?", "tools": functions(), "stream": True}
    )
    events = read_events(whole.body)
    id = events[0]["response"]["id"]
    for after in range(-1, len(events)):
        rest = office.ask("GET", f"/v1/responses/{id}?stream=true&starting_after={after}", app=1)
        assert read_events(rest.body) == events[after + 1 :]


def test_a_function_of_the_clients_ends_the_response_and_its_output_goes_on(office: Office) -> None:
    made = office.create(call("weather", city="Oslo"), input="Weather?", tools=[WEATHER], stream=True)
    (item,) = made["output"]
    assert (item["type"], item["name"], orjson.loads(item["arguments"])) == (
        "function_call",
        "weather",
        {"city": "Oslo"},
    )
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "It snows."}
    more = office.create("Snow.", input=[output], previous_response_id=made["id"], tools=[WEATHER], app=1)
    assert said(more) == "Snow."
    shown = office.model.asked[-1]
    assert shown.index("Weather?") < shown.index("Oslo") < shown.index("It snows.")
    error = office.refused(400, input=[output | {"call_id": "call_none"}], previous_response_id=made["id"])
    assert error["param"] == "input[0].call_id"


def test_a_grammar_in_lark_is_written_beside_the_event_loop(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second is long for all who wait; one that cannot be used is refused all the same."""
    threads: list[threading.Thread] = []

    def noted(definition: str) -> str:
        threads.append(threading.current_thread())
        return lark_pattern(definition)

    monkeypatch.setattr("penstock.schemas.openai.chat.lark_pattern", noted)
    for definition in ('start: "Oslo"', 'start: "(" start ")"'):
        grammar = {"type": "grammar", "syntax": "lark", "definition": definition}
        tools = [{"type": "custom", "name": "weather", "format": grammar}]
        if "(" not in definition:
            made = office.create(call("weather", input="Oslo"), input="Go.", tools=tools, stream=True)
            assert made["output"][0]["input"] == "Oslo"
        else:
            error = office.refused(400, input="Go.", tools=tools)
            assert "start refers to itself" in error["message"]
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_call_of_the_clients_beside_one_of_penstocks_ends_the_response(office: Office, kind: str) -> None:
    """The client has to answer before the model goes on."""
    mine = WEATHER if kind == "function" else {"type": "custom", "name": "weather"}
    calls = call("add", a=2, b=3) + call("weather", **{"city" if kind == "function" else "input": "Oslo"})
    made = office.create(calls, input="Go.", tools=[*functions(), mine], stream=True)
    own = {"function": "function_call", "custom": "custom_tool_call"}[kind]
    assert (made["status"], kinds(made)) == ("completed", ["mcp_list_tools", "mcp_call", own])
    item = made["output"][2]
    assert item["call_id"] and item.get("input", "Oslo") == "Oslo"
    output = {"type": f"{own}_output", "call_id": item["call_id"], "output": "It snows."}
    more = office.create("Snow.", input=[output], previous_response_id=made["id"], tools=[*functions(), mine])
    assert said(more) == "Snow." and office.model.asked[-1].index("Oslo") < office.model.asked[-1].index("It snows.")


def test_the_instructions_are_not_passed_on(office: Office) -> None:
    first = office.create("Yes.", input="Are you there?", instructions="Answer with one word.")
    office.create("Yes.", input="Still?", previous_response_id=first["id"])
    assert "one word" in office.model.asked[0]
    assert "one word" not in office.model.asked[1] and "Are you there?" in office.model.asked[1]


def test_approval_is_asked_for_and_remembered(office: Office) -> None:
    tools = functions(require_approval="always")
    made = office.create(call("add", a=1, b=2), input="1 + 2?", tools=tools, stream=True)
    assert kinds(made) == ["mcp_list_tools", "mcp_approval_request"]
    assert office.done == []
    question = made["output"][1]
    answer = {"type": "mcp_approval_response", "approval_request_id": question["id"], "approve": True}
    after = {"previous_response_id": made["id"], "tools": tools}
    more = office.create("It is 3.", input=[answer], stream=True, app=1, **after)
    assert kinds(more) == ["mcp_list_tools", "mcp_call", "message"]
    assert (more["output"][1]["output"], more["output"][1]["approval_request_id"]) == ("3", question["id"])
    assert office.done == [("add", 1, 2)]
    again = office.refused(400, input=[answer], previous_response_id=more["id"], tools=tools)
    assert "answered before" in again["message"]
    assert "mcpr_none" in office.refused(400, input=[answer | {"approval_request_id": "mcpr_none"}], **after)["message"]


def test_a_call_that_was_not_approved_is_told_to_the_model(office: Office) -> None:
    tools = functions(require_approval={"always": {"tool_names": ["add"]}})
    made = office.create(call("add", a=1, b=2), input="1 + 2?", tools=tools)
    id = made["output"][1]["id"]
    denied = {"type": "mcp_approval_response", "approval_request_id": id, "approve": False, "reason": "Too dear."}
    more = office.create("Then not.", input=[denied], previous_response_id=made["id"], tools=tools)
    assert (kinds(more), office.done) == (["mcp_list_tools", "message"], [])
    assert "did not approve" in office.model.asked[-1] and "Too dear." in office.model.asked[-1]


def test_a_tool_that_is_gone_when_its_call_is_approved(office: Office) -> None:
    tools = functions(require_approval="always")
    made = office.create(call("add", a=1, b=2), input="1 + 2?", tools=tools)
    id = made["output"][1]["id"]
    answer = {"type": "mcp_approval_response", "approval_request_id": id, "approve": True}
    fewer = functions(allowed_tools=["look"])
    more = office.create("A pity.", input=[answer], previous_response_id=made["id"], tools=fewer, stream=True)
    assert results(more) == [(None, "The tool add of functions is no longer available.")]
    assert office.done == [] and "no longer available" in office.model.asked[-1]


def test_the_last_turn_may_call_nothing(office: Office) -> None:
    one = call("add", a=1, b=1)
    made = office.create(one, one, "Enough.", input="Go.", tools=functions(), max_turns=3)
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert '"add"' in office.model.asked[1] and "Add two numbers." not in office.model.asked[2]
    made = office.create(one + one, "Enough.", input="Go.", tools=functions(), max_tool_calls=1)
    assert [item.get("error") is None for item in made["output"]] == [True, True, False, True]
    assert len(office.done) == 3


def test_what_goes_wrong_with_a_call_is_told_to_the_model(office: Office) -> None:
    texts = [call("add", a=1, b=13), call("look", name="big"), "I see."]
    made = office.create(*texts, input="Go.", tools=functions(), stream=True)
    _, wrong, big, _ = made["output"]
    (part,) = wrong["error"]["content"]
    assert wrong["status"] == "failed" and "unlucky" in part["text"] and wrong["output"] is None
    assert len(big["output"]) < 1200 and "cut" in big["output"][-200:]
    assert part["text"][:40] in office.model.asked[1]


def test_what_goes_wrong_with_the_reference_server_of_npm(office: Office) -> None:
    names = ["echo", "get-resource-reference", "trigger-long-running-operation"]
    echo, resource, slow = names
    everything = server("everything", allowed_tools=names)
    asked: dict[str, Any] = {"input": "Go.", "tools": everything, "stream": True}
    hello = call(echo, message="hi")
    office.everything.start()
    first = office.create(hello + call(resource, resourceId=-1), "I see.", **asked)
    wrong = "Invalid resourceId: -1. Must be a finite positive integer."
    assert results(first) == [("Echo: hi", None), (None, wrong)]
    assert wrong in office.model.asked[-1]
    client = office.run(office.toolbox._client(Source(label="everything")))
    patience, client.server = client.server, client.server.model_copy(update={"timeout": 0.05})
    late = f"everything could not run {slow}: no answer within 0.05 seconds"
    assert results(office.create(call(slow, duration=600, steps=1), "A pity.", **asked)) == [(None, late)]
    assert late in office.model.asked[-1]
    client.server = patience
    office.everything.kill()
    second = office.create(hello, "It is gone.", previous_response_id=first["id"], **asked)
    ((output, gone),) = results(second)
    assert output is None and gone is not None and "everything could not run echo" in gone
    office.everything.start()
    third = office.create(hello, "It is back.", previous_response_id=second["id"], **asked)
    assert results(third) == [("Echo: hi", None)]
    assert "It is gone." in office.model.asked[-1] and gone in office.model.asked[-1]


@pytest.mark.parametrize("choice", [{}, {"server_label": "x"}, {"server_label": "x", "name": "add"}])
def test_a_choice_of_a_server_that_is_away_says_so(office: Office, choice: dict[str, str]) -> None:
    tools = server("x", server_url="http://127.0.0.1:9/mcp")
    for forced in ({"type": "mcp", **choice}, {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}):
        error = office.refused(400, input="Go.", tools=tools, tool_choice=forced)
        assert error["param"] == "tool_choice"
        assert "The tools of x cannot be listed: it cannot be reached (ConnectError)." in error["message"]


def test_a_response_whose_tools_are_still_being_listed(office: Office) -> None:
    """It is there from the moment its client hears of it, and can be cancelled."""
    begun: asyncio.Queue[str] = asyncio.Queue()
    body = {"model": "echo", "input": "Go.", "tools": server("silent"), "metadata": {"a": "b"}, "stream": True}

    def hear(message: Message) -> None:
        event = codec.decode_event(message.data)
        if isinstance(event, Accepted) and is_response(event.request):
            begun.put_nowait(event.request)

    async def create() -> tuple[str, asyncio.Task[Response]]:
        await office.broker.listen(f"{office.pipeline.pipe.subjects.root}.events.>", hear)
        asking = asyncio.create_task(ask(office.apps[0], "POST", "/v1/responses", body))
        async with asyncio.timeout(30):
            return await begun.get(), asking

    id, asking = office.run(create())
    listing = office.stored(id)
    assert (listing["status"], listing["metadata"], listing["output"]) == ("in_progress", {"a": "b"}, [])
    items = orjson.loads(office.ask("GET", f"/v1/responses/{id}/input_items", app=1).body)
    assert [item["content"][0]["text"] for item in items["data"]] == ["Go."]
    cancelled = orjson.loads(office.ask("POST", f"/v1/responses/{id}/cancel", app=1).body)
    assert cancelled["status"] == office.stored(id)["status"] == "cancelled"
    assert check_responses(office.run(answered(asking)).body)["status"] == "cancelled"
    assert office.model.asked == []
    assert office.ask("DELETE", f"/v1/responses/{id}").status == 200
    assert office.ask("GET", f"/v1/responses/{id}").error["code"] == "response_not_found"


async def answered(asking: asyncio.Task[Response]) -> Response:
    return await asking


def test_a_tool_that_is_not_allowed_is_not_offered(office: Office) -> None:
    made = office.create("No.", input="Go.", tools=functions(allowed_tools=["look"]))
    assert [one["name"] for one in made["output"][0]["tools"]] == ["look"]
    assert "Add two numbers." not in office.model.asked[0]


def test_a_url_beyond_the_allow_list_is_never_asked(office: Office) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        tools = [{"type": "mcp", "server_label": "x", "server_url": url}]
        assert "does not allow" in office.refused(400, input="Go.", tools=tools)["message"]
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert "x" in office.refused(400, input="Go.", tools=[{"type": "mcp", "server_label": "x"}])["message"]


def test_a_secret_is_kept_nowhere(office: Office) -> None:
    tools = [{"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:9/mcp", "headers": {"X-Key": SECRET}}]
    made = office.create("It is away.", input="Go.", tools=tools, stream=True)
    assert made["output"][0]["error"]  # nobody listens there
    seen = [orjson.dumps(made), orjson.dumps(office.stored(made["id"]))]
    for name in ("JOBS_NORMAL", "TOOLS_NORMAL", "EVENTS", "STREAM", "DEAD"):
        seen += [
            message.data
            for message in office.run(office.broker.replay(name, f"{office.pipeline.pipe.subjects.root}.>"))
        ]
    for name in ("responses", "object-data", "state", "idempotency"):
        bucket = office.run(office.broker.bucket(name))
        seen += [entry.value for entry in office.run(bucket.entries())]
    assert len(seen) > 20
    assert not [data for data in seen if b"swordfish" in data]
    refused = office.refused(400, input="Go.", tools=[tools[0] | {"sealed": "x"}])
    assert "sealed" in refused["message"]


def test_conversations(office: Office) -> None:
    begin = {"items": [{"role": "user", "content": "My name is Eva."}], "metadata": {"topic": "names"}}
    made = orjson.loads(office.ask("POST", "/v1/conversations", begin).body)
    assert (made["object"], made["metadata"]) == ("conversation", {"topic": "names"})
    id = made["id"]
    office.create("Eva.", input="What is my name?", conversation=id)
    office.create("I said it.", input="And now?", conversation={"id": id}, app=1)
    assert office.model.asked[1].count("My name is Eva.") == office.model.asked[1].count("What is my name?") == 1
    items = orjson.loads(office.ask("GET", f"/v1/conversations/{id}/items?order=asc").body)["data"]
    assert [item["role"] for item in items] == ["user", "user", "assistant", "user", "assistant"]
    one = items[0]["id"]
    assert orjson.loads(office.ask("GET", f"/v1/conversations/{id}/items/{one}").body) == items[0]
    assert office.ask("DELETE", f"/v1/conversations/{id}/items/{one}").status == 200
    page = orjson.loads(office.ask("GET", f"/v1/conversations/{id}/items?order=asc&limit=2").body)
    assert page["data"] == items[1:3] and page["has_more"]
    page = orjson.loads(office.ask("GET", f"/v1/conversations/{id}/items?order=asc&after={items[2]['id']}").body)
    assert page["data"] == items[3:] and not page["has_more"]
    changed = office.ask("POST", f"/v1/conversations/{id}", {"metadata": {"topic": "none"}})
    assert orjson.loads(changed.body)["metadata"] == {"topic": "none"}
    added = {"items": [{"role": "user", "content": "More."}]}
    assert len(orjson.loads(office.ask("POST", f"/v1/conversations/{id}/items", added).body)["data"]) == 1
    assert office.ask("DELETE", f"/v1/conversations/{id}").status == 200
    assert office.ask("GET", f"/v1/conversations/{id}").error["code"] == "conversation_not_found"
    assert office.refused(400, input="?", conversation=id)["code"] == "conversation_not_found"


@pytest.mark.parametrize("change", ["add", "metadata", "remove"])
def test_a_conversation_that_is_changed_keeps_its_items(office: Office, change: str) -> None:
    """Each item expired for itself, though the conversation lived on, unless a response used it."""
    given = [{"id": f"msg_{name}", "role": "user", "content": name} for name in "ab"]
    path = f"/v1/conversations/{orjson.loads(office.ask('POST', '/v1/conversations', {'items': given}).body)['id']}"
    buckets = [office.run(office.broker.bucket(name)) for name in (RESPONSES, OBJECT_DATA)]
    head = f"default.{path.rpartition('/')[2]}"
    entry = office.run(buckets[0].get(head))
    assert entry is not None
    old = orjson.loads(entry.value) | {"created_at": 0}
    office.run(buckets[0].put(head, orjson.dumps(old)))
    before = [(bucket, entry) for bucket in buckets for entry in office.run(bucket.entries())]
    more = {"items": [{"id": "msg_c", "role": "user", "content": "c"}]}
    method, where, body = {
        "add": ("POST", "/items", more),
        "metadata": ("POST", "", {"metadata": {}}),
        "remove": ("DELETE", "/items/msg_a", None),
    }[change]
    assert office.ask(method, path + where, body).status == 200
    for bucket, entry in before:  # as if they had expired
        now = office.run(bucket.get(entry.key))
        if now is not None and now.revision == entry.revision:
            office.run(bucket.delete(entry.key))
    kept = orjson.loads(office.ask("GET", f"{path}/items?order=asc").body)["data"]
    assert "".join(item["id"][-1] for item in kept) == {"add": "abc", "metadata": "ab", "remove": "b"}[change]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_page_of_a_conversation_begins_behind_an_item_that_was_deleted(office: Office, order: str) -> None:
    """Whoever deletes what it has seen, page by page, sees each item once; ids of clients tell no time."""
    given = [{"id": f"msg_{name}", "role": "user", "content": name} for name in "cabed"]
    conversation = orjson.loads(office.ask("POST", "/v1/conversations", {"items": given}).body)
    path = f"/v1/conversations/{conversation['id']}/items"
    seen: list[str] = []
    for after in ("", *(f"&after=msg_{name}" for name in ("cabed" if order == "asc" else "debac"))):
        page = orjson.loads(office.ask("GET", f"{path}?order={order}&limit=1{after}").body)
        for item in page["data"]:
            seen.append(item["id"])
            assert office.ask("DELETE", f"{path}/{item['id']}").status == 200
        assert page["has_more"] is (len(seen) < len(given))
    assert seen == [item["id"] for item in (given if order == "asc" else given[::-1])]
    assert orjson.loads(office.ask("GET", path).body)["data"] == []
    assert office.ask("GET", f"{path}?after=msg_none").status == 400


def test_an_item_can_be_referred_to(office: Office) -> None:
    made = office.create("Blue.", input="A colour?")
    office.create(
        "Yes.", input=[{"type": "item_reference", "id": made["output"][0]["id"]}, {"role": "user", "content": "Sure?"}]
    )
    assert "Blue." in office.model.asked[-1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {
                "tools": [
                    {"type": "web_search"},
                    {
                        "type": "custom",
                        "name": "c",
                        "format": {"type": "grammar", "syntax": "regex", "definition": "("},
                    },
                ]
            },
            "tools[1].format",
        ),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "n", "tools": [WEATHER, WEATHER | {"name": "f", "strict": True}]},
                    WEATHER | {"name": "g"},
                ]
            },
            "tools[0].tools[1].parameters.additionalProperties",
        ),
        (
            {
                "tools": [WEATHER | {"name": "g"}, WEATHER | {"parameters": {"type": "odd"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "weather"}],
                },
            },
            "tools[1].parameters.type",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}},
            "text.format.schema.type",
        ),
        ({"input": "word " * 4000}, "input"),
    ],
)
def test_a_refusal_names_the_parameters_of_the_response(office: Office, body: dict[str, Any], param: str) -> None:
    refused = office.refused(400, **{"input": "Go."} | body)
    assert refused["param"] == param
    if param != "input":  # a prompt that is too long is counted
        assert refused["message"].startswith(f"{param}: ")
        counted = office.ask("POST", "/v1/responses/input_tokens", {"model": "echo", "input": "Go."} | body)
        assert counted.error["param"] == param


def test_nothing_is_kept_of_what_shall_not_be(office: Office) -> None:
    before = office.kept()
    made = office.create(call("add", a=1, b=1), "2.", input="1 + 1?", tools=functions(), store=False)
    assert office.ask("GET", f"/v1/responses/{made['id']}").status == 404
    assert office.kept() == before
    assert office.refused(404, input="?", previous_response_id=made["id"])["code"] == "previous_response_not_found"


def test_a_response_is_forgotten(office: Office) -> None:
    made = office.create(call("add", a=1, b=1), "2.", input="1 + 1?", tools=functions())
    items = orjson.loads(office.ask("GET", f"/v1/responses/{made['id']}/input_items").body)
    assert [item["content"][0]["text"] for item in items["data"]] == ["1 + 1?"]
    assert orjson.loads(office.ask("DELETE", f"/v1/responses/{made['id']}").body)["deleted"] is True
    assert not [key for key in office.kept() if made["id"] in key]
    for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
        assert office.ask(method, f"/v1/responses/{made['id']}{path}").error["code"] == "response_not_found"


def test_in_the_background(office: Office) -> None:
    office.model.texts = [call("wait", name="it"), "Done."]
    body = {"model": "echo", "input": "Go.", "tools": functions(), "background": True}
    begun = orjson.loads(office.ask("POST", "/v1/responses", body).body)
    assert (begun["status"], begun["output"]) == ("queued", [])

    async def follow() -> Response:
        async with asyncio.timeout(30):
            await office.waiting.acquire()
        office.goes.set()
        return await ask(office.apps[1], "GET", f"/v1/responses/{begun['id']}?stream=true")

    made = check_responses(office.run(follow()).body)
    assert (made["status"], said(made)) == ("completed", "Done.")


def test_a_response_is_cancelled_in_the_middle_of_a_call(office: Office) -> None:
    office.model.texts = [call("wait", name="it"), "Never."]
    body = {"model": "echo", "input": "Go.", "tools": functions(), "background": True}
    begun = orjson.loads(office.ask("POST", "/v1/responses", body).body)

    async def cancel() -> Response:
        async with asyncio.timeout(30):
            await office.waiting.acquire()
            return await ask(office.apps[1], "POST", f"/v1/responses/{begun['id']}/cancel")

    made = orjson.loads(office.run(cancel()).body)
    assert made["status"] == office.stored(begun["id"])["status"] == "cancelled"
    again = office.ask("POST", f"/v1/responses/{begun['id']}/cancel")
    assert orjson.loads(again.body)["status"] == "cancelled"
    assert len(office.model.asked) == 1
    stream = office.ask("GET", f"/v1/responses/{begun['id']}?stream=true")
    assert check_responses(stream.body)["status"] == "cancelled"


def test_what_has_ended_cannot_be_cancelled(office: Office) -> None:
    made = office.create("Done.", input="Go.")
    refused = office.ask("POST", f"/v1/responses/{made['id']}/cancel")
    assert (refused.status, refused.error["code"]) == (400, "response_over")
    assert office.stored(made["id"])["status"] == "completed"


FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def test_the_tokens_of_an_input_are_counted_as_a_response_counts_them(office: Office) -> None:
    """LiteLLM's proxy and pydantic-ai count them before they ask."""
    first = office.create("Hello.", input="Say hello.")
    kept = office.ask("POST", "/v1/conversations", {"items": [{"role": "user", "content": "It is late."}]})
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "?"}]
    counts = []
    for asked in (
        {"input": "Hi"},
        {"input": "Hi", "instructions": "Be kind."},
        {"input": said},
        {"input": "Hi", "tools": [FUNCTION]},
        {"input": "Hi", "previous_response_id": first["id"]},
        {"input": "Hi", "conversation": orjson.loads(kept.body)["id"]},
    ):
        answer = office.ask("POST", "/v1/responses/input_tokens", {"model": "echo", **asked}, app=1)
        assert answer.status == 200, answer.body
        counted = orjson.loads(answer.body)
        assert counted["object"] == "response.input_tokens"
        assert office.create("Yes.", **asked)["usage"]["input_tokens"] == counted["input_tokens"]
        counts.append(counted["input_tokens"])
    assert min(counts[1:]) > counts[0]


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": "Hi", "model": "nobody"}, 404, "model"),
        ({"input": "Hi", "previous_response_id": "resp_" + "0" * 32}, 404, "previous_response_id"),
        ({"input": "Hi", "tools": [{"type": "mcp", "server_label": "everything"}]}, 400, "tools"),
    ],
)
def test_what_no_response_can_be_made_of_is_not_counted(
    office: Office, asked: dict[str, Any], status: int, param: str
) -> None:
    refused = office.ask("POST", "/v1/responses/input_tokens", {"model": "echo", **asked})
    assert (refused.status, refused.error["param"]) == (status, param)


def test_responses_are_not_compacted(office: Office) -> None:
    refused = office.ask("POST", "/v1/responses/compact", {"model": "echo", "input": []})
    assert refused.status == 404 and "does not compact" in refused.error["message"]


def test_log_probabilities_come_with_their_number_alone(office: Office) -> None:
    for stream in (False, True):
        made = office.create("Yes.", input="?", stream=stream, top_logprobs=2)
        assert made["output"][0]["content"][0]["logprobs"]
        assert office.stored(made["id"])["output"] == made["output"]


def test_a_client_that_leaves_stops_what_is_not_kept(office: Office) -> None:
    office.model.texts = [call("wait", name="it"), "Never."]
    body = {"model": "echo", "input": "Go.", "tools": functions(), "store": False, "stream": True}
    ended = asyncio.Event()

    def hear(message: Message) -> None:
        event = codec.decode_event(message.data)
        if isinstance(event, Cancelled) and is_response(event.request):
            ended.set()

    async def leave() -> None:
        await office.broker.listen(f"{office.pipeline.pipe.subjects.root}.events.>", hear)
        await ask(office.apps[0], "POST", "/v1/responses", body, leave_after=1)
        async with asyncio.timeout(30):
            await ended.wait()

    office.run(leave())
    assert len(office.model.asked) <= 1


def test_the_same_key_is_the_same_response(office: Office) -> None:
    key = {"Idempotency-Key": "once"}
    made = office.create(call("add", a=1, b=1), "2.", input="1 + 1?", tools=functions(), headers=key)
    again = office.create(input="1 + 1?", tools=functions(), headers=key, app=1)
    assert again["id"] == made["id"] and again["output"] == made["output"]
    assert office.done == [("add", 1, 1)]


def test_a_step_told_twice_is_taken_once(office: Office) -> None:
    made = office.create(call("add", a=1, b=1), "2.", input="1 + 1?", tools=functions())
    step = Step(id=made["id"], turn=f"{made['id']}-1", tenant="default", bridge="test")
    subjects = office.pipeline.pipe.subjects

    async def again() -> None:
        data, headers = codec.encode(step), {"Penstock-Schema": codec.STEP}
        await office.broker.publish(subjects.tools("normal", "default"), data, message_id="again", headers=headers)

    office.run(again())
    more = office.create(call("add", a=2, b=2), "4.", input="2 + 2?", tools=functions())  # steps are taken in order
    assert said(more) == "4."
    office.done.pop()
    assert office.done == [("add", 1, 1)]
    assert office.stored(made["id"])["output"] == made["output"]


@pytest.mark.parametrize(("name", "times"), [("add", 0), ("look", 1)])
def test_a_call_whose_process_died_is_made_again_only_where_that_is_harmless(
    office: Office, name: str, times: int
) -> None:
    """Whoever claimed it is gone, and left no result; two copies come upon it, one of them twice."""
    arguments = {"a": 1, "b": 1} if name == "add" else {"name": "it"}

    async def main() -> list[ToolResult]:
        registry, log = office.pipeline.pipe.registry, await ResponseLog.of(office.broker)
        cards = [StageCard(stage="tools", id=f"other{copy}", pid=1) for copy in range(2)]
        for card in cards:
            await registry.announce_stage(card)
        await registry.refresh()
        place = CallKey("default", name, 1, 0)
        await log.claim(place, "elsewhere 999999")
        source = Source(label="functions")
        found = next(one for one in await office.toolbox.tools(source) if one.tool == name)
        copies = [Calls(office.pipeline.pipe, office.toolbox, log, card.id) for card in cards]
        given = orjson.dumps(arguments).decode()
        results = await asyncio.gather(*(copy._make(place, source, found, given) for copy in copies + copies[:1]))
        for card in cards:
            await registry.withdraw(card)
        return results

    results = office.run(main())
    assert len(office.done) == times
    assert results == results[:1] * 3
    assert (results[0] == UNKNOWN) is (times == 0)


def test_the_first_result_of_a_call_that_was_taken_over_stands(office: Office) -> None:
    async def main() -> list[ToolResult]:
        log, place = await ResponseLog.of(office.broker), CallKey("default", "taken-over", 1, 0)
        theirs = await log.claim(place, "t0")
        ours = await log.take_over(place, theirs, "t1")
        assert ours is not None and await log.take_over(place, theirs, "t2") is None
        return [
            await log.settle(place, theirs, ToolResult("first")),
            await log.settle(place, ours, ToolResult("second")),
        ]

    assert office.run(main()) == [ToolResult("first")] * 2


def test_without_the_stage_nothing_is_begun(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    # The cards themselves come back with each heartbeat.
    monkeypatch.setattr(office.pipeline.pipe.registry, "missing", lambda stages: [*stages])
    assert office.refused(503, input="Go.")["code"] == "no_tools_stage"


def test_the_deadline_ends_a_call(office: Office) -> None:
    office.create("Yes.", input="Go.", tools=functions())  # what is imported for the first request takes time
    made = office.create(call("wait", name="it"), input="Go.", tools=functions(), timeout=1.5)
    assert made["status"] == office.stored(made["id"])["status"] == "failed"
    assert "deadline" in made["error"]["message"]


def test_what_was_said_until_the_deadline_stays(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    office.create("Yes.", input="Go.")
    step, steps = office.model.step, count()

    def slow_step() -> list[Delta]:
        if next(steps) > 20:  # so that the deadline comes in the turn
            time.sleep(0.05)
        return step()

    monkeypatch.setattr(office.model, "step", slow_step)
    made = office.create("word " * 1500, input="Go.", timeout=3.0)
    kept = office.stored(made["id"])
    assert (made["status"], made["error"]["message"]) == ("failed", "The deadline passed in a turn.")
    (message,) = kept["output"]
    assert message == made["output"][0] and message["status"] == "incomplete"
    assert message["content"][0]["text"].startswith("word word") and kept["usage"]["output_tokens"] > 1


def test_a_refusal_of_the_first_turn_has_its_status_and_leaves_nothing(office: Office) -> None:
    before = office.kept()
    for way in ({}, {"stream": True}, {"background": True}):
        assert office.refused(400, input="x " * 9000, **way)["code"] == "context_length_exceeded"
    assert office.refused(404, input="Hi.", model="none")["code"] == "model_not_found"
    assert office.kept() == before


def test_a_refusal_after_the_first_turn_was_accepted_is_told_to_whoever_has_its_id(runner: asyncio.Runner) -> None:
    office = Office(runner)
    pipe = office.pipeline.pipe
    try:
        office.run(office.pipeline.lose_worker())
        answer = office.ask("POST", "/v1/responses", {"model": "echo", "input": "Go.", "background": True})
        begun = orjson.loads(answer.body)
        assert begun["status"] == "queued"

        async def refuse() -> Response:
            refusal = ModelRefusal(reason="The model is broken.", at=pipe.now() + 1.0)
            await pipe.registry.refuse_model("echo", 1, refusal)
            async with asyncio.timeout(60):
                return await ask(office.apps[1], "GET", f"/v1/responses/{begun['id']}?stream=true")

        made = check_responses(office.run(refuse()).body)
        assert made["status"] == office.stored(begun["id"])["status"] == "failed"
        assert "The model is broken." in made["error"]["message"]
    finally:
        office.close()


@pytest.mark.parametrize(("label", "fits"), [("everything", True), ("functions", False)])
def test_a_job_has_the_tools_of_its_tenant(office: Office, label: str, fits: bool) -> None:
    async def final() -> Event | None:
        bridge, id = office.pipeline.bridge, f"resp_{uuid.uuid4().hex}"
        body = {"model": "echo", "input": "x", "tools": server(label)}
        job = Job(id=id, endpoint="/v1/responses", bridge=bridge.name, body=body)
        reading = await bridge.open(job, priority="normal", tenant="stranger")
        while not reading.ended:
            await reading.take(FOR_EVER)
        return reading.final

    office.model.texts = ["done"]
    match office.run(final()):
        case Failed(error=error):
            assert not fits and "This tenant may not use" in error.message
        case other:
            assert fits and isinstance(other, Done)

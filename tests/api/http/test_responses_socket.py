"""Responses over a WebSocket, by OpenAI's own client and by one that speaks for itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import requests
from applications import Script
from http_server import Server, request
from openai.resources.responses.responses import ResponsesConnection
from serving import Served
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock.api.http.answers import EventStream
from penstock.api.http.responses_socket import MAX_WAITING
from penstock.schemas.events import Accepted, Queued
from penstock.schemas.registry import StageCard

ENDS = ("response.completed", "response.incomplete", "response.failed", "response.steer.failed", "error")
LIMIT = 10_000  # bytes of a body
Events = list[Any]


@pytest.fixture
def socket(echo_server: Served) -> Iterator[ResponsesConnection]:
    with openai.OpenAI(base_url=f"{echo_server.url}/v1", api_key="none").responses.connect() as socket:
        yield socket


def events(socket: ResponsesConnection, answers: int = 1) -> Events:
    """Up to the last event of so many answers."""
    found: Events = []
    for event in socket:
        found.append(event)
        answers -= event.type in ENDS
        if not answers:
            break
    return found


def create(socket: ResponsesConnection, input: Any = "hello", **body: Any) -> Events:
    socket.send({"type": "response.create", "model": "echo", "input": input, **body})  # type: ignore[arg-type]
    return events(socket)


def test_the_events_are_those_of_a_stream(echo_server: Served, socket: ResponsesConnection) -> None:
    over_http = requests.post(
        f"{echo_server.url}/v1/responses", json={"model": "echo", "input": "hello", "stream": True}, timeout=60
    )
    named = [line.removeprefix("event: ") for line in over_http.text.splitlines() if line.startswith("event: ")]
    found = create(socket)
    assert {event.type for event in found} == {*named}
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert (
        "".join(event.delta for event in found if event.type.endswith("text.delta")) == found[-1].response.output_text
    )
    stored = requests.get(f"{echo_server.url}/v1/responses/{found[-1].response.id}", timeout=60).json()
    assert stored["output"][0]["content"][0]["text"] == found[-1].response.output_text


@pytest.mark.parametrize("store", [True, False])
def test_a_response_is_followed_up_whether_it_is_stored_or_not(socket: ResponsesConnection, store: bool) -> None:
    before = create(socket, "one", store=store)[-1].response
    second = create(socket, [{"role": "user", "content": "two"}], store=store, previous_response_id=before.id)
    assert {event.response.previous_response_id for event in second if hasattr(event, "response")} == {before.id}
    third = create(socket, "three", store=False, previous_response_id=second[-1].response.id)[-1].response
    whole = [
        {"role": role, "content": text}
        for asked, response in (("one", before), ("two", second[-1].response))
        for role, text in (("user", asked), ("assistant", response.output_text))
    ]
    alone = create(socket, [*whole, {"role": "user", "content": "three"}])[-1].response
    assert third.usage.input_tokens == alone.usage.input_tokens > before.usage.input_tokens
    assert third.output_text == alone.output_text


def test_another_connection_knows_what_is_stored_alone(echo_server: Served, socket: ResponsesConnection) -> None:
    kept, stored = (create(socket, store=store)[-1].response.id for store in (False, True))
    with openai.OpenAI(base_url=f"{echo_server.url}/v1", api_key="none").responses.connect() as other:
        (refused,) = create(other, previous_response_id=kept)
        assert (refused.status, refused.error.code) == (404, "previous_response_not_found")
        assert create(other, previous_response_id=stored)[-1].type == "response.completed"


def test_a_request_is_prepared_and_generates_nothing(echo_server: Served, socket: ResponsesConnection) -> None:
    created, prepared = create(socket, "one", generate=False, instructions="Be brief.", tools=[{"type": "mcp"}])
    assert (created.type, created.response.status) == ("response.created", "in_progress")
    assert (prepared.response.status, prepared.response.output) == ("completed", [])
    fork = create(socket, "two", previous_response_id=prepared.response.id)[-1].response
    alone = create(socket, [{"role": "user", "content": text} for text in ("one", "two")])[-1].response
    assert fork.usage.input_tokens == alone.usage.input_tokens
    (refused,) = create(socket, "one", generate=False, temperature=9)
    assert (refused.status, refused.error.param) == (400, "temperature")
    assert create(socket, [], generate=False)[-1].type == "response.completed"
    assert create(socket, "one", generate=None)[-1].response.output


def test_lanes_are_answered_beside_each_other_and_each_in_order(socket: ResponsesConnection) -> None:
    body = {"type": "response.create", "model": "echo", "max_output_tokens": 300}
    for lane, text in (("a", "first " * 50), ("a", "second"), ("b", "third " * 50)):
        socket.send({**body, "input": text, "stream_id": lane})  # type: ignore[arg-type]
    found = events(socket, 3)
    texts = {
        lane: [
            event.response.output_text.split()[1] for event in found if event.type in ENDS and event.stream_id == lane
        ]
        for lane in "ab"
    }
    assert texts == {"a": ["first", "second"], "b": ["third"]}
    of_b = [place for place, event in enumerate(found) if event.stream_id == "b"]
    of_a = [place for place, event in enumerate(found) if event.stream_id == "a"]
    assert min(of_b) < max(of_a) and min(of_a) < max(of_b)


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"temperature": 9}, 400, "invalid_value"),
        ({"input": []}, 400, "missing_required_parameter"),
        ({"type": "session.update"}, 400, "unknown_event"),
        ({"background": True}, 400, "invalid_value"),
        ({"stream": False}, 400, "invalid_value"),
        ({"generate": 1}, 400, "invalid_value"),
        ({"stream_id": 1}, 400, "invalid_value"),
        ({"previous_response_id": 3}, 400, "invalid_type"),
        ({"previous_response_id": ["x"]}, 400, "invalid_type"),
    ],
)
def test_what_is_refused_says_why_and_the_next_one_is_answered(
    socket: ResponsesConnection, fault: dict[str, Any], status: int, code: str
) -> None:
    (refused,) = create(socket, **fault)
    assert (refused.type, refused.status, refused.error.code) == ("error", status, code)
    assert refused.error.message
    assert create(socket)[-1].type == "response.completed"


def test_what_is_ignored_is_named(socket: ResponsesConnection) -> None:
    created, *_ = create(socket, colour="blue")
    assert created.penstock_ignored == "colour"


def test_a_running_response_is_not_steered(socket: ResponsesConnection) -> None:
    socket.response.steer(previous_response_id="resp_1", input="stop")
    (failed,) = events(socket)
    assert failed.error.code == "steering_not_supported"
    assert failed.steer.input == "stop"


# Of the connection


@contextlib.asynccontextmanager
async def opened(server: Server, **given: Any) -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/responses", proxy=None, **given) as socket:
        yield socket


async def told(socket: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await socket.recv())
    return found


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer sk-wrong-0123456789"}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer sk-0123456789", "Origin": "https://evil.example.org"}, 403, "foreign_origin"),
        ({"Authorization": "Bearer sk-0123456789", "Sec-Fetch-Site": "cross-site"}, 403, "foreign_origin"),
        ({"Authorization": "Bearer sk-0123456789", "Idempotency-Key": "k"}, 400, "invalid_value"),
    ],
)
async def test_a_handshake_is_refused_as_a_request_would_be(
    caplog: pytest.LogCaptureFixture, headers: dict[str, str], status: int, code: str
) -> None:
    async with Server.run(api_keys=["acme=sk-0123456789"]) as server:
        with pytest.raises(InvalidStatus) as refused:
            async with opened(server, additional_headers=headers):
                pass
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["code"] == code
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_each_message_is_judged_like_a_request() -> None:
    """Nothing runs responses here: so the key was good, and the refusal tells when to come back."""
    key = {"Authorization": "Bearer sk-0123456789"}
    async with Server.run(api_keys=["acme=sk-0123456789"]) as server, opened(server, additional_headers=key) as socket:
        for text, code in (
            ('{"type": "response.create", "input": "x"}', "no_tools_stage"),
            ("{", "invalid_json"),
            (b"[1]", "invalid_type"),
            ("[" * 200 + "]" * 200, "invalid_json"),
        ):
            await socket.send(text)
            error = (await told(socket))["error"]
            assert error["code"] == code
            assert error["message"].startswith("The message ") is (code != "no_tools_stage")
        await socket.send('{"type": "response.create", "input": "x"}')
        refused = await told(socket)
        assert (refused["status"], refused["error"]["headers"]["retry-after"]) == (503, "2")


async def running(server: Server) -> Script:
    """A pipeline that takes what it is asked, and answers nothing."""
    await server.script.registry.announce_stage(StageCard(stage="tools", id="t0", pid=1))
    await server.script.registry.refresh()
    return server.script


async def test_what_keeps_a_stream_open_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    pinged, ping = asyncio.Semaphore(0), EventStream._ping

    def counted(stream: EventStream) -> bytes:
        pinged.release()
        return ping(stream)

    monkeypatch.setattr(EventStream, "_ping", counted)
    async with Server.run(keepalive_interval=0.02) as server, opened(server) as socket:
        script = await running(server)
        await socket.send('{"type": "response.create", "model": "echo", "input": "x", "store": false}')
        await script.tell([Accepted("", "echo", 7, 9), Queued("", 1)], await script.job())
        async with asyncio.timeout(30):
            for _ in range(2):
                await pinged.acquire()
        await socket.send("{")
        while (found := await told(socket))["type"] != "error":
            assert found["type"].startswith("response.")
        assert found["error"]["code"] == "invalid_json"


async def test_no_more_messages_wait_than_may() -> None:
    async with Server.run() as server, opened(server) as socket:
        await running(server)
        for _ in range(MAX_WAITING + 1):
            await socket.send('{"type": "response.create", "model": "echo", "input": "x", "store": false}')
        refused = await told(socket)
        assert (refused["status"], refused["error"]["code"]) == (429, "too_many_messages")


@pytest.mark.parametrize("store", [False, True])
async def test_a_client_that_leaves_cancels_what_is_not_stored(store: bool) -> None:
    cancelled = asyncio.Event()
    async with Server.run() as server:
        script = await running(server)
        await script.broker.listen(script.subjects.cancel_all(), lambda message: cancelled.set())
        async with opened(server) as socket:
            await socket.send(json.dumps({"type": "response.create", "model": "echo", "input": "x", "store": store}))
            await script.job()
        if not store:
            async with asyncio.timeout(30):
                await cancelled.wait()
    assert cancelled.is_set() is not store


async def test_a_message_is_no_larger_than_a_body() -> None:
    async with Server.run(max_body_size=LIMIT) as server, opened(server) as socket:
        await socket.send(json.dumps({"type": "response.create", "input": "x" * (LIMIT - 100)}))
        assert (await told(socket))["error"]["code"] == "no_tools_stage"
        await socket.send("x" * (LIMIT + 1))
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


async def test_a_connection_may_be_silent_for_longer_than_a_head() -> None:
    async with Server.run(header_timeout=1.5) as server, opened(server) as socket:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await socket.recv()
        await socket.send("{}")
        assert (await told(socket))["error"]["code"] == "unknown_event"


async def test_a_connection_counts_until_it_ends() -> None:
    wires = []
    async with Server.run(max_connections_per_address=2) as server:
        for _ in range(3):
            async with opened(server), opened(server):
                wires.append(await server.wire())
                await wires[-1].send(request("GET", "/health/live"))
                assert (await wires[-1].response()).status == 503
            async with asyncio.timeout(30):
                while True:  # the server may hear of the end a little later
                    wires.append(await server.wire())
                    await wires[-1].send(request("GET", "/health/live", Connection="close"))
                    if (await wires[-1].response()).status == 200:
                        break


OFFER = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "x" * 22 + "==",
}


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"Cookie": "x" * 9000}, 101),
        ({f"X-{number}": "x" for number in range(200)}, 101),
        ({"Content-Length": "2"}, 405),
        ({"Sec-WebSocket-Protocol": "x" * 9000}, 400),
        ({"Cookie": "x" * 70_000}, 431),
    ],
)
async def test_a_handshake_has_the_limits_of_a_request(given: dict[str, str], status: int) -> None:
    async with Server.run() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("GET", "/v1/responses", **OFFER, **given) + b"{}")
        async with asyncio.timeout(30):
            assert f" {status} ".encode() in await reader.readline()
        writer.close()


async def test_what_comes_directly_behind_a_handshake_is_read_once_it_is_accepted() -> None:
    async with Server.run() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(2 * request("GET", "/v1/responses", **OFFER))
        async with asyncio.timeout(30):
            told = await reader.read()
        assert b" 101 " in told and told.endswith(b"invalid opcode")
        writer.close()


async def test_many_pings_delay_no_other_client() -> None:
    pings = 10_000
    async with Server.run() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("GET", "/v1/responses", **OFFER))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(pings * b"\x89\x80abcd")
        answered = asyncio.create_task(reader.readexactly(2 * pings))
        other = await server.wire()
        for _ in range(3):
            await other.send(request("GET", "/health/live"))
            assert (await other.response()).status == 200
        assert not answered.done()
        answered.cancel()
        await asyncio.wait([answered])
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_client_that_answers_no_ping_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from uvicorn import Config

    monkeypatch.setattr(Config, "__init__", _impatient(Config.__init__))
    async with Server.run(keepalive_interval=0.05) as server:
        wire = await server.wire()
        offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        await wire.send(request("GET", "/v1/responses", Sec_WebSocket_Key="x" * 22 + "==", **offer))
        async with asyncio.timeout(30):
            assert b" 101 " in await wire.ended()


def _impatient(init: Any) -> Any:
    def changed(config: Any, *given: Any, **named: Any) -> None:
        init(config, *given, **named, ws_ping_timeout=0.05)

    return changed


async def test_a_server_that_stops_says_so() -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server.run())
        async with opened(server) as socket:
            await stack.aclose()
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012

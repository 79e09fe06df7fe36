"""Sessions in process and over HTTP: turns are taken, tools are run here, and what goes wrong is told."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import uvicorn
from mcp_servers import CLOCK, mcp_server
from shop import CALLS, WISH
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.library import session as session_module
from penstock.api.library.adapter import OpenAIAdapter
from penstock.api.library.session import TRIES, ResponsesSession
from penstock.api.tools.functions import tool
from penstock.api.tools.mcp_config import StdioServer
from penstock.engine import EngineConfig, InferenceEngine
from penstock.schemas.errors import GenerationFailed, InvalidRequest, ToolFailed

ANN = next(iter(CALLS))


class Scripted(OpenAIAdapter):
    """Answers with one message after another, and remembers what it was asked."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.asked: list[dict[str, Any]] = []

    async def acreate(self, body: Mapping[str, Any], endpoint: Any = None) -> dict[str, Any]:
        self.asked.append(json.loads(json.dumps(body)))
        return answer(self.messages.pop(0))

    @property
    def told(self) -> list[str]:
        """The results in the newest request."""
        return [message["content"] for message in self.asked[-1]["messages"] if message["role"] == "tool"]

    @property
    def offered(self) -> list[str]:
        """The tools of the newest request."""
        return [one["function"]["name"] for one in self.asked[-1].get("tools", ())]


def answer(message: dict[str, Any]) -> dict[str, Any]:
    reason = "tool_calls" if "tool_calls" in message else "stop"
    return {"choices": [{"message": {"role": "assistant", "content": None, **message}, "finish_reason": reason}]}


def calling(*calls: tuple[str, Any]) -> dict[str, Any]:
    """A message with these calls; a text stands for arguments as they are."""
    return {
        "tool_calls": [
            {
                "id": f"call_{place}",
                "type": "function",
                "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
            }
            for place, (name, given) in enumerate(calls)
        ]
    }


def saying(text: str) -> dict[str, Any]:
    return {"content": text}


@tool
def double(n: int) -> int:
    """Doubles."""
    return 2 * n


@tool
def add(a: int, b: int) -> str:
    """Adds, in words."""
    return f"{a} and {b} are {a + b}"


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(model="penstock-nano", dtype="float32")) as engine:
        yield engine


@pytest.mark.parametrize("adapted", [False, True])
async def test_the_model_in_the_box_does_a_task_of_three_calls(engine: InferenceEngine, adapted: bool) -> None:
    called: list[tuple[str, str]] = []

    @tool(description="Find a customer")
    def find_customer(email: str) -> dict[str, str]:
        called.append(("find_customer", email))
        return {"customer_id": "C-481"}

    @tool(description="Get an order")
    async def get_order(customer_id: str) -> dict[str, str]:
        called.append(("get_order", customer_id))
        return {"order_id": "7302"}

    @tool(description="Get a price")
    def get_price(order_id: str) -> dict[str, float]:
        called.append(("get_price", order_id))
        return {"price": 12.5}

    model = OpenAIAdapter(engine) if adapted else engine
    functions = [find_customer, get_order, get_price]
    async with ResponsesSession(model, functions=functions, parameters={"temperature": 0}) as session:
        result = await session.run(WISH.format(ANN))
    assert called == CALLS[ANN]
    assert [call.name for call in result.calls] == [name for name, _ in CALLS[ANN]]
    assert (result.turns, result.finish_reason) == (4, "stop")
    assert "12.5" in result.text


@pytest.mark.parametrize("most", [3, 14])
async def test_an_answer_that_was_cut_calls_nothing_and_can_be_followed(engine: InferenceEngine, most: int) -> None:
    """In the text, and in the arguments of a call."""
    called: list[str] = []

    @tool(description="Get a price")
    def get_price(order_id: str) -> None:
        called.append(order_id)

    parameters = {"temperature": 0, "max_tokens": most, "tool_choice": "required"}
    async with ResponsesSession(engine, functions=[get_price], parameters=parameters) as session:
        result = await session.run("Get the price with order id 7302.")
        assert (result.turns, result.finish_reason, result.calls, called) == (1, "length", (), [])
        assert (await session.run("Hello!")).turns == 1


async def test_a_session_goes_on_where_it_was(engine: InferenceEngine) -> None:
    async with ResponsesSession(engine, instructions="Be kind.", parameters={"temperature": 0}) as session:
        first = await session.run("My name is Eva.")
        second = await session.run("What is my name?")
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 2]
    assert "Eva" in second.text
    assert [message["content"] for message in session.messages if message["role"] == "assistant"] == [
        first.text,
        second.text,
    ]


async def test_the_history_has_calls_and_results() -> None:
    model = Scripted(calling(("double", {"n": 4})), saying("8."), saying("It was 8."))
    async with ResponsesSession(model, functions=[double]) as session:
        await session.run("Double 4.")
        again = await session.run("What was it?")
    assert again.calls == ()
    roles = [(message["role"], message.get("content")) for message in model.asked[-1]["messages"]]
    assert roles == [
        ("user", "Double 4."),
        ("assistant", ""),
        ("tool", "8"),
        ("assistant", "8."),
        ("user", "What was it?"),
    ]


async def test_the_last_turn_may_call_nothing() -> None:
    one = calling(("double", {"n": 1}))
    model = Scripted(one, one, saying("Enough."))
    async with ResponsesSession(model, functions=[double], max_turns=3) as session:
        result = await session.run("Go.")
    assert (result.turns, result.text, len(result.calls)) == (3, "Enough.", 2)
    assert [body.get("tool_choice") for body in model.asked] == [None, None, "none"]
    with pytest.raises(InvalidRequest, match="max_turns"):
        ResponsesSession(model, max_turns=0)


@pytest.mark.parametrize("parameters", [{"messages": []}, {"tools": []}, {"n": 2}, {"stream": True}], ids=str)
def test_parameters_that_a_session_sets_itself_are_refused(parameters: dict[str, Any]) -> None:
    (own,) = parameters
    with pytest.raises(InvalidRequest, match=f"{own} has no effect in parameters: ") as refused:
        ResponsesSession(Scripted(), parameters=parameters)
    assert refused.value.param == own
    ResponsesSession(Scripted(), parameters={own: None, "n": 1})
    ResponsesSession(Scripted(), parameters={"stream": False})


async def test_two_runs_at_a_time_do_not_mix_their_messages() -> None:
    @tool
    async def ask_again() -> str:
        """Run the session in its own run."""
        with pytest.raises(RuntimeError, match="one run at a time"):
            await session.run("And?")
        return "refused"

    model = Scripted(calling(("ask_again", {})), saying("One."), saying("Two."))
    async with ResponsesSession(model, functions=[ask_again]) as session:
        assert (await session.run("Go.")).calls[0].result == "refused"
        assert (await session.run("On.")).text == "Two."
    assert "And?" not in str(session.messages)


async def test_a_tool_that_is_not_allowed_is_neither_offered_nor_run() -> None:
    model = Scripted(calling(("add", {"a": 1, "b": 2}), ("double", {"n": 3})), saying("Well."))
    async with ResponsesSession(model, functions=[double, add], allowed_tools=["double"]) as session:
        result = await session.run("Go.")
    assert model.offered == ["double"]
    blocked, done = result.calls
    assert blocked.is_error and "no tool add" in blocked.result
    assert (done.is_error, done.result) == (False, "6")
    assert model.told == [blocked.result, "6"]


async def test_bad_arguments_and_unknown_tools_are_told_to_the_model() -> None:
    model = Scripted(calling(("double", '{"n": '), ("double", {"n": "x"}), ("treble", {})), saying("I see."))
    async with ResponsesSession(model, functions=[double]) as session:
        result = await session.run("Go.")
    assert [call.is_error for call in result.calls] == [True] * 3
    assert ["JSON" in model.told[0], "wrong" in model.told[1], "treble" in model.told[2]] == [True] * 3


async def test_calls_of_one_turn_run_at_once_and_are_answered_in_their_order() -> None:
    first_may_end = asyncio.Event()

    @tool
    async def slow() -> str:
        await first_may_end.wait()
        return "slow"

    @tool
    async def fast() -> str:
        first_may_end.set()
        return "fast"

    model = Scripted(calling(("slow", {}), ("fast", {})), saying("Both."))
    async with asyncio.timeout(30), ResponsesSession(model, functions=[slow, fast]) as session:
        result = await session.run("Go.")
    assert model.told == [call.result for call in result.calls] == ["slow", "fast"]
    assert [message.get("tool_call_id") for message in session.messages if message["role"] == "tool"] == [
        "call_0",
        "call_1",
    ]


async def test_servers_may_have_tools_of_the_same_name() -> None:
    async with mcp_server() as one, mcp_server(token="Bearer let-me-in-please") as two:
        model = Scripted(calling(("a__add", {"a": 1, "b": 2}), ("functions__add", {"a": 1, "b": 2})), saying("Well."))
        async with ResponsesSession(model, servers={"a": one.url}, functions=[add, double]) as session:
            result = await session.run("Go.")
        assert {"a__add", "functions__add", "double", "slow"} < set(model.offered)
        assert "add" not in model.offered
        assert [call.result for call in result.calls] == ["3", "1 and 2 are 3"]
        assert one.calls == ["add"]
        async with ResponsesSession(Scripted(), servers={"b": two.url}) as session:
            with pytest.raises(ToolFailed, match="401"):
                await session.run("Go.")


async def test_a_server_that_goes_away_is_told_to_the_model() -> None:
    async with mcp_server() as server:
        model = Scripted(calling(("add", {"a": 1, "b": 2})), calling(("add", {"a": 1, "b": 2})), saying("Well."))
        async with ResponsesSession(model, servers={"desk": server.url}, max_turns=3) as session:
            model.messages.insert(1, saying("3."))
            assert (await session.run("Go.")).calls[0].result == "3"
            await server.stop()
            (call,) = (await session.run("Again.")).calls
            await server.start()
        assert call.is_error and "desk could not run add" in call.result


async def test_what_goes_wrong_with_the_time_server_of_pypi() -> None:
    tokyo, mars = (("get_current_time", {"timezone": name}) for name in ("Asia/Tokyo", "Mars/Base"))
    first = calling(tokyo, mars, ("get_current_time", {}), ("set_time", {}))
    model = Scripted(first, saying("I see."), calling(tokyo), calling(tokyo), saying("Well."))
    async with ResponsesSession(model, servers={"clock": StdioServer(command=CLOCK)}) as session:
        told = (await session.run("Go.")).calls
        assert model.offered == ["get_current_time", "convert_time"]
        assert [call.is_error for call in told] == [False, True, True, True]
        for call, said in zip(
            told, ['"timezone": "Asia/Tokyo"', "Mars/Base", "'timezone' is a required", "no tool set_time"], strict=True
        ):
            assert said in call.result
        (child,) = [one for one in psutil.Process().children() if CLOCK in one.cmdline()]
        child.kill()
        gone, back = (await session.run("And now?")).calls
    assert gone.is_error and "clock could not run get_current_time: the connection broke" in gone.result
    assert not back.is_error and "Asia/Tokyo" in back.result


class Remote:
    """A server that gives one answer after another and remembers the requests."""

    def __init__(self, *answers: ASGIApp) -> None:
        self.answers = list(answers)
        self.keys: list[str | None] = []
        self.bodies: list[Any] = []
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        self.keys.append(request.headers.get("idempotency-key"))
        self.bodies.append(await request.json())
        await self.answers.pop(0)(scope, receive, send)


async def half(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer that breaks off."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})


@asynccontextmanager
async def remote(*answers: ASGIApp) -> AsyncIterator[Remote]:
    app = Remote(*answers)
    listener = socket.create_server(("127.0.0.1", 0))
    app.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    try:
        yield app
    finally:
        await server.shutdown([listener])


def refusal(status: int, message: str, **headers: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": "x", "param": "y"}}, status, headers)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits before it is tried again."""
    monkeypatch.setattr(session_module, "PAUSE", 0.0)


@pytest.mark.usefixtures("at_once")
async def test_a_server_that_breaks_off_or_has_no_room_is_asked_again() -> None:
    busy = refusal(503, "Too much.", **{"Retry-After": "0"})
    later = refusal(429, "Too much.", **{"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"})
    async with (
        remote(half, busy, later, JSONResponse(answer(saying("Here I am.")))) as server,
        ResponsesSession(server.url, name="m", parameters={"seed": 1}) as session,
    ):
        result = await session.run("Are you there?")
    assert result.text == "Here I am."
    assert len(server.keys) == 4 and len(set(server.keys)) == 1 and server.keys[0]
    assert server.bodies[0]["model"] == "m" and server.bodies[0]["seed"] == 1


@pytest.mark.usefixtures("proxied")
async def test_a_server_on_this_machine_is_asked_without_a_proxy() -> None:
    async with (
        remote(JSONResponse(answer(saying("Here.")))) as server,
        ResponsesSession(server.url, name="m") as session,
    ):
        assert (await session.run("Are you there?")).text == "Here."


async def test_a_server_that_never_has_room_is_told() -> None:
    async with remote(*[refusal(503, "No room.", **{"Retry-After": "0"})] * 10) as server:
        async with ResponsesSession(f"{server.url}/v1/", name="m") as session:
            with pytest.raises(GenerationFailed, match=r"No room\."):
                await session.run("Are you there?")
        assert len(server.keys) == TRIES


async def test_a_refusal_is_told_at_once() -> None:
    async with (
        remote(refusal(404, "There is no model m.")) as server,
        ResponsesSession(server.url, name="m", api_key="k") as session,
    ):
        with pytest.raises(InvalidRequest, match="no model m") as told:
            await session.run("Are you there?")
        assert (told.value.code, told.value.param) == ("x", "y")
        assert session.messages == [{"role": "user", "content": "Are you there?"}]
    with pytest.raises(InvalidRequest, match="name"):
        ResponsesSession(server.url)
    with pytest.raises(InvalidRequest, match=r"'localhost:8000' is not .* begins with http:// or https://"):
        ResponsesSession("localhost:8000", name="m")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"api_key": "k"}, "api_key has no effect without a server's URL"),
        ({"name": "other"}, "The adapter's name is 'm'; leave name out"),
        ({"functions": [double, tool(name="double")(add.call)]}, "Two functions have the name 'double'"),
        ({"servers": {"functions": "http://localhost/mcp"}}, "'functions' is no name for a server"),
        ({"model": "http://localhost:99999", "name": "m"}, "a port is a number from 1 to 65535"),
        ({"model": "http://", "name": "m"}, "'http://' is not the URL of a server"),
    ],
)
def test_what_would_have_no_effect_is_refused(given: dict[str, Any], message: str) -> None:
    model = Scripted()
    model.name = "m"
    with pytest.raises(InvalidRequest, match=message):
        ResponsesSession(**{"model": model} | given)
    ResponsesSession(model, name="m")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"functions": [len]}, "functions must be made by @tool, not builtin_function_or_method"),
        ({"servers": {"a": {"url": "http://localhost/mcp"}}}, "an HttpServer or a StdioServer, not dict"),
        ({"allowed_tools": "double"}, "allowed_tools must be a list of names, not a text"),
    ],
)
def test_what_is_no_function_server_or_list_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ResponsesSession(Scripted(), **given)


async def test_an_allowed_tool_that_there_is_not_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = Scripted(saying("So."), saying("And so."))
    async with ResponsesSession(model, functions=[double], allowed_tools=["double", "dubble"]) as session:
        await session.run("Once.")
        await session.run("Twice.")
    (record,) = caplog.records
    assert record.getMessage() == "allowed_tools names what no server or function offers: dubble"


async def test_what_a_server_ignores_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    said = [JSONResponse(answer(saying("So.")), headers={"Penstock-Ignored": "top_n"}) for _ in range(2)]
    async with (
        remote(*said) as server,
        ResponsesSession(server.url, name="m", parameters={"top_n": 3}) as session,
    ):
        await session.run("Go.")
        await session.run("Go on.")
    told = [record.getMessage() for record in caplog.records if "ignores" in record.getMessage()]
    assert told == [f"{server.url}/v1/ ignores these parameters: top_n"]


@pytest.mark.parametrize(
    "page",
    [HTMLResponse("<html>Welcome!"), JSONResponse({"choices": []}), JSONResponse([1]), Response(status_code=204)],
)
async def test_an_answer_that_is_no_completion_is_told_at_once(page: Response) -> None:
    async with remote(page) as server, ResponsesSession(server.url, name="m") as session:
        with pytest.raises(
            GenerationFailed, match=rf"{server.url}/v1/chat/completions answered 20[04], but not with a chat"
        ):
            await session.run("Are you there?")


@pytest.mark.usefixtures("at_once")
async def test_a_server_that_is_away_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with ResponsesSession(url, name="m") as session:
        with pytest.raises(GenerationFailed, match=f"No answer from {url}"):
            await session.run("Are you there?")

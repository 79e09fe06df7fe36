"""Tasks of several turns on the model in the box, through real processes, some of which are killed on the way."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import openai
import orjson
import pytest
from agents import (
    Agent,
    HostedMCPTool,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    function_tool,
)
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp_servers import McpServer
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseMcpCallCompletedEvent,
    ResponseStreamEvent,
)
from openai.types.responses.response_output_item import McpApprovalRequest, McpCall, McpListTools
from responses_rules import check_responses
from shop import CALLS, FUNCTIONS, MODEL, WISH, Bundled, Shop

from penstock.api.library.session import ConversationResult, ResponsesSession
from penstock.api.tools.functions import Function, tool
from penstock.stages.tools.calls import UNKNOWN

ANN, PAUL = CALLS
HOSTED: Any = {"model": MODEL, "temperature": 0, "tools": [FUNCTIONS]}
ASKED: Any = {"input": WISH.format(ANN), **HOSTED}
UNTRACED = RunConfig(tracing_disabled=True)


@pytest.fixture(scope="module")
def desk() -> Iterator[tuple[BlockingPortal, McpServer]]:
    """An MCP server in a thread of its own, and what calls something there."""
    with start_blocking_portal() as portal:
        server = McpServer()
        portal.call(server.start)
        yield portal, server
        portal.call(server.stop)


@pytest.fixture(scope="module")
def opened(
    tmp_path_factory: pytest.TempPathFactory, desk: tuple[BlockingPortal, McpServer]
) -> Iterator[tuple[Shop, Bundled]]:
    folder = tmp_path_factory.mktemp("shop")
    shop = Shop(folder)
    (folder / "mcp.json").write_text(f'{{"mcpServers": {{"desk": {{"url": "{desk[1].url}"}}}}}}')
    bundled = Bundled(folder, *shop.options, "--mcp-config", str(folder / "mcp.json"))
    yield shop, bundled
    bundled.close()
    shop.close()


@pytest.fixture
def shop(opened: tuple[Shop, Bundled]) -> Shop:
    opened[0].clear()
    return opened[0]


@pytest.fixture
def bundled(opened: tuple[Shop, Bundled]) -> Bundled:
    opened[1].wait_ready()
    return opened[1]


@pytest.fixture(scope="module")
def undisturbed(opened: tuple[Shop, Bundled]) -> dict[str, list[Any]]:
    """What becomes of each wish where nothing is killed."""
    client = opened[1].client
    return {name: shape(client.responses.create(input=WISH.format(name), **HOSTED)) for name in CALLS}


def shape(response: Response) -> list[Any]:
    """What a response came to, without what is its own."""
    assert response.status == "completed", response.error
    own = {"id", "call_id", "server_label"}
    return [{key: value for key, value in item.to_dict().items() if key not in own} for item in response.output]


def calls_of(response: Response) -> list[tuple[str, str]]:
    """The calls among its items that were made, with their argument."""
    return [
        (item.name, *json.loads(item.arguments).values())
        for item in response.output
        if item.type == "mcp_call" and item.output is not None
    ]


def judged(events: Sequence[ResponseStreamEvent]) -> Response:
    """The response at the end of a stream that is as it has to be."""
    check_responses(b"".join(b"event: %s\ndata: %s\n\n" % (e.type.encode(), orjson.dumps(e.to_dict())) for e in events))
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    return last.response


def followed(client: openai.OpenAI, id: str, **more: Any) -> list[ResponseStreamEvent]:
    """The events of a response up to its end."""
    with client.responses.retrieve(id, stream=True, **more) as stream:
        return list(stream)


def test_three_dependent_calls_in_four_turns(shop: Shop, bundled: Bundled) -> None:
    with bundled.client.responses.create(stream=True, **ASKED) as stream:
        made = judged(list(stream))
    assert shop.calls == calls_of(made) == CALLS[ANN]
    assert [item.type for item in made.output] == ["mcp_list_tools", *["mcp_call"] * 3, "message"]
    assert "12.5" in made.output_text
    kept = bundled.client.responses.retrieve(made.id)
    assert kept.output == made.output
    assert judged(followed(bundled.client, made.id)).output == made.output


class Clerk:
    """The shop's tools in the client's own process; the second waits until it `may_go`."""

    def __init__(self, may_go: asyncio.Event) -> None:
        self.calls: list[tuple[str, str]] = []
        self.is_waiting = asyncio.Event()
        self.may_go = may_go

    @property
    def tools(self) -> list[Callable[[str], Awaitable[str]]]:
        return [self.find_customer, self.get_order, self.get_price]

    async def find_customer(self, email: str) -> str:
        "Find a customer"
        self.calls.append(("find_customer", email))
        return '{"customer_id": "C-481"}'

    async def get_order(self, customer_id: str) -> str:
        "Get an order"
        self.calls.append(("get_order", customer_id))
        self.is_waiting.set()
        await self.may_go.wait()
        return '{"order_id": "7302"}'

    async def get_price(self, order_id: str) -> str:
        "Get a price"
        self.calls.append(("get_price", order_id))
        return '{"price": 12.5}'


async def ask_an_agent(url: str, tools: list[Any], headers: dict[str, str] | None = None) -> RunResult:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True) as client:
        agent = Agent(
            name="Clerk",
            model=OpenAIResponsesModel(model=MODEL, openai_client=client),
            model_settings=ModelSettings(temperature=0, extra_headers=headers),
            tools=tools,
        )
        return await Runner.run(agent, WISH.format(ANN), run_config=UNTRACED)


async def ask_a_session(url: str, functions: list[Function]) -> ConversationResult:
    async with ResponsesSession(url, name=MODEL, functions=functions, parameters={"temperature": 0}) as session:
        return await session.run(WISH.format(ANN))


@pytest.mark.filterwarnings("ignore")  # the SDK's own
@pytest.mark.parametrize("is_killed", [False, True])
async def test_agents_and_sessions_complete_the_task(shop: Shop, bundled: Bundled, is_killed: bool) -> None:
    """An agent with the tools of the server, in one response; one with its own, in a response for every turn; and a
    session. The worker dies while each is in a call, the front when two of them wait for their next turn."""
    url, loop, may_go = bundled.served.url, asyncio.get_running_loop(), asyncio.Event()
    one, other = Clerk(may_go), Clerk(may_go)
    key = {"Idempotency-Key": uuid4().hex}  # so that the SDK, when it asks again, asks for the same

    def kill() -> None:
        with shop.held("7302"):
            bundled.kill("worker")
            loop.call_soon_threadsafe(may_go.set)
            bundled.kill("front")

    if is_killed:
        shop.hold("7302")
    async with asyncio.TaskGroup() as group:
        hosted = group.create_task(ask_an_agent(url, [HostedMCPTool(tool_config=FUNCTIONS)], key))
        agent = group.create_task(ask_an_agent(url, [function_tool(each) for each in one.tools]))
        session = group.create_task(ask_a_session(url, [tool(each) for each in other.tools]))
        if is_killed:
            await one.is_waiting.wait()
            await other.is_waiting.wait()
            await asyncio.to_thread(kill)
        may_go.set()
    assert shop.calls == CALLS[ANN] + CALLS[ANN][-1:] * is_killed  # which may be made again
    assert one.calls == other.calls == CALLS[ANN]
    assert [len(run.result().raw_responses) for run in (hosted, agent)] == [1, 4]
    result = session.result()
    assert [call.name for call in result.calls] == [name for name, _ in CALLS[ANN]]
    assert (result.turns, result.finish_reason) == (4, "stop")
    for text in (hosted.result().final_output, agent.result().final_output, result.text):
        assert "12.5" in text


@pytest.mark.parametrize("victim", ["worker", "nats-server", "front"])
def test_a_task_goes_on_after_a_kill_in_the_middle_of_a_call(
    shop: Shop, bundled: Bundled, undisturbed: dict[str, list[Any]], victim: str
) -> None:
    """Of two tasks: one waits in a call that must not be made twice, the other in one that may be."""
    shop.clear()
    shop.hold("C-481", "5096")
    ids = {
        name: bundled.client.responses.create(input=WISH.format(name), background=True, **HOSTED).id for name in CALLS
    }
    with shop.held("C-481", "5096"):
        bundled.kill(victim)
    bundled.wait_ready()
    first, second = (judged(followed(bundled.client, id)) for id in ids.values())
    again = victim == "front"
    assert shape(second) == undisturbed[PAUL]
    assert Counter(call for call in shop.calls if call in CALLS[PAUL]) == Counter(
        CALLS[PAUL] + CALLS[PAUL][-1:] * again
    )
    assert shop.calls.count(CALLS[ANN][0]) == shop.calls.count(CALLS[ANN][1]) == 1
    if again:
        told, *_ = [item.error for item in first.output if item.type == "mcp_call" and item.error is not None]
        assert UNKNOWN.text in str(told)
        assert first.output[-1].type == "message"
    else:
        assert shape(first) == undisturbed[ANN]
        assert shop.calls.count(CALLS[ANN][2]) == 1


@pytest.mark.parametrize("victim", ["worker", "nats-server", "front"])
def test_a_task_goes_on_after_a_kill_between_two_turns(
    shop: Shop, bundled: Bundled, undisturbed: dict[str, list[Any]], victim: str
) -> None:
    """A stream that breaks with its front is taken up again behind its last event."""
    for _ in range(10):  # until the kill comes before the second call, which a busy machine may make meanwhile
        shop.clear()
        events: list[ResponseStreamEvent] = []
        made: list[Any] = []
        with suppress(openai.APIConnectionError), bundled.client.responses.create(stream=True, **ASKED) as stream:
            for event in stream:
                events.append(event)
                if isinstance(event, ResponseMcpCallCompletedEvent) and not made:
                    bundled.kill(victim)
                    made = shop.calls
        bundled.wait_ready()
        is_broken = not isinstance(events[-1], ResponseCompletedEvent)
        if is_broken:
            events += followed(bundled.client, first_id(events), starting_after=events[-1].sequence_number)
        if victim != "front" or made == CALLS[ANN][:1]:
            break
    assert is_broken == (victim == "front")
    assert shape(judged(events)) == undisturbed[ANN]
    assert shop.calls == CALLS[ANN]


def first_id(events: Sequence[ResponseStreamEvent]) -> str:
    assert isinstance(events[0], ResponseCreatedEvent)
    return events[0].response.id


def test_an_approval_outlives_everything(shop: Shop, bundled: Bundled) -> None:
    tools: Any = [FUNCTIONS | {"require_approval": "always", "allowed_tools": ["get_price"]}]
    wish = "Get the price with order id 7302."
    asked = bundled.client.responses.create(model=MODEL, input=wish, temperature=0, tools=tools, tool_choice="required")
    question = asked.output[-1]
    assert isinstance(question, McpApprovalRequest)
    assert (question.name, shop.calls) == ("get_price", [])
    bundled.restart()
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": question.id, "approve": True}
    made = bundled.client.responses.create(
        model=MODEL, input=[answer], previous_response_id=asked.id, temperature=0, tools=tools
    )
    assert shop.calls == calls_of(made) == CALLS[ANN][2:]
    assert "12.5" in made.output_text
    assert [item.approval_request_id for item in made.output if item.type == "mcp_call"] == [question.id]


def test_a_server_of_the_configuration_that_goes_and_comes_back(
    bundled: Bundled, desk: tuple[BlockingPortal, McpServer]
) -> None:
    portal, server = desk
    desk_tools: Any = {
        "type": "mcp",
        "server_label": "desk",
        "allowed_tools": ["add", "slow"],
        "require_approval": "never",
    }

    def ask(tool: str | None, previous: Response | None, background: bool = False) -> Response:
        choice: Any = {"type": "mcp", "server_label": "desk", "name": tool} if tool else "auto"
        return bundled.client.responses.create(
            model=MODEL,
            input="Add 2 and 3.",
            previous_response_id=previous.id if previous else None,
            temperature=0,
            tools=[desk_tools],
            tool_choice=choice,
            background=background,
            extra_body={"max_turns": 2},
        )

    def outcome(response: Response) -> McpCall:
        (call,) = [item for item in response.output if isinstance(item, McpCall)]
        assert (response.status, response.output[-1].type) == ("completed", "message")
        return call

    before = ask("add", None)
    assert outcome(before).output is not None and server.calls == ["add"]
    begun = ask("slow", before, background=True)
    portal.call(server.started.wait)
    portal.call(server.stop)
    during = judged(followed(bundled.client, begun.id))
    assert outcome(during).output is None and "desk could not run slow" in str(outcome(during).error)
    without = ask(None, during)
    (listing,) = [item for item in without.output if isinstance(item, McpListTools)]
    assert without.status == "completed" and "desk cannot be listed" in str(listing.error)
    portal.call(server.start)
    assert outcome(ask("add", without)).output is not None and server.calls == ["add", "slow", "add"]

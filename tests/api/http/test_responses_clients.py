"""The Responses API as the official client's helpers, the Agents SDK and LangChain use it, on the model in the box."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    HostedMCPTool,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
)
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from shop import CALLS, FUNCTIONS, MODEL, WISH, Bundled, Shop

ANN = next(iter(CALLS))
ASKED: Any = {"model": MODEL, "temperature": 0}
UNTRACED = RunConfig(tracing_disabled=True)


class Sky(BaseModel):
    city: Literal["Oslo", "Rome"]
    sky: Literal["clear", "cloudy"]


class GetPrice(BaseModel):
    """Get a price"""

    order_id: str


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shop, Bundled]]:
    folder = tmp_path_factory.mktemp("shop")
    shop = Shop(folder)
    bundled = Bundled(folder, *shop.options)
    yield shop, bundled
    bundled.close()
    shop.close()


@pytest.fixture
def shop(opened: tuple[Shop, Bundled]) -> Shop:
    opened[0].clear()
    return opened[0]


@pytest.fixture
def client(opened: tuple[Shop, Bundled]) -> openai.OpenAI:
    return opened[1].client


@pytest.fixture
def url(opened: tuple[Shop, Bundled]) -> str:
    return f"{opened[1].served.url}/v1"


def test_the_stream_helper_adds_up_to_the_response(client: openai.OpenAI, shop: Shop) -> None:
    with client.responses.stream(input=WISH.format(ANN), tools=[FUNCTIONS], **ASKED) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert shop.calls == CALLS[ANN]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    assert [event.type for event in events].count("response.mcp_call.completed") == 3
    kept = client.responses.retrieve(final.id)
    assert (kept.output[1:4], kept.output_text) == (final.output[1:4], final.output_text)
    with client.responses.stream(response_id=final.id, starting_after=5) as stream:
        rest = list(stream)
    assert [event.sequence_number for event in rest] == [event.sequence_number for event in events[6:]]


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    made = client.responses.parse(input="The sky over Oslo is clear.", text_format=Sky, **ASKED)
    assert isinstance(made.output_parsed, Sky)
    with client.responses.stream(input="The sky over Oslo is clear.", text_format=Sky, **ASKED) as stream:
        assert stream.get_final_response().output_parsed == made.output_parsed


def test_arguments_are_parsed_into_a_model_and_the_output_goes_on(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(GetPrice, name="get_price", description="Get a price")]
    made = client.responses.parse(input="Get the price with order id 7302.", tools=tools, **ASKED)
    (call,) = made.output
    assert call.type == "function_call" and isinstance(call.parsed_arguments, GetPrice)
    assert call.parsed_arguments.order_id == "7302"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"price": 12.5}'}
    for before in ({"input": [output], "previous_response_id": made.id}, {"input": [*asked(made), output]}):
        assert "12.5" in client.responses.parse(tools=tools, **before, **ASKED).output_text


def asked(made: openai.types.responses.ParsedResponse[Any]) -> list[Any]:
    """What a client that keeps everything itself sends again."""
    return [{"role": "user", "content": "Get the price with order id 7302."}, *made.output]


@pytest.mark.parametrize("hosted", [False, True])
def test_a_response_that_was_cut_in_a_call_can_be_followed(client: openai.OpenAI, shop: Shop, hosted: bool) -> None:
    function: Any = {"type": "function", "name": "get_price", "description": "Get a price", "strict": False}
    function["parameters"] = {"type": "object", "properties": {"order_id": {"type": "string"}}}
    tools: Any = [FUNCTIONS | {"allowed_tools": ["get_price"]} if hosted else function]
    wish = "Get the price with order id 7302."
    made = client.responses.create(input=wish, tools=tools, tool_choice="required", max_output_tokens=16, **ASKED)
    assert made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens"
    call: Any = made.output[-1]
    assert (call.type, call.status) == ("mcp_call" if hosted else "function_call", "incomplete")
    assert not call.arguments.endswith("}") and shop.calls == []
    more = client.responses.create(input="Hello!", tools=tools, previous_response_id=made.id, **ASKED)
    assert more.status == "completed"


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    texts = ["One.", "Two.", "Three."]
    messages: Any = [{"role": "user", "content": text} for text in texts]
    made = client.responses.create(input=messages, max_output_tokens=20, **ASKED)
    orders: Any = {"asc": texts, "desc": texts[::-1]}
    for order, expected in orders.items():
        pages: Any = client.responses.input_items.list(made.id, limit=2, order=order)
        assert [item.content[0].text for item in pages] == expected
        assert pages.has_more and len(pages.data) == 2
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)


def test_a_conversation_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    first: Any = {"type": "message", "role": "user", "content": "My name is Eva."}
    conversation = client.conversations.create(items=[first], metadata={"topic": "names"})
    made = client.responses.create(input="What is my name?", conversation=conversation.id, **ASKED)
    assert "Eva" in made.output_text
    items: Any = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant"]
    assert items[2].id == made.output[0].id
    assert client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id) == items[0]
    client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    more = client.conversations.items.create(conversation.id, items=[first])
    assert [item.type for item in more.data] == ["message"]
    assert client.conversations.update(conversation.id, metadata={"topic": "x"}).metadata == {"topic": "x"}
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "x"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI, shop: Shop) -> None:
    shop.hold("C-481")
    made = client.responses.create(input=WISH.format(ANN), tools=[FUNCTIONS], background=True, **ASKED)
    assert made.status in ("queued", "in_progress")
    with shop.held("C-481"):
        assert client.responses.retrieve(made.id).status == "in_progress"
        assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    assert shop.calls == CALLS[ANN][:2]


@pytest.mark.filterwarnings("ignore")  # the SDK's own
async def test_an_agent_streams_and_remembers(url: str, shop: Shop) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", _strict_response_validation=True) as client:
        session = OpenAIConversationsSession(openai_client=client)
        agent = Agent(
            name="Clerk",
            model=OpenAIResponsesModel(model=MODEL, openai_client=client),
            model_settings=ModelSettings(temperature=0),
            tools=[HostedMCPTool(tool_config=FUNCTIONS)],
        )
        streamed = Runner.run_streamed(agent, WISH.format(ANN), run_config=UNTRACED, session=session)
        events = [event async for event in streamed.stream_events()]
        assert shop.calls == CALLS[ANN]
        assert "12.5" in streamed.final_output
        items = [event.item.type for event in events if event.type == "run_item_stream_event"]
        assert items.count("tool_call_item") == 3 and items[-1] == "message_output_item"
        kept = await session.get_items()
        assert [item.get("type") for item in kept].count("mcp_call") == 3
        again = await Runner.run(agent, "Hello!", run_config=UNTRACED, session=session)
        assert again.final_output
        assert len(await session.get_items()) > len(kept)
        await session.clear_session()


async def test_langchain_reads_responses(url: str, shop: Shop) -> None:
    model = ChatOpenAI(model=MODEL, base_url=url, api_key="none", use_responses_api=True, temperature=0)
    bound = model.bind_tools([FUNCTIONS])
    whole = await bound.ainvoke(WISH.format(ANN))
    assert isinstance(whole, AIMessage) and "12.5" in whole.text
    text = ""
    async for chunk in bound.astream(WISH.format(ANN)):
        text += chunk.text
    assert text == whole.text
    assert shop.calls == CALLS[ANN] * 2


@pytest.mark.parametrize(
    "grammar",
    [
        {"syntax": "regex", "definition": r'(run|stop) "[a-z]{1,3}"\n'},
        {
            "syntax": "lark",
            "definition": 'start: verb " " name LF\nverb: "run" | "stop"\n'
            'name: "\\"" /[a-z]{1,3}/ "\\""\n%import common.LF\n',
        },
    ],
)
def test_a_custom_tool_gets_a_text_that_matches_its_grammar(client: openai.OpenAI, grammar: dict[str, str]) -> None:
    """Of chats and responses, whole and streamed; the conversation goes on with its result."""
    asked: Any = {"role": "user", "content": "Run abc."}
    shared: Any = {"type": "grammar", "grammar": grammar}
    tool: Any = {"type": "custom", "custom": {"name": "shell", "description": "Runs it", "format": shared}}
    named: Any = {"type": "custom", "custom": {"name": "shell"}}
    whole = client.chat.completions.create(messages=[asked], tools=[tool], tool_choice=named, **ASKED)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "custom" and call.custom.name == "shell"
    text = call.custom.input
    assert re.fullmatch(r'(run|stop) "[a-z]{1,3}"\n', text)
    lenient = openai.OpenAI(base_url=client.base_url, api_key="none")  # its types of chunks know functions alone
    chunks = [*lenient.chat.completions.create(messages=[asked], tools=[tool], tool_choice=named, stream=True, **ASKED)]
    lenient.close()
    pieces = [piece.model_dump() for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece["custom"]["input"] for piece in pieces) == text
    said: Any = [asked, whole.choices[0].message.model_dump(exclude_none=True)]
    said += [{"role": "tool", "tool_call_id": call.id, "content": "done"}]
    after = client.chat.completions.create(messages=said, tools=[tool], max_tokens=8, **ASKED)
    assert after.choices[0].message.content

    tools: Any = [
        {"type": "custom", "name": "shell", "description": "Runs it", "format": {"type": "grammar", **grammar}}
    ]
    choice: Any = {"type": "custom", "name": "shell"}
    with client.responses.stream(input="Run abc.", tools=tools, tool_choice=choice, **ASKED) as stream:
        events = [*stream]
        response = stream.get_final_response()
    (made,) = response.output
    assert made.type == "custom_tool_call" and re.fullmatch(r'(run|stop) "[a-z]{1,3}"\n', made.input)
    assert (
        "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta") == made.input
    )
    assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [made.input]
    result: Any = [{"type": "custom_tool_call_output", "call_id": made.call_id, "output": "done"}]
    then = client.responses.create(input=result, previous_response_id=response.id, tools=tools, **ASKED)
    assert then.status == "completed" and then.output_text

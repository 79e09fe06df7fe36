"""The model in the box: `penstock serve` alone answers something true, and calls tools without being forced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import psutil
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from serving import Process, Served

MODEL = "penstock-nano"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its working directory is `release`, beside its state."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "release").mkdir()
    process = Process("serve", "--port", "0", "--state-dir", str(folder / "state"), cwd=folder / "release")
    try:
        yield Served(process, folder / "state")
    finally:
        process.end()


@pytest.fixture
def url(served: Served) -> str:
    return served.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tool(name: str, description: str, **properties: str) -> Any:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    tool("get_weather", "Get the weather of a city", city="string"),
    tool("send_email", "Send an email", to="string", subject="string"),
]


def test_the_bundled_model_behaves(client: openai.OpenAI) -> None:
    def ask(messages: list[Any], **more: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **more).choices[0]

    assert [model.id for model in client.models.list()] == [MODEL]
    answer = ask([{"role": "user", "content": "What is Penstock?"}])
    assert answer.finish_reason == "stop" and "LLM server" in answer.message.content

    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = ask(question, tools=TOOLS)
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
    told = ask([*question, answer.message, result], tools=TOOLS)
    assert told.finish_reason == "stop" and told.message.content
    with client.chat.completions.stream(model=MODEL, messages=question, tools=TOOLS, temperature=0) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments  # type: ignore[index]


def test_several_calls_at_once(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    answer = client.chat.completions.create(model=MODEL, messages=question, tools=TOOLS, temperature=0).choices[0]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    assert answer.finish_reason == "tool_calls"


def test_a_task_of_several_turns(client: openai.OpenAI) -> None:
    """Three calls, each with what the one before has found, an answer, and a further wish in the same conversation."""
    tools = [
        tool("find_customer", "Find a customer", email="string"),
        tool("get_order", "Get an order", customer_id="string"),
        tool("get_price", "Get a price", order_id="string"),
        *TOOLS,
    ]
    results = {
        ("find_customer", "ann@bank.com"): {"customer_id": "cust-17"},
        ("get_order", "cust-17"): {"order_id": "ord-42"},
        ("get_price", "ord-42"): {"price": 314},
        ("get_weather", "Rome"): {"sky": "clear"},
    }
    messages: list[Any] = []
    called: list[tuple[str, str]] = []
    answers: list[str] = []
    turns = 0
    for wish in (
        "Find the customer with email ann@bank.com, get its order and tell me its price.",
        "What is the weather in Rome?",
    ):
        messages.append({"role": "user", "content": wish})
        while len(answers) < sum(message["role"] == "user" for message in messages):
            said = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, temperature=0)
            turns += 1
            message = said.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                assert call.type == "function"
                called.append((call.function.name, *json.loads(call.function.arguments).values()))
                content = json.dumps(results[called[-1]])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if not message.tool_calls:
                answers.append(message.content or "")
            assert turns <= 6
    assert called == list(results)
    assert turns == 6 and "314" in answers[0] and "clear" in answers[1]


def test_no_call_where_no_tool_fits(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Play some music."}]
    answer = client.chat.completions.create(model=MODEL, messages=question, tools=TOOLS, temperature=0).choices[0]
    assert not answer.message.tool_calls and answer.finish_reason == "stop"


@pytest.mark.filterwarnings("ignore")  # the SDK's own
async def test_an_agent_calls_what_it_needs(url: str) -> None:
    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        asked.append(city)
        return '{"sky": "clear"}'

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        agent = Agent(
            name="Forecaster",
            model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
            model_settings=ModelSettings(temperature=0),
            tools=[get_weather],
        )
        result = await Runner.run(agent, "What is the weather in Rome?", run_config=RunConfig(tracing_disabled=True))
    assert asked == ["Rome"]
    assert "clear" in result.final_output


def test_anthropics_client_gets_a_call(url: str) -> None:
    weather: Any = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": SCHEMA}
    question: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=MODEL, max_tokens=100, messages=question, tools=[weather], extra_body={"temperature": 0}
        )
    (block,) = message.content
    assert block.type == "tool_use" and (block.name, block.input) == ("get_weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"


async def test_many_at_once_are_served_with_default_settings(url: str) -> None:
    """More than run together: none fails, and every stream begins with an answer."""
    limits = httpx2.Limits(max_connections=64)
    async with httpx2.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:

        async def ask(place: int) -> bytes:
            body = {"model": MODEL, "prompt": f"{place} + 1 =", "max_tokens": 16, "stream": True, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.content

        streams = await asyncio.gather(*map(ask, range(64)))
    assert all(stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n") for stream in streams)
    # A token may be the word "error": only an event of that name is one.
    events = [json.loads(line[6:]) for stream in streams for line in stream.splitlines() if line.startswith(b"data: {")]
    assert [event for event in events if "error" in event] == []


def test_a_worker_comes_back_though_the_working_directory_was_deleted(served: Served, client: openai.OpenAI) -> None:
    """As that of a release that has been replaced: MKL ended each new worker."""
    (served.state_dir.parent / "release").rmdir()
    family = psutil.Process(served.process.pid).children()
    (worker,) = [each for each in family if "worker" in each.cmdline()]
    worker.kill()
    psutil.wait_procs([worker], timeout=30)
    answer = client.completions.create(model=MODEL, prompt="Penstock is", max_tokens=3, temperature=0, timeout=60)
    assert answer.choices[0].finish_reason == "length"

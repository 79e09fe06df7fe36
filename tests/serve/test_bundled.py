"""The model in the box: `penstock serve` alone answers something true, and calls tools without being forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Serve

MODEL = "penstock-nano"


@pytest.fixture
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    server = serve()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tool(name: str, description: str, **properties: str) -> Any:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


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

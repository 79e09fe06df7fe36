"""Tool calls and structured answers, by the official client, from a model whose words are chance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from serving import Served
from sse_rules import check_stream
from templates import SCHEMAS, TOOLS

MESSAGES: Any = [{"role": "user", "content": "What is it like outside?"}]


@pytest.fixture
def client(tool_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(client: openai.OpenAI, **body: Any) -> Any:
    given = {"model": "tools", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300} | body
    return client.chat.completions.create(**given)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


@pytest.mark.parametrize("seed", range(5))
def test_a_required_call_is_one_of_the_tools_and_valid(client: openai.OpenAI, seed: int) -> None:
    choice = ask(client, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
    ((name, arguments),) = calls_of(choice.message)
    jsonschema.validate(arguments, SCHEMAS[name])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_named_call_is_that_one_and_ends_with_stop(client: openai.OpenAI, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    choice = ask(client, tool_choice=named).choices[0]
    ((called, arguments),) = calls_of(choice.message)
    assert called == name
    jsonschema.validate(arguments, SCHEMAS[name])
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_says_the_same_as_the_whole(tool_server: Served, client: openai.OpenAI, seed: int) -> None:
    body = {"tool_choice": "required", "seed": seed, "n": 2}
    whole = ask(client, **body)
    with client.chat.completions.stream(
        model="tools",
        messages=MESSAGES,
        tools=TOOLS,
        max_tokens=300,
        **body,  # type: ignore[arg-type]
    ) as stream:
        streamed = stream.get_final_completion()
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert calls_of(one.message) == calls_of(other.message) != []
        ids = [call.id for call in one.message.tool_calls]
        assert len(set(ids)) == len(ids)
    given = {"model": "tools", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "stream": True} | body
    raw = httpx2.post(f"{tool_server.url}/v1/chat/completions", json=given, timeout=60)
    check_stream(raw.content, "/v1/chat/completions")


def test_calls_cut_short_end_with_length(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="required", max_tokens=12).choices[0]
    assert choice.finish_reason == "length"


def test_a_model_left_alone_may_answer_in_words(client: openai.OpenAI) -> None:
    choice = ask(client, max_tokens=20, temperature=0).choices[0]
    assert choice.finish_reason in ("stop", "length", "tool_calls")
    assert choice.message.content or choice.message.tool_calls


def test_a_grammar_that_allows_no_answer_is_refused_where_calls_are_allowed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the grammar allows no answer") as caught:
        ask(client, extra_body={"guided_grammar": "root ::= root"})
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "guided_grammar")
    assert ask(client, extra_body={"guided_grammar": 'root ::= "a"'}).choices[0].message


def test_results_go_back(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "note", "arguments": '{"tag": "a"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    answer = ask(client, messages=messages, max_tokens=5)
    assert answer.usage.prompt_tokens > ask(client, max_tokens=5).usage.prompt_tokens


class Person(BaseModel):
    name: str
    age: int
    likes: list[str]


@pytest.mark.parametrize("seed", range(3))
def test_parse_gives_an_object(client: openai.OpenAI, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "likes": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        },
        "required": ["name", "age", "likes"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model="tools", messages=MESSAGES, response_format=form, max_tokens=300, seed=seed
    )
    assert answer.choices[0].finish_reason == "stop"
    Person.model_validate_json(answer.choices[0].message.content or "")
    try:
        parsed = client.chat.completions.parse(
            model="tools", messages=MESSAGES, response_format=Person, max_tokens=1500, seed=seed
        )
    except openai.LengthFinishReasonError:
        return  # words by chance need not end
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_one_of_several_words(client: openai.OpenAI) -> None:
    words = ["sunny", "rainy", "no idea"]
    answer = client.chat.completions.create(model="tools", messages=MESSAGES, extra_body={"guided_choice": words}, n=5)
    assert {choice.message.content for choice in answer.choices} <= set(words)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"guided_regex": "(unclosed"}, "guided_regex", ""),
        ({"guided_grammar": "root ::= other"}, "guided_grammar", ""),
        ({"guided_json": {"type": "strin"}}, "guided_json.type", "strin"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]},
            "tools[0].function.parameters.type",
            "",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    client: openai.OpenAI, body: dict[str, Any], param: str, message: str
) -> None:
    tools = body.pop("tools", TOOLS)
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, tools=tools, extra_body=body)
    assert raised.value.param == param
    assert message in raised.value.message
    assert ask(client, max_tokens=3).choices, "and the server goes on"

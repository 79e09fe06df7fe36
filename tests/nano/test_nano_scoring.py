"""What counts as right, and how a server is asked."""

from __future__ import annotations

import json
from typing import Any

import corpus
import httpx2
import pytest
from data_text import EXTRACTION, TWO_DIGIT_SUM
from data_tools import PARALLEL, SINGLE, UNFIT
from evaluate import Bridge, with_call_ids
from scoring import SCHEMA, Question, Reply, examine, is_right, make_case, parse_hermes, schema_of


def _reply(message: dict[str, Any]) -> Reply:
    """The expected message as a reply."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return Reply(message["content"], [(function["name"], function["arguments"]) for function in functions])


class _Knows:
    """Answers every question of one case rightly, or always with the same."""

    def __init__(self, case: corpus.Sample, always: Reply | None = None) -> None:
        self._case, self._always = case, always
        self.asked: list[Question] = []

    async def ask(self, question: Question) -> Reply:
        self.asked.append(question)
        return self._always or _reply(self._case.messages[len(question.messages)])


@pytest.mark.parametrize("skill", (SCHEMA, *corpus.SKILLS))
async def test_the_expected_answers_are_right(skill: str) -> None:
    for index in range(5):
        case = make_case(skill, 0, index)
        assert (await examine(skill, case, _Knows(case).ask)).right


@pytest.mark.parametrize("skill", (SCHEMA, *corpus.SKILLS))
async def test_a_wrong_answer_is_wrong(skill: str) -> None:
    case = make_case(skill, 0, 0)
    wrong = Reply("", [("no_such_tool", {})]) if skill == UNFIT else Reply("Water.")
    result = await examine(skill, case, _Knows(case, wrong).ask)
    assert not result.right
    assert result.said


async def test_a_chain_is_asked_link_by_link() -> None:
    case = make_case(corpus.CHAIN, 0, 1)
    knows = _Knows(case)
    assert (await examine(corpus.CHAIN, case, knows.ask)).right
    assert [len(question.messages) for question in knows.asked] == [1, 3, 5, 7]


def test_arguments_must_be_exact_in_value_and_type() -> None:
    def said(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert is_right(SINGLE, said({"a": 1, "b": "x"}), Reply("", [("f", {"b": "x", "a": 1})]))
    assert not is_right(SINGLE, said({"a": 1}), Reply("", [("f", {"a": "1"})]))
    assert not is_right(SINGLE, said({"a": 1}), Reply("", [("f", {"a": 1, "b": 2})]))
    assert not is_right(SINGLE, said({"a": 1}), Reply("", [("g", {"a": 1})]))
    assert not is_right(SINGLE, said({"a": 1}), Reply("", [("f", {"a": 1}), ("f", {"a": 1})]))


def test_parallel_calls_may_come_in_any_order() -> None:
    calls: list[dict[str, Any]] = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    assert is_right(PARALLEL, {"content": "", "tool_calls": calls}, Reply("", [("g", {}), ("f", {})]))
    assert not is_right(PARALLEL, {"content": "", "tool_calls": calls}, Reply("", [("g", {}), ("g", {})]))


def test_json_and_sums_are_compared_by_value() -> None:
    assert is_right(EXTRACTION, {"content": '{"a": 1, "b": 2}'}, Reply('{"b":2,\n"a":1}'))
    assert not is_right(EXTRACTION, {"content": '{"a": 1}'}, Reply('Here: {"a": 1}'))
    assert is_right(TWO_DIGIT_SUM, {"content": "47 + 38 = 85"}, Reply("It is 85."))
    assert not is_right(TWO_DIGIT_SUM, {"content": "47 + 38 = 85"}, Reply("47 + 38 = 84"))


def test_the_schema_is_that_of_the_values() -> None:
    assert schema_of('{"name": "Ada", "age": 3}')["properties"] == {
        "name": {"type": "string"},
        "age": {"type": "integer"},
    }


def test_with_a_schema_what_is_valid_is_right() -> None:
    expected = {"content": '{"name": "Ada", "price": 2.5}'}
    assert is_right(SCHEMA, expected, Reply('{"price": 3, "name": "Bo"}'))
    assert not is_right(SCHEMA, expected, Reply('{"price": "3", "name": "Bo"}'))
    assert not is_right(SCHEMA, expected, Reply('{"price": 3}'))
    assert not is_right(SCHEMA, expected, Reply('{"price": 3'))


def test_hermes_is_read() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = f"Wait.\n{call}\n<tool_call>\nno\n</tool_call><|im_end|>"
    assert parse_hermes(text) == Reply("Wait.", [("f", {"a": 1}), ("", "\nno\n")])
    assert parse_hermes("So.\n</think>\n\n5<|im_end|>") == Reply("5")


def test_calls_get_ids_and_results_name_them() -> None:
    case = make_case(PARALLEL, 0, 0)
    messages = with_call_ids(case.messages)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert [call["id"] for call in calls] == results
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


async def test_a_server_is_asked_in_openai_s_form() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        function = {"name": "f", "arguments": '{"a": 1}'}
        message = {"content": None, "tool_calls": [{"function": function}]}
        return httpx2.Response(200, json={"choices": [{"message": message}]})

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        question = Question([{"role": "user", "content": "Go"}], [{"type": "function"}], True, {"type": "object"})
        assert await Bridge("http://x/v1/", "m", client).ask(question) == Reply("", [("f", {"a": 1})])
    (body,) = bodies
    assert body["tools"] == [{"type": "function"}]
    assert body["temperature"] == 0
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}

"""Training data: the same for a seed, right, in the form of its tools, and never what the examination asks."""

from __future__ import annotations

import json
from typing import Any

import corpus
import data_facts
import data_text
import jsonschema
import pytest
from coined import coin
from data_tools import PARALLEL, SINGLE, UNFIT
from words import Draw, is_test

CASES = 40
SAMPLES = 1500


def _wish(sample: corpus.Sample) -> str:
    """The last thing the user said."""
    return str([message for message in sample.messages if message["role"] == "user"][-1]["content"])


@pytest.fixture(scope="module")
def trained() -> list[corpus.Sample]:
    """A stretch of the training data."""
    return [corpus.sample(0, index) for index in range(SAMPLES)]


@pytest.fixture(scope="module")
def cases() -> dict[str, list[corpus.Sample]]:
    """Some of the examination, by skill."""
    return {skill: [corpus.case(skill, 0, index) for index in range(CASES)] for skill in corpus.SKILLS}


def test_a_seed_gives_the_same_data_again(trained: list[corpus.Sample]) -> None:
    assert [corpus.sample(0, index) for index in range(50)] == trained[:50]
    assert [corpus.sample(1, index) for index in range(50)] != trained[:50]


def test_a_case_is_the_same_again(cases: dict[str, list[corpus.Sample]]) -> None:
    assert all(corpus.case(skill, 0, 3) == ones[3] for skill, ones in cases.items())


def test_no_wish_of_the_examination_occurs_in_training(
    trained: list[corpus.Sample], cases: dict[str, list[corpus.Sample]]
) -> None:
    seen = {str(m["content"]) for one in trained for m in one.messages if m["role"] == "user"}
    fixed = (corpus.NAMES, corpus.PERSONA)  # the last question is always one of a few; the name is what is new
    asked = {_wish(case) for skill, ones in cases.items() if skill not in fixed for case in ones}
    assert not {wish for wish in asked & seen if not wish.lower().startswith(("what is the date", "what day"))}


@pytest.mark.parametrize("kind", ["name", "city", "identifier", "date", "email", "path", "phrase", "word"])
def test_a_value_belongs_to_one_split(kind: str) -> None:
    train, test = Draw(0), Draw(0, "test")
    trained = {str(train.value(kind)) for _ in range(400)}
    asked = {str(test.value(kind)) for _ in range(100)}
    assert not trained & asked


def test_a_coined_tool_belongs_to_one_split() -> None:
    train, test = Draw(0), Draw(0, "test")
    assert not {coin(train).theme for _ in range(400)} & {coin(test).theme for _ in range(100)}


def test_a_sum_belongs_to_one_split_in_either_order() -> None:
    train, test = Draw(0), Draw(0, "test")

    def pairs(draw: Draw, count: int) -> set[tuple[str, ...]]:
        answers = (data_text.two_digit_sum(draw)[1] for _ in range(count))
        return {tuple(sorted(answer.split(" = ")[0].split(" + "))) for answer in answers}

    assert not pairs(train, 2000) & pairs(test, 300)


def test_a_question_for_a_fact_belongs_to_one_split() -> None:
    train, test = Draw(0), Draw(0, "test")
    trained = {data_facts.ask_fact(train)[0].lower() for _ in range(3000)}
    assert not trained & {data_facts.ask_fact(test)[0].lower() for _ in range(300)}


def test_every_question_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for table in ("facts", "world"):
        for answer, ways in data_facts.questions(table):
            for way in ways:
                assert answers.setdefault(way.lower(), answer) == answer, way


def _calls(sample: corpus.Sample) -> list[dict[str, Any]]:
    return [call["function"] for message in sample.messages for call in message.get("tool_calls", ())]


def test_every_call_fits_the_schema_of_its_tool(trained: list[corpus.Sample]) -> None:
    count = 0
    for sample in trained:
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools or ()}
        for call in _calls(sample):
            jsonschema.validate(call["arguments"], {"additionalProperties": False, **tools[call["name"]]})
            count += 1
    assert count > SAMPLES / 4


def test_every_call_says_what_the_user_said(cases: dict[str, list[corpus.Sample]]) -> None:
    for case in (*cases[SINGLE], *cases[PARALLEL]):
        for call in _calls(case):
            for value in call["arguments"].values():
                said = str(value).lower() if isinstance(value, bool) else str(value)
                assert said.lower() in _wish(case).lower()


def test_each_link_of_a_chain_takes_what_the_one_before_found(cases: dict[str, list[corpus.Sample]]) -> None:
    for case in cases[corpus.CHAIN]:
        calls = _calls(case)
        results = [json.loads(message["content"]) for message in case.messages if message["role"] == "tool"]
        assert len(calls) == 3
        assert all(call["arguments"] == result for call, result in zip(calls[1:], results, strict=False))


def test_parallel_means_several_and_unfit_means_none(cases: dict[str, list[corpus.Sample]]) -> None:
    assert all(len(_calls(case)) in (2, 3) for case in cases[PARALLEL])
    assert not any(_calls(case) for case in cases[UNFIT])
    assert {len(case.tools or ()) for case in cases[SINGLE]} == {1, 2, 3, 4}


def test_arithmetic_is_right() -> None:
    draw = Draw(0)
    for _ in range(300):
        for turn in (data_text.two_digit_sum, data_text.arithmetic):
            a, sign, b, _, result = turn(draw)[1].split()
            wanted = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            assert int(result) == wanted


def test_a_thought_leads_to_the_answer() -> None:
    assert data_text.thought("47 + 38 = 85") == "Units: 7 + 8 = 15. Tens: 4 + 3 + 1 = 8."


def test_extraction_says_what_the_text_said(cases: dict[str, list[corpus.Sample]]) -> None:
    for case in cases[data_text.EXTRACTION]:
        values = json.loads(case.messages[-1]["content"])
        assert values
        assert all(f"{key}" in _wish(case) and str(value) in _wish(case) for key, value in values.items())


def test_a_pattern_stands_for_all_its_ways() -> None:
    assert data_facts.expand("(a|b) c( d|)") == ["a c d", "a c", "b c d", "b c"]


def test_one_in_eight_is_for_the_examination() -> None:
    assert 0.1 < sum(is_test(number) for number in range(4000)) / 4000 < 0.15

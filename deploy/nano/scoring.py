"""What counts as right. Knows neither HTTP nor engines: `examine` asks whatever it is given.

A case is a conversation with the right answers in it. Each answer is asked for in turn, with the right ones before it;
one wrong answer fails the case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import corpus
from corpus import Sample
from data_text import ARITHMETIC, EXTRACTION, TWO_DIGIT_SUM
from data_tools import PARALLEL, SINGLE, UNFIT, Message

SCHEMA = "json_with_schema"  # extraction once more, held to a schema by the server; right is what is valid
TARGETS = {
    SINGLE: 0.95, UNFIT: 0.90, PARALLEL: 0.85, corpus.CHAIN: 0.80, EXTRACTION: 0.90, SCHEMA: 1.0, TWO_DIGIT_SUM: 0.90,
    corpus.FACTS: 0.95,
}  # fmt: skip
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True)
class Reply:
    """What a model said: text, and calls as name and arguments."""

    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Question:
    """One turn to be answered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    schema: dict[str, Any] | None = None


Ask = Callable[[Question], Awaitable[Reply]]


@dataclass(frozen=True)
class Result:
    """How a case went: with what was expected and said where it was wrong."""

    right: bool
    asked: str = ""
    expected: str = ""
    said: str = ""


def make_case(skill: str, seed: int, index: int) -> Sample:
    """Case `index` of a skill."""
    return corpus.case(EXTRACTION if skill == SCHEMA else skill, seed, index)


async def examine(skill: str, case: Sample, ask: Ask) -> Result:
    """Ask for each of the assistant's messages. Where one call is the skill, what follows it does not count."""
    for place, message in enumerate(case.messages):
        if message["role"] != "assistant":
            continue
        before = [_plain(earlier) for earlier in case.messages[:place]]
        schema = schema_of(message["content"]) if skill == SCHEMA else None
        reply = await ask(Question(before, case.tools, case.thinking, schema))
        if not is_right(skill, message, reply):
            said = json.dumps(reply.calls) + reply.text if reply.calls else reply.text
            wanted = (
                json.dumps([_pair(call) for call in message.get("tool_calls", ())]) if "tool_calls" in message else ""
            )
            return Result(False, str(before[-1]["content"]), wanted or message["content"], said)
        if skill in (SINGLE, PARALLEL):
            break
    return Result(True)


def is_right(skill: str, expected: Message, reply: Reply) -> bool:
    """Whether `reply` does what `expected` does."""
    if calls := expected.get("tool_calls"):
        wanted = [_pair(call) for call in calls]
        return sorted(map(_key, wanted)) == sorted(map(_key, reply.calls))
    if reply.calls:
        return False
    if skill == UNFIT:
        return True
    text = str(expected["content"])
    if skill == SCHEMA:
        return fits(_parsed(reply.text), schema_of(text))
    if skill == EXTRACTION:
        return _key(_parsed(reply.text)) == _key(json.loads(text))
    if skill in (TWO_DIGIT_SUM, ARITHMETIC, corpus.THOUGHT):
        return _numbers(reply.text)[-1:] == _numbers(text)[-1:]
    same = " ".join(reply.text.split()) == " ".join(text.split())
    return same or (skill == corpus.FACTS and text.lower().rstrip(".") in reply.text.lower())


def schema_of(content: str) -> dict[str, Any]:
    """A strict schema for the object that `content` holds."""
    values = json.loads(content)
    properties = {key: {"type": JSON_TYPES[type(value)]} for key, value in values.items()}
    return {"type": "object", "properties": properties, "required": list(values), "additionalProperties": False}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` is valid by a schema that `schema_of` made."""
    if not isinstance(value, dict) or value.keys() != schema["properties"].keys():
        return False
    wanted = {key: one["type"] for key, one in schema["properties"].items()}
    given = {key: JSON_TYPES.get(type(one)) for key, one in value.items()}
    return all(given[key] == kind or (given[key], kind) == ("integer", "number") for key, kind in wanted.items())


def parse_hermes(text: str) -> Reply:
    """Text and calls of what a model wrote in Hermes' form; a call that is no JSON counts as one named ``."""
    calls: list[tuple[str, Any]] = []
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL):
        value = _parsed(body)
        well = isinstance(value, dict) and isinstance(value.get("name"), str)
        calls.append((value["name"], value.get("arguments")) if well else ("", body))
    rest = re.sub(r"<tool_call>.*?(?:</tool_call>|$)", "", text, flags=re.DOTALL).split("</think>")[-1]
    return Reply(re.sub(r"<\|\w+\|>", "", rest).strip(), calls)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _pair(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], call["function"]["arguments"]


def _key(value: Any) -> str:
    """Equal for equal JSON, types included, whatever the order of keys."""
    return json.dumps(value, sort_keys=True)


def _numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+", text)


def _plain(message: Message) -> Message:
    """A message of the past, without its thought."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}

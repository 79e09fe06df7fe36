"""Tools of Anthropic's that clients run: the official client names them, and a model can only call them as they are."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types.beta import BetaMemoryTool20250818Command
from jsonschema import Draft202012Validator
from pydantic import BaseModel, TypeAdapter
from serving import Served

from penstock.schemas.anthropic.messages import CountRequest
from penstock.schemas.openai.completions import parse_body

ASKED: Any = [{"role": "user", "content": "Do it"}]
DAMAGED = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(b"%PDF-1.4").decode()},
}
EDITOR = {"view": {"path"}, "create": {"path", "file_text"}, "str_replace": {"path", "old_str"}}


@pytest.fixture
def client(tool_server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0) as client:
        yield client


def called(client: anthropic.Anthropic, kind: str, name: str) -> list[Mapping[str, Any]]:
    """What the model, a random one, gives the tool, of three tries; a text that never ends is none."""
    tool: Any = {"type": kind, "name": name}
    choice: Any = {"type": "tool", "name": name}
    found: list[Mapping[str, Any]] = []
    for seed in range(3):  # the colder, the longer it goes round in a text
        drawn = {"temperature": 1.0, "seed": seed}
        answer = client.messages.create(
            model="tools", max_tokens=1500, messages=ASKED, tools=[tool], tool_choice=choice, extra_body=drawn
        )
        if answer.stop_reason == "tool_use":
            (block,) = [block for block in answer.content if block.type == "tool_use"]
            assert block.name == name and isinstance(block.input, dict)
            found.append(block.input)
    assert found
    return found


def test_bash(client: anthropic.Anthropic) -> None:
    for given in called(client, "bash_20250124", "bash"):
        assert given and set(given) <= {"command", "restart"}


@pytest.mark.parametrize(
    ("kind", "name", "inserted", "more"),
    [
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_text", {}),
        ("text_editor_20250124", "str_replace_editor", "new_str", {"undo_edit": {"path"}}),
    ],
)
def test_an_editor(client: anthropic.Anthropic, kind: str, name: str, inserted: str, more: dict[str, set[str]]) -> None:
    needed = EDITOR | {"insert": {"path", "insert_line", inserted}} | more
    for given in called(client, kind, name):
        assert needed[given["command"]] < set(given)
        assert set(given) <= {"command", "view_range", "new_str"}.union(*needed.values())


def test_the_memory_takes_what_the_official_client_reads(client: anthropic.Anthropic) -> None:
    reader: TypeAdapter[Any] = TypeAdapter(BetaMemoryTool20250818Command)
    for given in called(client, "memory_20250818", "memory"):
        reader.validate_python(given)


class Find(BaseModel):
    kind: Literal["fish", "bird"]
    legs: Literal[2, 4] | None = None


def test_what_is_strict_may_have_optional_properties(client: anthropic.Anthropic) -> None:
    """OpenAI requires every property where something is strict; Anthropic does not."""
    parsed = client.messages.parse(model="tools", max_tokens=60, messages=ASKED, output_format=Find)
    assert isinstance(parsed.parsed_output, Find)
    schema = Find.model_json_schema() | {"additionalProperties": False}
    tool: Any = {"name": "find", "strict": True, "input_schema": schema}
    choice: Any = {"type": "tool", "name": "find"}
    answer = client.messages.create(model="tools", max_tokens=60, messages=ASKED, tools=[tool], tool_choice=choice)
    (given,) = [block.input for block in answer.content if block.type == "tool_use"]
    Find.model_validate(given, extra="forbid")
    schema["properties"]["legs"] = {"unevaluatedItems": False}
    with pytest.raises(anthropic.BadRequestError, match="unevaluatedItems is not supported"):
        client.messages.create(model="tools", max_tokens=9, messages=ASKED, tools=[tool], tool_choice=choice)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"tools": [{"name": "a", "strict": True, "input_schema": {"type": "thing", "properties": {"b": 1}}}]},
            "tools[0].input_schema",
        ),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]: String should have"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: Tuple should have at most 16"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
            "output_config.format.schema",
        ),
        (
            {"system": "S", "messages": [{"role": "user", "content": [DAMAGED]}]},
            "messages: this PDF cannot be read",
        ),
    ],
)
def test_faults_have_the_names_of_the_body(client: anthropic.Anthropic, change: Any, told: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**{"model": "tools", "max_tokens": 9, "messages": ASKED} | change)
    assert told in refused.value.message and ".function" not in refused.value.message


def test_others_are_refused_by_name(client: anthropic.Anthropic) -> None:
    tool: Any = {"type": "computer_20250124", "name": "computer"}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]: Input should be a tool of type custom, bash"):
        client.messages.create(model="tools", max_tokens=9, messages=ASKED, tools=[tool])
    tool = {"type": "bash_20250124", "name": "shell"}
    with pytest.raises(anthropic.BadRequestError, match="must have the name bash"):
        client.messages.create(model="tools", max_tokens=9, messages=ASKED, tools=[tool])


@pytest.mark.parametrize(
    ("kind", "name", "given", "allowed"),
    [
        ("bash_20250124", "bash", {"command": "ls"}, True),
        ("bash_20250124", "bash", {"restart": True}, True),
        ("bash_20250124", "bash", {}, False),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "view", "path": "a"}, True),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "undo_edit", "path": "a"}, False),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "insert", "path": "a"}, False),
        ("text_editor_20241022", "str_replace_editor", {"command": "undo_edit", "path": "a"}, True),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "a", "new_path": "b"}, True),
        ("memory_20250818", "memory", {"command": "rename", "path": "a"}, False),
    ],
)
def test_what_a_tool_takes(kind: str, name: str, given: dict[str, Any], allowed: bool) -> None:
    body = {"model": "m", "messages": ASKED, "tools": [{"type": kind, "name": name}]}
    (tool,) = parse_body(CountRequest, body).chat_body()["tools"]
    assert Draft202012Validator(tool["function"]["parameters"]).is_valid(given) is allowed

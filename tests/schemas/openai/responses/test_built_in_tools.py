"""Tools of OpenAI's that clients run: what the model writes for them becomes items, and what comes back texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from penstock.engine.grammar.json_schema import json_schema_grammar
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.openai.responses.built_in_items import (
    arguments_of_built_in,
    begun_call,
    built_in_call,
    result_of_built_in,
)
from penstock.schemas.openai.responses.built_in_tools import DEFINITIONS, built_in_names
from penstock.schemas.openai.responses.items import input_items
from penstock.schemas.openai.responses.request import parse_responses
from penstock.schemas.openai.responses.tools import ShellTool

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
TEXTS = st.text(max_size=20)
COUNTS = st.integers(1, 10**6)
LISTS = st.lists(TEXTS, min_size=1, max_size=3)
CALLS = st.one_of(
    st.tuples(
        st.just("shell"),
        st.fixed_dictionaries({"commands": LISTS}, optional={"timeout_ms": COUNTS, "max_output_length": COUNTS}),
    ),
    st.tuples(
        st.just("local_shell"),
        st.fixed_dictionaries(
            {"command": LISTS},
            optional={
                "env": st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=2),
                "timeout_ms": COUNTS,
                "user": TEXTS,
                "working_directory": TEXTS,
            },
        ),
    ),
    st.tuples(
        st.just("apply_patch"),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["create_file", "update_file"]), "path": st.text(min_size=1), "diff": TEXTS}
        )
        | st.fixed_dictionaries({"type": st.just("delete_file"), "path": st.text(min_size=1)}),
    ),
)


@given(CALLS)
def test_what_a_tool_takes_becomes_an_item_and_comes_back_as_it_was(call: tuple[str, dict[str, Any]]) -> None:
    tool, arguments = call
    Draft202012Validator(DEFINITIONS[tool]["parameters"]).validate(arguments)
    item = built_in_call(tool, "call_1", json.dumps(arguments))
    assert item is not None
    for shown in (item, begun_call(item)):
        OFFICIAL.validate_python({"id": "x_1", **shown}, strict=True)
    asked = parse_responses({"model": "m", "input": [item]})
    [stored] = input_items(asked.input, "resp_1")
    assert {name: stored.get(name) for name in ("type", "call_id", "status")} == {
        name: item[name] for name in ("type", "call_id", "status")
    }
    assert json.loads(arguments_of_built_in(stored)) == arguments


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("shell", "{"),
        ("shell", '"ls"'),
        ("shell", '{"commands": []}'),
        ("shell", '{"commands": ["ls"], "timeout_ms": "1"}'),
        ("local_shell", '{"command": "ls"}'),
        ("apply_patch", '{"type": "create_file", "path": "a"}'),
        ("apply_patch", '{"type": "move_file", "path": "a", "diff": ""}'),
    ],
)
def test_what_a_tool_does_not_take_becomes_no_item(tool: str, arguments: str) -> None:
    assert built_in_call(tool, "call_1", arguments) is None


@pytest.mark.parametrize("tool", DEFINITIONS)
def test_a_model_is_held_to_what_a_tool_takes(tool: str) -> None:
    assert json_schema_grammar(DEFINITIONS[tool]["parameters"], path="tools[0]", strict=False).text


def output(**more: Any) -> dict[str, Any]:
    return {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}, **more}


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            {"output": [output(stdout="a\n"), output(stderr="no b\n", outcome={"type": "exit", "exit_code": 2})]},
            "a\nexit code: 0\nstderr:\nno b\nexit code: 2",
        ),
        ({"output": [output(stdout="a", outcome={"type": "timeout"})]}, "a\ntimed out"),
        (
            {"output": [output(stdout="abcdef", stderr="xyz")], "max_output_length": 3},
            "abc\n[cut here: the first 3 of 6 characters]\nstderr:\nxyz\nexit code: 0",
        ),
    ],
)
def test_the_outputs_of_commands_are_one_text(item: dict[str, Any], text: str) -> None:
    assert result_of_built_in({"type": "shell_call_output", **item}) == text


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"status": "completed"}, "The patch was applied."),
        ({"status": "completed", "output": "Done, 2 lines"}, "Done, 2 lines"),
        ({"status": "failed", "output": "no such file"}, "The patch failed: no such file"),
    ],
)
def test_what_became_of_a_patch_is_told(item: dict[str, Any], text: str) -> None:
    assert result_of_built_in({"type": "apply_patch_call_output", **item}) == text


def test_skills_are_told_to_the_model() -> None:
    skill = {"name": "csv", "description": "Read tables.", "path": "skills/csv"}
    tool = ShellTool.model_validate({"type": "shell", "environment": {"type": "local", "skills": [skill]}})
    assert tool.in_chat["function"]["description"].endswith("\ncsv (in skills/csv): Read tables.")
    assert "csv" not in ShellTool(type="shell").in_chat["function"]["description"]


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        (
            {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]},
            "tools[0].environment",
            "must be of type local",
        ),
        ({"tools": [{"type": "shell"}, {"type": "shell"}]}, "tools[1].type", "'shell' is defined twice"),
        (
            {"tools": [{"type": "apply_patch"}, {"type": "function", "name": "apply_patch"}]},
            "tools[1].name",
            "defined twice",
        ),
        ({"tools": [], "tool_choice": {"type": "shell"}}, "tool_choice", "there is no tool of type 'shell'"),
        (
            {"tools": [{"type": "shell"}], "tool_choice": {"type": "function", "name": "shell"}},
            "tool_choice",
            "there is no function 'shell'",
        ),
        (
            {"input": [{"type": "shell_call_output", "call_id": "c", "output": [output(outcome={"type": "odd"})]}]},
            "input[0].output[0].outcome",
            "an outcome of type exit or timeout",
        ),
        ({"input": [{"type": "local_shell_call_output", "output": "{}"}]}, "input[0]", "must have the id of its call"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(more: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parse_responses({"model": "m", "input": "Hi", **more})
    assert caught.value.param == param


def test_names_are_found_among_tools_that_need_not_be_valid() -> None:
    tools = [{"type": "shell"}, {"type": ["shell"]}, {"type": "custom", "name": "apply_patch"}, "local_shell", {}]
    assert built_in_names(tools) == {"shell"} and built_in_names(None) == built_in_names("shell") == frozenset()

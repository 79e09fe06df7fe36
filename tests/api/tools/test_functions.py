"""Python functions as tools: what a model is told of them, and what it hears when they run."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import AsyncIterator, Callable
from datetime import date
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from penstock.api.tools import functions
from penstock.api.tools.cutting import MAX_TEXT
from penstock.api.tools.functions import Function, find_functions, tool
from penstock.schemas.errors import ConfigurationError
from penstock.schemas.loops import ToolResult


class Place(BaseModel):
    city: str
    country: str = "NL"


@tool
def forecast(
    place: Place, days: Annotated[int, Field(ge=1, le=7, description="How far.")] = 1, schema: str = ""
) -> str:
    """What the weather will be.

    In words.
    """
    return f"{days} days of rain in {place.city}, {place.country}{schema}"


@tool(name="when", description="A date.", repeatable=True)
async def later(day: date) -> dict[str, date]:
    await asyncio.sleep(0)
    return {"day": day}


def test_schema_comes_from_the_signature() -> None:
    assert (forecast.name, forecast.repeatable) == ("forecast", False)
    assert forecast.description == "What the weather will be.\n\nIn words."
    assert forecast.parameters == {
        "$defs": {
            "Place": {
                "properties": {"city": {"type": "string"}, "country": {"default": "NL", "type": "string"}},
                "required": ["city"],
                "title": "Place",
                "type": "object",
            }
        },
        "additionalProperties": False,
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "days": {"default": 1, "description": "How far.", "maximum": 7, "minimum": 1, "type": "integer"},
            "schema": {"default": "", "type": "string"},
        },
        "required": ["place"],
        "type": "object",
    }


def test_decorator_can_say_otherwise() -> None:
    assert (later.name, later.description, later.repeatable) == ("when", "A date.", True)


def test_function_without_arguments_takes_an_empty_object() -> None:
    assert tool(lambda_named("now", lambda: 1)).parameters == {
        "additionalProperties": False,
        "properties": {},
        "type": "object",
    }


def lambda_named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def test_tool_is_still_a_function() -> None:
    assert forecast(Place(city="Delft"), days=2) == "2 days of rain in Delft, NL"


async def test_arguments_arrive_as_their_types() -> None:
    result = await forecast.run({"place": {"city": "Delft"}, "days": 3, "schema": "!"})
    assert result == ToolResult("3 days of rain in Delft, NL!")


async def test_value_that_is_no_text_becomes_json() -> None:
    assert await later.run({"day": "2026-01-02"}) == ToolResult('{"day": "2026-01-02"}')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "place: Missing required argument"),
        ({"place": {"city": 3}}, "place.city: Input should be a valid string"),
        ({"place": {"city": "D"}, "days": 9}, "days: Input should be less than or equal to 7"),
        ({"place": {"city": "D"}, "wind": 1}, "wind: Unexpected keyword argument"),
    ],
)
async def test_wrong_arguments_are_told_to_the_model(arguments: dict[str, Any], said: str) -> None:
    assert await forecast.run(arguments) == ToolResult(f"The arguments of forecast are wrong. {said}", is_error=True)


@pytest.mark.parametrize("error", [LookupError("no such place"), SystemExit(3)])
async def test_exception_is_told_to_the_model(error: BaseException) -> None:
    def fails() -> None:
        raise error

    result = await tool(fails).run({})
    assert result == ToolResult(f"fails failed: {type(error).__name__}: {error}", is_error=True)


async def test_value_that_json_cannot_hold_is_an_error() -> None:
    result = await tool(lambda_named("odd", lambda: object())).run({})
    assert result.is_error and result.text.startswith("odd failed: PydanticSerializationError")


async def test_large_value_is_cut() -> None:
    result = await tool(lambda_named("large", lambda: "é" * MAX_TEXT)).run({})
    assert result.text.startswith("é" * (MAX_TEXT // 2) + "\n[The result was cut here")


async def test_time_out_leaves_the_thread_behind() -> None:
    go = threading.Event()
    stuck = tool(name="stuck", timeout=0.05)(lambda_named("stuck", lambda: go.wait(20)))
    assert await stuck.run({}) == ToolResult("stuck did not answer within 0.05 seconds.", is_error=True)
    go.set()


async def test_time_out_ends_a_coroutine() -> None:
    ended = asyncio.Event()

    @tool(timeout=0.05)
    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    assert (await stuck.run({})).is_error
    assert ended.is_set()


async def test_functions_that_are_not_async_run_side_by_side() -> None:
    both = threading.Barrier(2)
    meet = tool(lambda_named("meet", lambda: both.wait(20) >= 0))
    assert {*await asyncio.gather(meet.run({}), meet.run({}))} == {ToolResult("true")}


def positional(a: int, /) -> None: ...
def any_number(*a: int) -> None: ...
def untypable(a: threading.Event) -> None: ...
async def yielding(a: int) -> AsyncIterator[int]:
    yield a


class Account:
    def balance(self, month: int) -> str:
        """What is left."""
        return f"{month} €"


@pytest.mark.parametrize("function", [positional, any_number, untypable, yielding, Account.balance])
def test_signature_that_no_object_can_fill_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="cannot be a tool"):
        tool(function)


async def test_a_method_of_an_object_is_a_tool() -> None:
    balance = tool(Account().balance)
    assert (balance.description, [*balance.parameters["properties"]]) == ("What is left.", ["month"])
    assert await balance.run({"month": 5}) == ToolResult("5 €")


async def test_what_can_be_called_and_has_no_name_needs_one() -> None:
    square, monthly = functools.partial(pow, exp=2), functools.partial(Account.balance, Account())
    with pytest.raises(TypeError, match=r"partial\(.*: a tool's name has up to 128 .* set `name`"):
        tool(square)
    assert await tool(name="square")(square).run({"base": 5}) == ToolResult("25")
    balance = tool(name="balance")(monthly)
    assert (balance.description, [*balance.parameters["properties"]]) == ("What is left.", ["month"])
    assert await balance.run({"month": 5}) == ToolResult("5 €")
    assert (await balance.run({"month": "May"})).is_error


@pytest.mark.parametrize("name", ["<lambda>", "a b", "x" * 129])
def test_name_that_no_model_can_say_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="a tool's name has up to 128"):
        tool(name=name)(positional)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan])
def test_a_tool_without_time_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="a tool needs some seconds"):
        tool(timeout=timeout)


SOURCE = """
from penstock.api.tools.functions import tool

@tool
def one(a: int) -> int:
    return a

@tool(name="second")
def two() -> str:
    return ""

again = two

def plain(b: str) -> str:
    "Plain."
    return b

several = [one, [two, plain]]
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_tools.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return str(tmp_path / "my_tools.py")


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("my_tools:one", ["one"]),
        ("my_tools:plain", ["plain"]),
        ("my_tools:several", ["one", "second", "plain"]),
        ("my_tools", ["one", "second"]),
        (".py:again", ["second"]),
        (".py", ["one", "second"]),
    ],
)
def test_functions_are_found_by_name(module: str, what: str, names: list[str]) -> None:
    found = find_functions([what if not what.startswith(".py") else module + what.removeprefix(".py")])
    assert [function.name for function in found] == names


def test_every_fault_of_finding_is_told(module: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        find_functions(["no_such_module:x", "my_tools:nothing", "my_tools:number", "/no/such.py:x"])
    assert [fault.split(" cannot be loaded: ")[0] for fault in refused.value.faults] == [
        "the tools no_such_module:x",
        "the tools my_tools:nothing",
        "the tools my_tools:number",
        "the tools /no/such.py:x",
    ]
    with pytest.raises(ConfigurationError, match="File name too long"):
        find_functions([f"/{'x' * 300}.py:x"])


def test_two_tools_of_a_name_are_refused(module: str) -> None:
    with pytest.raises(ConfigurationError, match=r"my_tools\.py:one: another tool has the name one; rename one"):
        find_functions(["my_tools:one", f"{module}:one"])


def test_installed_functions_are_found(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [EntryPoint(name="mine", value="my_tools:several", group=functions.GROUP)]
    monkeypatch.setattr(functions, "entry_points", lambda group: installed if group == "penstock.tools" else [])
    found = find_functions(["my_tools:one"])
    assert [function.name for function in found] == ["one", "second", "plain"]
    assert all(isinstance(function, Function) for function in found)

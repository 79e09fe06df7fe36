"""Python functions as tools:

    @tool
    def weather(city: str, days: Annotated[int, Field(ge=1, le=7)] = 1) -> str:
        "What the weather will be in a city."

`find_functions` loads them by name (`module:name`, `path/to/file.py:name`) and from the entry point `penstock.tools`.
Each names a function, a list of functions, or a module, which stands for its decorated functions.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, cast, overload

import anyio
from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from ...config.loading import load_named
from ...schemas.base import MAX_TOOL_NAME, TOOL_NAME_PATTERN
from ...schemas.errors import ConfigurationError
from ...schemas.loops import ToolResult
from .cutting import cut
from .mcp_config import TIMEOUT

GROUP = "penstock.tools"

_is_name = re.compile(TOOL_NAME_PATTERN).fullmatch


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function and what a model must know to call it; `parameters` is a JSON Schema of an object.

    A `repeatable` function may be called twice without harm. `timeout` is in seconds; a thread that runs longer is
    abandoned. A `Function` can be called like the function itself.
    """

    call: Callable[..., Any] = field(repr=False)
    name: str
    description: str
    parameters: dict[str, Any] = field(repr=False)
    repeatable: bool = False
    timeout: float = TIMEOUT
    _bind: Callable[..., dict[str, Any]] = field(kw_only=True, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        """Call the function, in a thread unless it is async. A text is returned as it is, any other value as JSON.

        Every failure becomes a result that tells the model about it.
        """
        try:
            bound = self._bind(**arguments)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False, include_context=False)
            lines = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
            return ToolResult(cut(f"The arguments of {self.name} are wrong. {'; '.join(lines)}"), is_error=True)
        try:
            with anyio.move_on_after(self.timeout) as scope:
                if inspect.iscoroutinefunction(self.call):
                    value = await self.call(**bound)
                else:
                    call = functools.partial(self.call, **bound)
                    value = await anyio.to_thread.run_sync(call, abandon_on_cancel=True)
            if scope.cancelled_caught:
                return ToolResult(f"{self.name} did not answer within {self.timeout:g} seconds.", is_error=True)
            return ToolResult(cut(value if isinstance(value, str) else _text(value)))
        except (Exception, SystemExit) as error:  # the model learns what a user's function raises
            return ToolResult(cut(f"{self.name} failed: {type(error).__name__}: {error}"), is_error=True)


@overload
def tool(function: Callable[..., Any], /) -> Function: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None, repeatable: bool = False, timeout: float = TIMEOUT
) -> Callable[[Callable[..., Any]], Function]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    repeatable: bool = False,
    timeout: float = TIMEOUT,
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Make a tool of a function; its signature becomes the schema, its docstring the description.

    Raises `TypeError` for a signature that a JSON object of arguments cannot fill, and for a bad name, and `ValueError`
    for a timeout that is not above 0.
    """
    if not timeout > 0:
        raise ValueError(f"timeout={timeout:g}: a tool needs some seconds; give more than 0")

    def made(function: Callable[..., Any]) -> Function:
        called = getattr(function, "__name__", "") if name is None else name
        if not isinstance(called, str) or not _is_name(called):
            raise TypeError(
                f"{called or function}: a tool's name has up to {MAX_TOOL_NAME} letters, digits, -, _ and .; set `name`"
            )

        inner = function.func if isinstance(function, functools.partial) else function

        def bind(**arguments: Any) -> dict[str, Any]:
            return arguments

        functools.update_wrapper(bind, inner)
        bind.__annotations__ = getattr(inner, "__annotations__", {})
        bind.__dict__["__wrapped__"] = function  # whose signature lacks what a partial has filled in
        try:
            parameters = TypeAdapter(cast(Any, function)).json_schema(schema_generator=_Untitled)
            checked = validate_call(bind)
        except PydanticUserError as error:
            raise TypeError(f"{called} cannot be a tool: {error}") from None
        if parameters.get("type") != "object":
            raise TypeError(f"{called} cannot be a tool: every argument must have a name")
        if "self" in parameters["properties"]:
            raise TypeError(f"{called} cannot be a tool: it belongs to no object yet; call tool(object.{called})")
        if inspect.isasyncgenfunction(function):
            raise TypeError(f"{called} cannot be a tool: it yields its values; return them")
        text = inspect.getdoc(inner) or "" if description is None else description
        return Function(function, called, text, parameters, repeatable, timeout, _bind=checked)

    return made if function is None else made(function)


def find_functions(names: Sequence[str] = ()) -> tuple[Function, ...]:
    """The functions of the entry point and of `names`. Raises `ConfigurationError` with every fault."""
    faults: list[str] = []
    found: dict[str, Function] = {}
    wanted: list[tuple[str, Callable[[], object]]] = [
        (f"{GROUP}: {entry.name}", entry.load) for entry in entry_points(group=GROUP)
    ]
    wanted += [(name, functools.partial(load_named, name)) for name in names]
    for origin, load in wanted:
        try:
            for function in _functions(load()):
                if found.setdefault(function.name, function) is not function:
                    faults.append(f"{origin}: another tool has the name {function.name}; rename one")
        except Exception as error:  # importing runs a user's code
            faults.append(f"the tools {origin} cannot be loaded: {type(error).__name__}: {error}")
    if faults:
        raise ConfigurationError(faults)
    return tuple(found.values())


def _functions(value: object) -> Iterator[Function]:
    if isinstance(value, Function):
        yield value
    elif isinstance(value, ModuleType):
        yield from (each for each in vars(value).values() if isinstance(each, Function))
    elif inspect.isfunction(value):
        yield tool(value)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _functions(each)
    else:
        raise TypeError(f"{value!r} is neither a function, a list of them, nor a module")


def _text(value: object) -> str:
    """JSON with spaces after `:` and `,`, as models have seen it in training."""
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles that pydantic derives from names: they would cost tokens and add nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

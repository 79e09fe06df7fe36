"""The items of OpenAI's tools that clients run themselves, `shell`, `local_shell` and `apply_patch`, strictly typed.

Of these the model sees calls of functions, and texts as their results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, Tag, ValidationError, model_validator

from .base import Id, Item, Part, Status, by_type


class ShellAction(Part):
    commands: Annotated[list[str], Field(min_length=1)]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(Item):
    """`environment` is shown as it came."""

    type: Literal["shell_call"]
    call_id: Id
    action: ShellAction
    environment: dict[str, Any] | None = None
    status: Status | None = None


class Exit(Part):
    """Agents of OpenAI's SDK send no `exit_code` unless their tool returns one."""

    type: Literal["exit"]
    exit_code: int | None = None


class Timeout(Part):
    type: Literal["timeout"]


class ShellOutput(Part):
    """What came of one command."""

    stdout: str
    stderr: str
    outcome: Annotated[
        Annotated[Exit, Tag("<exit>")] | Annotated[Timeout, Tag("<timeout>")],
        by_type("outcome_kind", "an outcome of type exit or timeout"),
    ]


class ShellCallOutput(Item):
    """The model sees at most `max_output_length` characters of each `stdout` and `stderr`."""

    type: Literal["shell_call_output"]
    call_id: Id
    output: list[ShellOutput]
    max_output_length: Annotated[int, Field(ge=1)] | None = None
    status: Status | None = None


class LocalShellAction(Part):
    type: Literal["exec"] = "exec"
    command: Annotated[list[str], Field(min_length=1)]
    env: dict[str, str] = Field(default_factory=dict)
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCall(Item):
    type: Literal["local_shell_call"]
    call_id: Id
    action: LocalShellAction
    status: Status | None = None


class LocalShellCallOutput(Item):
    """Without a `call_id`, `id` names the call, as in OpenAI's API."""

    type: Literal["local_shell_call_output"]
    call_id: Id | None = None
    output: str
    status: Status | None = None

    @model_validator(mode="after")
    def _has_its_call(self) -> LocalShellCallOutput:
        if self.id is None and self.call_id is None:
            raise ValueError("must have the id of its call, as id or call_id")
        return self


class PatchedFile(Part):
    type: Literal["create_file", "update_file"]
    path: Id
    diff: str


class DeletedFile(Part):
    type: Literal["delete_file"]
    path: Id


class ApplyPatchCall(Item):
    type: Literal["apply_patch_call"]
    call_id: Id
    operation: Annotated[
        Annotated[PatchedFile, Tag("<create_file>")]
        | Annotated[PatchedFile, Tag("<update_file>")]
        | Annotated[DeletedFile, Tag("<delete_file>")],
        by_type("operation_kind", "an operation of type create_file, update_file or delete_file"),
    ]
    status: Literal["in_progress", "completed"] | None = None


class ApplyPatchCallOutput(Item):
    type: Literal["apply_patch_call_output"]
    call_id: Id
    status: Literal["completed", "failed"]
    output: str | None = None


_Call = type[ShellCall] | type[LocalShellCall] | type[ApplyPatchCall]
_CALLS: dict[str, tuple[_Call, str]] = {  # by tool: the item, and which field has the arguments
    "shell": (ShellCall, "action"),
    "local_shell": (LocalShellCall, "action"),
    "apply_patch": (ApplyPatchCall, "operation"),
}
TOOLS = {f"{tool}_call": tool for tool in _CALLS}  # by the type of their items


def built_in_call(tool: str, call_id: str, arguments: str) -> dict[str, Any] | None:
    """The item, without an id, of a complete call; None if the arguments are not those of this tool."""
    kind, field = _CALLS[tool]
    try:
        item = kind.model_validate({"type": f"{tool}_call", "call_id": call_id, field: orjson.loads(arguments)})
    except (orjson.JSONDecodeError, ValidationError):
        return None
    where = {"environment": {"type": "local"}} if tool == "shell" else {}
    return item.model_dump(exclude={"id", "environment"}) | where | {"status": "completed"}


def begun_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item of a call as it begins, to which its end adds what the client is to do."""
    match item:
        case {"type": "shell_call", "action": action}:
            empty: dict[str, Any] = {"action": action | {"commands": []}}
        case {"type": "local_shell_call", "action": action}:
            empty = {"action": action | {"command": []}}
        case {"operation": operation}:
            empty = {"operation": operation | ({"diff": ""} if "diff" in operation else {})}
    return {**item, **empty, "status": "in_progress"}


def arguments_of_built_in(item: Mapping[str, Any]) -> str:
    """The arguments of a call, as a function's."""
    given = item[_CALLS[TOOLS[item["type"]]][1]]
    fields = {name: value for name, value in given.items() if value not in (None, {})}
    if item["type"] == "local_shell_call":
        del fields["type"]
    return orjson.dumps(fields).decode()


def result_of_built_in(item: Mapping[str, Any]) -> str:
    """What the model is told of a call."""
    match item["type"]:
        case "shell_call_output":
            return "\n".join(line for each in item["output"] for line in _told(each, item.get("max_output_length")))
        case "local_shell_call_output":
            return str(item["output"])
    default = "The patch was applied." if item["status"] == "completed" else "no reason is known"
    told = item.get("output") or default
    return f"The patch failed: {told}" if item["status"] == "failed" else told


def _told(output: Mapping[str, Any], most: int | None) -> Iterator[str]:
    for name in ("stdout", "stderr"):
        if text := output[name].rstrip("\n"):
            heading = f"{name}:\n" if name == "stderr" else ""
            note = f"\n[cut here: the first {most} of {len(text)} characters]" if most and len(text) > most else ""
            yield f"{heading}{text[:most]}{note}"
    outcome = output["outcome"]
    if outcome["type"] == "timeout":
        yield "timed out"
    elif (code := outcome.get("exit_code")) is not None:
        yield f"exit code: {code}"

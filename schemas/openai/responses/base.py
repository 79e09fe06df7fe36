"""What the items of OpenAI's Responses API, their parts and their tools have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, model_validator

from ..body import Body, OpenBody

Id = Annotated[str, Field(min_length=1)]
Status = Literal["in_progress", "completed", "incomplete"]
PREFIXES = {  # of the ids of items, by their types
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}


def by_type(fault: str, expected: str) -> Discriminator:
    """A discriminator of a union: by the `type` of an object, or by the Python type of another value. The tags are
    `<type>`, which the paths of faults leave out; `fault` is pydantic's name for the fault."""
    return Discriminator(type_tag, custom_error_type=fault, custom_error_message=f"Input should be {expected}")


def type_tag(value: Any) -> str:
    if isinstance(value, Body):
        return f"<{getattr(value, 'type', 'dict')}>"
    if not isinstance(value, dict):
        return f"<{type(value).__name__}>"
    return f"<{value.get('type', 'message' if 'role' in value else 'dict')}>"


class Part(OpenBody):
    @model_validator(mode="before")
    @classmethod
    def _null_is_none(cls, value: object) -> object:
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class Item(Part):
    id: Id | None = None

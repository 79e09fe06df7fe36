"""OpenAI's tools that clients run themselves: a request names them, and OpenAI's models know what they take.

Here the model is told, as of functions. Sources: OpenAI's guides to `shell`, `local_shell` and `apply_patch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_CHANGES = ("create_file", "update_file")


def _object(*required: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


_PATCH = _object(
    "type", "path", type={"type": "string", "enum": [*_CHANGES, "delete_file"]}, path=_TEXT, diff=_TEXT
) | {
    "anyOf": [
        *({"properties": {"type": {"const": name}}, "required": ["diff"]} for name in _CHANGES),
        {"properties": {"type": {"const": "delete_file"}}},
    ]
}
DEFINITIONS: dict[str, dict[str, Any]] = {
    "shell": {
        "description": "Run commands in a shell and get what each writes, and its exit code. They may run at the same "
        "time. timeout_ms limits how long each runs, max_output_length how many characters of its output come back.",
        "parameters": _object("commands", commands=_TEXTS, timeout_ms=_COUNT, max_output_length=_COUNT),
    },
    "local_shell": {
        "description": "Run a program and get what it writes. command is its name and its arguments; env are variables "
        "for it, timeout_ms limits how long it runs.",
        "parameters": _object(
            "command",
            command=_TEXTS,
            env={"type": "object", "additionalProperties": _TEXT},
            timeout_ms=_COUNT,
            user=_TEXT,
            working_directory=_TEXT,
        ),
    },
    "apply_patch": {
        "description": "Create, update or delete the file at path. diff has no header. For create_file it is the whole "
        "file, with + before each line. For update_file it is one or more parts, each after a line @@, in which lines "
        "that stay begin with a space, lines that go with -, and new ones with +; some lines that stay show the place. "
        "delete_file has no diff.",
        "parameters": _PATCH,
    },
}


def built_in_names(tools: object) -> frozenset[str]:
    """The names of these tools among those of a request, which need not be valid."""
    kinds = [tool.get("type") for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    return frozenset(kind for kind in kinds if isinstance(kind, str) and kind in DEFINITIONS)

"""The tools of Anthropic's that clients run themselves: a request names them, and their models know what they take.

Here the model is told. Sources: Anthropic's documentation of the bash, text editor and memory tools.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import model_validator

from .blocks import Marked

_NAMES = {
    "bash": ("bash",),
    "text_editor": ("str_replace_editor", "str_replace_based_edit_tool"),
    "memory": ("memory",),
}
"""Those that a tool of each kind may have; the kind is its type without the date."""

_is_of_client = re.compile(rf"({'|'.join(_NAMES)})_[0-9]{{8}}").fullmatch
_UNDOES = ("text_editor_20241022", "text_editor_20250124")
_INSERTS_NEW_STR = (*_UNDOES, "text_editor_20250429")

_TEXT, _LINE = {"type": "string"}, {"type": "integer", "minimum": 0}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text", "old_path", "new_path"), _TEXT),
    "insert_line": _LINE,
    "view_range": _RANGE,
}
_BASH = {
    "description": "Run a command in a bash session, which keeps its state. restart begins a new session.",
    "parameters": {
        "type": "object",
        "properties": {"command": _TEXT, "restart": {"type": "boolean"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["command"]}, {"required": ["restart"]}],
    },
}


class ClientTool(Marked):
    """The fields behind the name have no effect: what the tool answers is the client's to cut, and the model cannot
    but keep to the schema, also without `strict`."""

    type: str
    name: str
    max_characters: int | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None

    @model_validator(mode="after")
    def _has_its_name(self) -> ClientTool:
        if self.name not in (known := _NAMES[self.kind]):
            raise ValueError(f"of type {self.type} must have the name {' or '.join(known)}")
        return self

    @property
    def kind(self) -> str:
        return self.type.rpartition("_")[0]

    @property
    def function(self) -> dict[str, Any]:
        """The tool as the function of a chat request."""
        return {"name": self.name, **self._definition()}

    def _definition(self) -> dict[str, Any]:
        if self.kind == "bash":
            return _BASH
        if self.kind == "memory":
            return {
                "description": "Keep notes in files below /memories, for later conversations. view shows a directory "
                "or a file, or the lines of it in view_range.",
                "parameters": _commands(
                    "view_range",
                    view=["path"],
                    create=["path", "file_text"],
                    str_replace=["path", "old_str", "new_str"],
                    insert=["path", "insert_line", "insert_text"],
                    delete=["path"],
                    rename=["old_path", "new_path"],
                ),
            }
        inserted = "new_str" if self.type in _INSERTS_NEW_STR else "insert_text"
        commands = {
            "view": ["path"],
            "create": ["path", "file_text"],
            "str_replace": ["path", "old_str"],
            "insert": ["path", "insert_line", inserted],
        }
        if self.type in _UNDOES:
            commands["undo_edit"] = ["path"]
        return {
            "description": "View, create and edit text files. view shows a directory or a file, or the lines of it in "
            "view_range; str_replace replaces old_str, which must be in the file once; insert puts its text behind the "
            "line insert_line.",
            "parameters": _commands("view_range", "new_str", **commands),
        }


def is_of_client(type: object) -> bool:
    """Whether a tool of this type is one of Anthropic's that clients run, and that is known here."""
    return _is_of_client(str(type)) is not None


def _commands(*possible: str, **commands: list[str]) -> dict[str, Any]:
    """The schema of a tool with several commands, each with the fields that it needs, and those that some may have.

    All stand in one object, since some chat templates show nothing else.
    """
    names = dict.fromkeys([*(name for needed in commands.values() for name in needed), *possible])
    command = {"type": "string", "enum": list(commands)}
    return {
        "type": "object",
        "properties": {"command": command, **{name: _FIELDS[name] for name in names}},
        "required": ["command"],
        "additionalProperties": False,
        "anyOf": [
            {"properties": {"command": {"const": name}}, "required": needed} for name, needed in commands.items()
        ],
    }

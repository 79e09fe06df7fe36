"""The tools of Anthropic's that clients run themselves: a request names them, and their models know what they take.

Here the model is told. Sources: Anthropic's documentation of the bash, text editor and memory tools.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from .anthropic_blocks import Marked

_is_of_client = re.compile(r"(bash|text_editor|memory)_[0-9]{8}").fullmatch
_UNDOES = ("text_editor_20241022", "text_editor_20250124")
_INSERTS_NEW_STR = (*_UNDOES, "text_editor_20250429")

_TEXT, _LINE = {"type": "string"}, {"type": "integer", "minimum": 0}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_BASH = {
    "description": "Run a command in a bash session, which keeps its state. restart begins a new session.",
    "parameters": {
        "anyOf": [
            {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False}
            for name, value in (("command", _TEXT), ("restart", {"type": "boolean", "const": True}))
        ]
    },
}


class ClientTool(Marked):
    """The fields behind the name have no effect: what the tool answers is the client's to cut, and the model cannot
    but keep to the schema, also without `strict`."""

    type: str
    name: Literal["bash", "str_replace_editor", "str_replace_based_edit_tool", "memory"]
    max_characters: int | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None

    @property
    def function(self) -> dict[str, Any]:
        """The tool as the function of a chat request."""
        return {"name": self.name, **self._definition()}

    def _definition(self) -> dict[str, Any]:
        if self.type.startswith("bash"):
            return _BASH
        if self.type.startswith("memory"):
            return {
                "description": "Keep notes in files below /memories, for later conversations. view shows a directory "
                "or a file, or the lines of it in view_range.",
                "parameters": _commands(
                    view=({"path": _TEXT}, {"view_range": _RANGE}),
                    create=({"path": _TEXT, "file_text": _TEXT}, {}),
                    str_replace=({"path": _TEXT, "old_str": _TEXT, "new_str": _TEXT}, {}),
                    insert=({"path": _TEXT, "insert_line": _LINE, "insert_text": _TEXT}, {}),
                    delete=({"path": _TEXT}, {}),
                    rename=({"old_path": _TEXT, "new_path": _TEXT}, {}),
                ),
            }
        inserted = "new_str" if self.type in _INSERTS_NEW_STR else "insert_text"
        commands: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "view": ({"path": _TEXT}, {"view_range": _RANGE}),
            "create": ({"path": _TEXT, "file_text": _TEXT}, {}),
            "str_replace": ({"path": _TEXT, "old_str": _TEXT}, {"new_str": _TEXT}),
            "insert": ({"path": _TEXT, "insert_line": _LINE, inserted: _TEXT}, {}),
        }
        if self.type in _UNDOES:
            commands["undo_edit"] = ({"path": _TEXT}, {})
        return {
            "description": "View, create and edit text files. view shows a directory or a file, or the lines of it in "
            "view_range; str_replace replaces old_str, which must be in the file once; insert puts its text behind the "
            "line insert_line.",
            "parameters": _commands(**commands),
        }


def is_of_client(type: object) -> bool:
    """Whether a tool of this type is one of Anthropic's that clients run, and that is known here."""
    return _is_of_client(str(type)) is not None


def _commands(**commands: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """The schema of a tool with several commands, each with the fields that it needs and those that it may have."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"command": {"type": "string", "const": command}, **needed, **possible},
                "required": ["command", *needed],
                "additionalProperties": False,
            }
            for command, (needed, possible) in commands.items()
        ]
    }

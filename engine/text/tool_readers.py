"""Parsers of the tool calls in a model's text, one for each format; `tool_formats.py` has the layouts.

They take every variation that models are known to make of a layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from .literals import as_json
from .text_cursor import Parsing, TextCursor

_Kind = TypeVar("_Kind", dict[str, Any], list[Any])

DEEPSEEK_NAME = "<\uff5ctool▁sep\uff5c>"

Read = Callable[[TextCursor, tuple[str, ...]], Parsing[bool]]
"""Parses what follows a begin marker, up to the given end markers. Returns False where what the cursor has passed and
not settled is plain text.

A call begins once its name is known and its arguments have begun well. If they turn out to be malformed later, they
are copied as they are up to an end marker: no client can take them for a whole call, since they are no JSON.
"""


def _arguments(cursor: TextCursor, name: str, ends: tuple[str, ...]) -> Parsing[bool]:
    """Begin a call whose arguments are the JSON object at the cursor; return whether there was one."""
    if cursor.parameters_of(name) is None or (yield from cursor.skip_space()) != "{":
        return False
    cursor.begin_call(name)
    if not (yield from cursor.copy_literal(cursor.add_arguments)):
        yield from cursor.copy_until(ends, cursor.add_arguments)
    return True


def read_object(cursor: TextCursor, ends: tuple[str, ...], bare: bool = False) -> Parsing[bool]:
    """{"name": …, "arguments": {…}}, in any order; a `bare` one is no call without both."""
    name = ""
    held: list[str] = []  # arguments that come before the name
    begun = False
    mark = yield from cursor.accept("{")
    while mark in ("{", ","):
        key = yield from cursor.read_string()
        if not (yield from cursor.accept(":")):
            return False
        if key == "name" and not name:
            name = (yield from cursor.read_string()) or ""
            if cursor.parameters_of(name) is None:
                return False
        elif key in ("arguments", "parameters") and name and not begun:
            begun = yield from _arguments(cursor, name, ends)
            if not begun:
                return False
        elif key in ("arguments", "parameters") and not begun and not held:
            if (yield from cursor.skip_space()) != "{" or not (yield from cursor.copy_literal(held.append)):
                return False
        elif not (begun or key in ("id", "type")) or not (yield from cursor.copy_literal(lambda _: None)):
            return False
        mark = yield from cursor.accept(",", "}")
    if not begun:
        if not mark or not name or (bare and not held):
            return False
        cursor.begin_call(name)
        cursor.add_arguments("".join(held) or "{}")
    cursor.mark = cursor.at
    return True


def read_llama(cursor: TextCursor, ends: tuple[str, ...]) -> Parsing[bool]:
    cursor.at = cursor.mark
    return (yield from read_object(cursor, ends, bare=True))


def read_named(cursor: TextCursor, ends: tuple[str, ...]) -> Parsing[bool]:
    """A name, and arguments after whatever a format has between the two."""
    name = yield from cursor.read_name()
    while mark := (yield from cursor.accept("[CALL_ID]", "[ARGS]", DEEPSEEK_NAME, "```json")):
        if mark == "[CALL_ID]":
            yield from cursor.read_name()
        elif (mark, name) == (DEEPSEEK_NAME, "function"):
            name = yield from cursor.read_name()
    return (yield from _arguments(cursor, name, ends))


def read_mistral(cursor: TextCursor, ends: tuple[str, ...]) -> Parsing[bool]:
    if not (yield from cursor.accept("[")):
        return (yield from read_named(cursor, ends))
    more = ","
    while more == ",":
        if not (yield from read_object(cursor, ends)):
            return False
        more = yield from cursor.accept(",", "]")
    return True


def read_pythonic(cursor: TextCursor, ends: tuple[str, ...]) -> Parsing[bool]:
    more = ","
    while more == ",":
        name = yield from cursor.read_name()
        if cursor.parameters_of(name) is None or not (yield from cursor.accept("(")):
            return False
        separator = "{"
        closed = False
        while not closed:
            key = yield from cursor.read_name()
            mark = yield from cursor.accept("=", ")")
            closed = mark == ")" and not key
            well = closed or (mark == "=" and bool(key))
            if separator == "{":
                if not well:
                    return False
                cursor.begin_call(name)
            if well and key:
                cursor.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                separator = ", "
                well = yield from cursor.copy_literal(cursor.add_arguments)
                yield from cursor.accept(",")
            if not well:
                cursor.add_arguments(cursor.pending)
                yield from cursor.copy_until(ends, cursor.add_arguments)
                return True
        cursor.add_arguments("{}" if separator == "{" else "}")
        more = yield from cursor.accept(",", "]")
    return True


def read_harmony(cursor: TextCursor, ends: tuple[str, ...]) -> Parsing[bool]:
    if (yield from cursor.read_before("<|message|>")) is None:
        return False
    header = cursor.pending
    if tool := re.search(r"to=functions\.([\w.-]+)", header):
        return (yield from _arguments(cursor, tool[1], ends))
    if "to=" in header:
        return False
    cursor.pass_marker()
    begins = ("<|start|>", "<|channel|>")
    sink = cursor.add_reasoning if "<|channel|>analysis" in header else cursor.add_content
    if (yield from cursor.copy_until(("<|return|>", *ends, *begins), sink)) in begins:
        cursor.at = cursor.mark
    cursor.pass_marker()
    return True


def read_qwen_xml(cursor: TextCursor, ends: tuple[str, ...]) -> Parsing[bool]:
    yield from cursor.accept("<function=")
    name = (yield from cursor.read_before(">")) or ""
    schema = cursor.parameters_of(name)
    if schema is None:
        return False
    cursor.begin_call(name)
    separator = "{"
    while (mark := (yield from cursor.accept("<parameter=", "</function>"))) == "<parameter=":
        key = yield from cursor.read_before(">")
        if key is None:
            break
        cursor.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from _parameter(cursor, _types(_field(schema, "properties", dict).get(key), schema))
    if mark == "</function>":
        cursor.add_arguments("{}" if separator == "{" else "}")
    elif (yield from cursor.peek()):
        cursor.add_arguments(cursor.pending)
        yield from cursor.copy_until(("</function>", *ends), cursor.add_arguments)
    return True


def _parameter(cursor: TextCursor, types: set[str]) -> Parsing[None]:
    """Text where the schema says so; otherwise a literal, or text if it is none."""
    if (yield from cursor.peek()) == "\n":
        cursor.at += 1
    ends = ("\n</parameter>", "</parameter>")
    if types == {"string"}:
        cursor.add_arguments('"')
        if (
            yield from cursor.copy_until(
                ends, lambda text: cursor.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            )
        ):
            cursor.add_arguments('"')
        return
    held: list[str] = []
    ended = yield from cursor.copy_until(ends, held.append)
    text = "".join(held)
    literal = None if "string" in types and text != "null" else as_json(text.strip())
    written = literal or json.dumps(text, ensure_ascii=False)
    cursor.add_arguments(written if ended or literal else written[:-1])


def _types(schema: Any, root: dict[str, Any]) -> set[str]:
    """The JSON types that a schema mentions; unless the tool is strict, the schema may be invalid."""
    if isinstance(schema, dict) and str(schema.get("$ref")).startswith("#/$defs/"):
        schema = _field(root, "$defs", dict).get(schema["$ref"].removeprefix("#/$defs/"))
        root = {}  # follow only one reference: it may lead to itself
    if not isinstance(schema, dict):
        return set()
    stated = schema.get("type")
    types = {kind for kind in (stated if isinstance(stated, list) else [stated]) if isinstance(kind, str)}
    types |= {"string" for value in _field(schema, "enum", list) if isinstance(value, str)}
    branches = (branch for word in ("anyOf", "oneOf") for branch in _field(schema, word, list))
    return types.union(*(_types(branch, root) for branch in branches))


def _field(schema: dict[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    found = schema.get(name)
    return found if isinstance(found, kind) else kind()

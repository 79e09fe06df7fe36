"""How tool calls are read out of a model's text, format by format; the layouts stand in `tool_formats.py`.

Readers take every variation that models are known to make of a layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from .literals import as_json
from .text_cursor import Page, Reading

DEEPSEEK_NAME = "<\uff5ctool▁sep\uff5c>"

Read = Callable[[Page, tuple[str, ...]], Reading[bool]]
"""Reads what follows a begin marker, up to the given end markers. False: what the page has passed and not accounted
for is nothing but text.

A call begins once its name is known and its arguments have begun well. Should they turn out malformed later, they go
on as they are up to an end marker: joined, they are then no JSON, which no client can take for a whole call.
"""


def _arguments(page: Page, name: str, ends: tuple[str, ...]) -> Reading[bool]:
    """Begin the call with the JSON object that stands here; whether it did."""
    if page.schema(name) is None or (yield from page.space()) != "{":
        return False
    page.begin(name)
    if not (yield from page.value(page.add)):
        yield from page.until(ends, page.add)
    return True


def read_object(page: Page, ends: tuple[str, ...], bare: bool = False) -> Reading[bool]:
    """{"name": …, "arguments": {…}}, in any order; a `bare` one is no call without both."""
    name = ""
    held: list[str] = []  # arguments that come before the name
    begun = False
    mark = yield from page.accept("{")
    while mark in ("{", ","):
        key = yield from page.string()
        if not (yield from page.accept(":")):
            return False
        if key == "name" and not name:
            name = (yield from page.string()) or ""
            if page.schema(name) is None:
                return False
        elif key in ("arguments", "parameters") and name and not begun:
            begun = yield from _arguments(page, name, ends)
            if not begun:
                return False
        elif key in ("arguments", "parameters") and not begun and not held:
            if (yield from page.space()) != "{" or not (yield from page.value(held.append)):
                return False
        elif not (begun or key in ("id", "type")) or not (yield from page.value(lambda _: None)):
            return False
        mark = yield from page.accept(",", "}")
    if not begun:
        if not mark or not name or (bare and not held):
            return False
        page.begin(name)
        page.add("".join(held) or "{}")
    page.mark = page.at
    return True


def read_llama(page: Page, ends: tuple[str, ...]) -> Reading[bool]:
    page.at = page.mark
    return (yield from read_object(page, ends, bare=True))


def read_named(page: Page, ends: tuple[str, ...]) -> Reading[bool]:
    """A name, and arguments after whatever a format has between the two."""
    name = yield from page.name()
    while mark := (yield from page.accept("[CALL_ID]", "[ARGS]", DEEPSEEK_NAME, "```json")):
        if mark == "[CALL_ID]":
            yield from page.name()
        elif (mark, name) == (DEEPSEEK_NAME, "function"):
            name = yield from page.name()
    return (yield from _arguments(page, name, ends))


def read_mistral(page: Page, ends: tuple[str, ...]) -> Reading[bool]:
    if not (yield from page.accept("[")):
        return (yield from read_named(page, ends))
    more = ","
    while more == ",":
        if not (yield from read_object(page, ends)):
            return False
        more = yield from page.accept(",", "]")
    return True


def read_pythonic(page: Page, ends: tuple[str, ...]) -> Reading[bool]:
    more = ","
    while more == ",":
        name = yield from page.name()
        if page.schema(name) is None or not (yield from page.accept("(")):
            return False
        separator = "{"
        closed = False
        while not closed:
            key = yield from page.name()
            mark = yield from page.accept("=", ")")
            closed = mark == ")" and not key
            well = closed or (mark == "=" and bool(key))
            if separator == "{":
                if not well:
                    return False
                page.begin(name)
            if well and key:
                page.add(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                separator = ", "
                well = yield from page.value(page.add)
                yield from page.accept(",")
            if not well:
                page.add(page.pending)
                yield from page.until(ends, page.add)
                return True
        page.add("{}" if separator == "{" else "}")
        more = yield from page.accept(",", "]")
    return True


def read_harmony(page: Page, ends: tuple[str, ...]) -> Reading[bool]:
    if (yield from page.before("<|message|>")) is None:
        return False
    header = page.pending
    if tool := re.search(r"to=functions\.([\w.-]+)", header):
        return (yield from _arguments(page, tool[1], ends))
    if "to=" in header:
        return False
    page.pause()
    begins = ("<|start|>", "<|channel|>")
    say = page.think if "<|channel|>analysis" in header else page.say
    if (yield from page.until(("<|return|>", *ends, *begins), say)) in begins:
        page.at = page.mark
    page.pause()
    return True


def read_qwen_xml(page: Page, ends: tuple[str, ...]) -> Reading[bool]:
    yield from page.accept("<function=")
    name = (yield from page.before(">")) or ""
    schema = page.schema(name)
    if schema is None:
        return False
    page.begin(name)
    separator = "{"
    while (mark := (yield from page.accept("<parameter=", "</function>"))) == "<parameter=":
        key = yield from page.before(">")
        if key is None:
            break
        page.add(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from _parameter(page, _types(_member(schema, "properties").get(key), schema))
    if mark == "</function>":
        page.add("{}" if separator == "{" else "}")
    elif (yield from page.peek()):
        page.add(page.pending)
        yield from page.until(("</function>", *ends), page.add)
    return True


def _parameter(page: Page, types: set[str]) -> Reading[None]:
    """Text where the schema says so; otherwise a literal, or text if it is none."""
    if (yield from page.peek()) == "\n":
        page.at += 1
    ends = ("\n</parameter>", "</parameter>")
    if types == {"string"}:
        page.add('"')
        if (yield from page.until(ends, lambda text: page.add(json.dumps(text, ensure_ascii=False)[1:-1]))):
            page.add('"')
        return
    held: list[str] = []
    ended = yield from page.until(ends, held.append)
    text = "".join(held)
    literal = None if "string" in types and text != "null" else as_json(text.strip())
    written = literal or json.dumps(text, ensure_ascii=False)
    page.add(written if ended or literal else written[:-1])


def _types(schema: Any, root: dict[str, Any]) -> set[str]:
    """The JSON types that a schema speaks of; of a tool that is not strict, it may be no valid one."""
    if isinstance(schema, dict) and str(schema.get("$ref")).startswith("#/$defs/"):
        schema = _member(root, "$defs").get(schema["$ref"].removeprefix("#/$defs/"))
        root = {}  # once: a reference may lead to itself
    if not isinstance(schema, dict):
        return set()
    stated = schema.get("type")
    types = {kind for kind in (stated if isinstance(stated, list) else [stated]) if isinstance(kind, str)}
    types |= {"string" for value in _listed(schema, "enum") if isinstance(value, str)}
    branches = (branch for word in ("anyOf", "oneOf") for branch in _listed(schema, word))
    return types.union(*(_types(branch, root) for branch in branches))


def _member(schema: dict[str, Any], name: str) -> dict[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, dict) else {}


def _listed(schema: dict[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []

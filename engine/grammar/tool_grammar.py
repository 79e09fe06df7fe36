"""Grammars, as xgrammar's structural tags, of answers to requests with tools or a response format.

A grammar spells calls exactly as the model's own format does, which the model was trained on and the parser expects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...schemas.errors import InvalidRequest
from ...schemas.jobs import Form
from ...schemas.params import Grammar
from ..text.tool_formats import REASONING_FORMATS, TOOL_FORMATS, Layout, ToolFormat, format_of
from .expressions.writing import by_automaton, is_automatic

Format = dict[str, Any]
"""A part of a structural tag, https://xgrammar.mlc.ai/docs/structural_tag."""

MAX_WHITESPACE = 2  # characters in a row: without a limit a small model pads its JSON forever
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_ANY_TEXT: Format = {"type": "any_text"}
_INPUTS = {  # what stands around the string of a custom tool, by the layout's style
    "json": ('{"input": "', '"}'),
    "python": ('input="', '"'),
    "qwen_xml": ("<parameter=input>\n", "\n</parameter>"),
}


def answer_grammar(
    form: Form,
    *,
    tool_choice: str,
    named: str | None,
    parallel: bool,
    schemas: Mapping[str, Mapping[str, Any]],
    response: Grammar | None,
    inputs: Mapping[str, str] = MappingProxyType({}),
    thinks: bool = True,
) -> Grammar | None:
    """The grammar of an answer, which may begin with reasoning; None where nothing is constrained.

    `tool_choice` is "auto" (any text, but only well-formed calls of `form.tools`; or `response`, if given), "required"
    (calls and nothing else), "named" (one call of the tool `named`) or "none". Without `parallel` there is at most one
    call. Arguments follow the tool's schema in `schemas`; without one they are any JSON object. Those of a tool in
    `inputs` are one string, `input`, and its pattern is of what the format writes, between quotes if there are some.
    Without `thinks` nothing comes before what is constrained; text that is not may have a thought all the same.
    Raises `InvalidRequest` where a call is required of a model that has no format for calls.
    """
    must = tool_choice in ("required", "named")
    if must and (form.tool_format is None or not form.tools):
        raise InvalidRequest("this model's chat template has no tool calls to ask for", param="tool_choice")
    names = [named] if named else list(form.tools)
    if form.tool_format is None or tool_choice == "none":
        names = []
    tools = format_of(form)
    is_harmony = tools is TOOL_FORMATS["harmony"]
    if not names and (response is None or not (is_harmony or (form.reasoning_format is not None and thinks))):
        return response
    several = parallel and not named
    calls = [_section(tools.layout, names, schemas, inputs, several)] if tools and names else []
    said = [_embedded(response)] if response and not must else []
    if is_harmony:
        answer = _harmony(form, calls, said, must)
    elif tools and names and not must and not said:
        answer = _free(tools, names, calls[0], several)
    else:
        answer = _one_of([*said, *calls])
    if form.reasoning_format is not None and not is_harmony:
        begin, end = REASONING_FORMATS[form.reasoning_format]
        thought = _enclosed("" if form.thinking else begin, _ANY_TEXT, end)
        gap: list[Format] = [{"type": "regex", "pattern": r"\n{0,2}"}] if must or said else []
        if form.thinking:
            answer = _sequence([thought, *gap, answer])
        elif said and response and response.kind != "json_schema":
            answer = _sequence([_optional(_sequence([thought, *gap])), answer]) if thinks else answer
        elif gap and not thinks:
            answer = _sequence([*gap, answer])
        else:  # models begin JSON and calls like this without a thought, too, and white space does not change those
            answer = _sequence([_optional(thought), *gap, answer])
    return Grammar(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": answer}))


def _harmony(form: Form, calls: list[Format], said: list[Format], must: bool) -> Format:
    """Messages: reasoning, and text before calls where they are optional; then calls or the final answer."""
    following = "<|end|><|start|>assistant"
    begins = ["<|channel|>analysis<|message|>", *([] if must or not calls else ["<|channel|>commentary<|message|>"])]
    before = _star(_one_of([_enclosed(begin, _ANY_TEXT, following) for begin in begins]))
    text = [*said, _ANY_TEXT | {"excludes": ["<|channel|>", "<|start|>", "<|end|>"]}][0]
    final = [] if must else [_sequence([_const("<|channel|>final<|message|>"), text])]
    opened = [_enclosed("", _ANY_TEXT, following)] if form.thinking else []
    return _sequence([*opened, before, _one_of([*calls, *final])])


def _free(tools: ToolFormat, names: list[str], section: Format, several: bool) -> Format:
    """Any text in which every call of a known tool is well formed."""
    opening = tools.layout.begin + tools.layout.open
    markers = [marker for marker in tools.markers if opening.startswith(marker)]
    text = _ANY_TEXT | {"excludes": markers or [f"{opening}{name}{tools.layout.middle[:1]}" for name in names]}
    called = _sequence([text, section])
    return _sequence([_star(called), text]) if several else _one_of([text, called])


def _section(
    layout: Layout,
    names: list[str],
    schemas: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, str],
    several: bool,
) -> Format:
    """Calls and nothing else."""
    tags = []
    for name in names:
        schema = _ANY_OBJECT | dict(schemas.get(name, ()))
        if name in inputs:
            begin, end = _INPUTS[layout.style]
            arguments = _sequence([_const(begin), _matching(inputs[name]), _const(end)])
        else:
            arguments = _keywords(schema) if layout.style == "python" else _json(schema, layout.style)
        tags.append(_enclosed(f"{layout.open}{name}{layout.middle}", arguments, layout.close))
    some = {"separator": layout.separator, "at_least_one": True, "stop_after_first": not several}
    calls = {"type": "tags_with_separator", "tags": tags} | some
    return _sequence([_const(layout.begin), calls, _const(layout.end)])


def _keywords(schema: dict[str, Any]) -> Format:
    """Keyword arguments with JSON values, in the order of the schema's properties; any if it names none."""
    properties: dict[str, Any] = schema.get("properties", {})
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    required = schema.get("required", ())
    pairs = [
        (name, _sequence([_const(f"{name}="), _json(part | shared if isinstance(part, dict) else part)]))
        for name, part in properties.items()
    ]
    if not pairs and schema != _ANY_OBJECT:
        return _const("")
    if not pairs:
        pair = _sequence([{"type": "regex", "pattern": r"[a-zA-Z_][a-zA-Z0-9_]{0,63}="}, _json(True)])
        return _optional(_sequence([pair, _star(_sequence([_const(", "), pair]))]))
    choices: list[Format] = []
    for index, (name, pair) in enumerate(pairs):
        tail = [(late, _sequence([_const(", "), text])) for late, text in pairs[index + 1 :]]
        choices.append(_sequence([pair, *(text if late in required else _optional(text) for late, text in tail)]))
        if name in required:
            return _one_of(choices)
    return _optional(_one_of(choices))


def _embedded(response: Grammar) -> Format:
    """A grammar as part of another."""
    match response.kind:
        case "json_schema":
            return _json(json.loads(response.text))
        case "regex":
            return {"type": "regex", "pattern": response.text}
        case "ebnf":
            return {"type": "grammar", "grammar": response.text}
        case "structural_tag":
            inner: Format = json.loads(response.text)["format"]
            return inner


def _json(schema: dict[str, Any] | bool, style: str = "json") -> Format:
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": MAX_WHITESPACE}


def _matching(pattern: str) -> Format:
    """The texts of a pattern that `check_pattern` has made."""
    if is_automatic(pattern):
        return {"type": "grammar", "grammar": by_automaton(pattern)}
    return {"type": "regex", "pattern": pattern}


def _enclosed(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": [part for part in elements if part != _const("")]}


def _one_of(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _star(content: Format) -> Format:
    return {"type": "star", "content": content}


def _const(value: str) -> Format:
    return {"type": "const_string", "value": value}

"""How models write tool calls and thoughts: one row of a table for each format serves the parser and the grammar.

The layouts are those of the models' public chat templates.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from ...schemas.jobs import Form
from . import tool_readers as readers
from .tool_readers import DEEPSEEK_NAME, Read


class Layout(NamedTuple):
    """`begin` CALL (`separator` CALL)… `end`, where a call is `open` NAME `middle` ARGUMENTS `close`."""

    open: str
    middle: str
    close: str
    separator: str = ""
    begin: str = ""
    end: str = ""
    style: Literal["json", "qwen_xml", "python"] = "json"


class ToolFormat(NamedTuple):
    """`signs` are what a chat template of this format has all of. `begins` stand in front of a call and `ends` behind
    it; `silent` markers say nothing by themselves."""

    layout: Layout
    read: Read
    signs: tuple[str, ...]
    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        return tuple(dict.fromkeys(_MARKER.findall(" ".join((*self.layout, *self.begins, *self.ends, *self.silent)))))


_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_CALLS = "<\uff5ctool▁calls▁begin\uff5c>"
_CALLS_END = "<\uff5ctool▁calls▁end\uff5c>"
_CALL = "<\uff5ctool▁call▁begin\uff5c>"
_CALL_END = "<\uff5ctool▁call▁end\uff5c>"
_LLAMA = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")

# The order is that of the search for signs: what is more particular comes first.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(
        Layout(
            "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", "<|call|><|start|>assistant"
        ),
        readers.read_harmony,
        signs=("<|channel|>", "<|message|>"),
        begins=("<|start|>", "<|channel|>", " to=functions."),
        ends=("<|call|>", "<|end|>"),
    ),
    "deepseek": ToolFormat(
        Layout(f"{_CALL}function{DEEPSEEK_NAME}", "\n```json\n", f"\n```{_CALL_END}", "\n", _CALLS, _CALLS_END),
        readers.read_named,
        signs=(_CALL, "```json"),
        begins=(_CALL,),
        ends=("```", _CALL_END),
        silent=(_CALLS, _CALLS_END),
    ),
    "deepseek_v3_1": ToolFormat(
        Layout(_CALL, DEEPSEEK_NAME, _CALL_END, "", _CALLS, _CALLS_END),
        readers.read_named,
        signs=(_CALL,),
        begins=(_CALL,),
        ends=(_CALL_END,),
        silent=(_CALLS, _CALLS_END),
    ),
    "mistral_args": ToolFormat(
        Layout("[TOOL_CALLS]", "[ARGS]", ""),
        readers.read_mistral,
        signs=("[TOOL_CALLS]", "[ARGS]"),
        begins=("[TOOL_CALLS]",),
        silent=("[CALL_ID]",),
    ),
    "mistral": ToolFormat(
        Layout('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]"),
        readers.read_mistral,
        signs=("[TOOL_CALLS]",),
        begins=("[TOOL_CALLS]",),
    ),
    "qwen3_coder": ToolFormat(
        Layout("<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", "\n", style="qwen_xml"),
        readers.read_qwen_xml,
        signs=("<function=", "<parameter="),
        begins=("<tool_call>", "<function="),
        ends=("</tool_call>",),
    ),
    "hermes": ToolFormat(
        Layout('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
        readers.read_object,
        signs=("<tool_call>", "arguments"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
    ),
    "pythonic": ToolFormat(
        Layout("", "(", ")", ", ", "[", "]", style="python"),
        readers.read_pythonic,
        signs=("[func_name1(",),
        begins=("[",),
        silent=_LLAMA,
    ),
    "llama3_json": ToolFormat(
        Layout('{"name": "', '", "parameters": ', "}", "; "),
        readers.read_llama,
        signs=("header_", '"parameters": '),  # <|start_header_id|>, or <|header_start|>
        begins=("{",),
        ends=(";",),
        silent=_LLAMA,
    ),
}

REASONING_FORMATS: dict[str, tuple[str, str]] = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "think": ("<think>", "</think>"),
}
"""What begins and what ends a thought."""


def thought_end(form: Form | None) -> str:
    """What ends a thought in answers of this form; empty where they have none."""
    return REASONING_FORMATS[form.reasoning_format][1] if form and form.reasoning_format else ""


def format_of(form: Form) -> ToolFormat | None:
    """The format that a text is read by: harmony's comes in messages even where there are no tools."""
    name = form.tool_format or ("harmony" if form.reasoning_format == "harmony" else None)
    return TOOL_FORMATS[name] if name else None

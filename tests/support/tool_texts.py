"""Answers of models of many families, written down after their public chat templates, and how they are to be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.engine.text.tool_formats import Layout
from penstock.schemas.jobs import Form

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "detail": {"type": "object", "properties": {"units": {"type": "array", "items": {"type": "string"}}}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    },
    "get_time": {"type": "object", "properties": {}},
}

Call = tuple[str, dict[str, Any]]
HARD = {"path": "a}b].txt", "content": "say \"}{\" \\ é 東京\n\t</tool_call> '[TOOL_CALLS]' ;"}
NESTED = {"city": "Zürich", "detail": {"units": ["°C", "{", "}"]}}


class Recorded(NamedTuple):
    """`text` as the model wrote it, and what a client reads of it."""

    family: str
    form: Form
    text: str
    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


def form(tools: str | None, reasoning: str | None = None, thinking: bool = False) -> Form:
    return Form(tool_format=tools, reasoning_format=reasoning, tools=TOOLS, thinking=thinking)


def deepseek(text: str) -> str:
    """With the bars that DeepSeek's markers have."""
    return text.replace("|", "\uff5c")


def written(layout: Layout, calls: list[Call], literal: Callable[[Any], str] = repr) -> str:
    """Calls as a format's layout has them; `literal` writes the values of keywords."""
    each = [
        f"{layout.open}{name}{layout.middle}{_arguments(layout, value, literal)}{layout.close}" for name, value in calls
    ]
    return layout.begin + layout.separator.join(each) + layout.end


def _arguments(layout: Layout, value: dict[str, Any], literal: Callable[[Any], str]) -> str:
    match layout.style:
        case "json":
            return json.dumps(value, ensure_ascii=False)
        case "python":
            return ", ".join(f"{key}={literal(item)}" for key, item in value.items())
        case "qwen_xml":
            return "\n".join(f"<parameter={key}>\n{_xml(item)}\n</parameter>" for key, item in value.items())


def _xml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_PARIS: Call = ("get_weather", {"city": "Paris"})
_ROME: Call = ("get_weather", {"city": "Rome", "days": 3})
_TIME: Call = ("get_time", {})
_HARD = json.dumps(HARD, ensure_ascii=False)
_NESTED = json.dumps(NESTED)
_MARKERS = deepseek(
    "<|tool▁calls▁begin|> <|tool▁call▁begin|> <|tool▁sep|> <|tool▁call▁end|> <|tool▁calls▁end|>"
).split()
_CALLS, _CALL, _SEP, _END, _CALLS_END = _MARKERS

RECORDED = (
    Recorded(
        "Qwen2.5",
        form("hermes"),
        'I\'ll look it up.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        "I'll look it up.",
        (_PARIS, _ROME),
    ),
    Recorded(
        "Qwen3",
        form("hermes", "think"),
        "<think>\nThe user wants {this}.\n\nLet me call.\n</think>\n\n"
        f'<tool_call>\n{{"name": "write_file", "arguments": {_HARD}}}\n</tool_call>',
        "",
        (("write_file", HARD),),
        "The user wants {this}.\n\nLet me call.",
    ),
    Recorded(
        "Qwen3-Thinking",
        form("hermes", "think", thinking=True),
        'Hmm, <tool_call>.\n</think>\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "",
        (_TIME,),
        "Hmm, <tool_call>.",
    ),
    Recorded("Qwen3, plain", form("hermes", "think"), "<think>\n\n</think>\n\nHello  there.\n", "Hello  there.\n"),
    Recorded(
        "Hermes-2-Pro",
        form("hermes"),
        "<tool_call>\n{'arguments': {'city': 'Paris', 'detail': {'units': None}}, 'name': 'get_weather'}\n</tool_call>",
        "",
        (("get_weather", {"city": "Paris", "detail": {"units": None}}),),
    ),
    Recorded(
        "Qwen3-Coder",
        form("qwen3_coder"),
        "On it.\n\n<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        '<parameter=content>\ndef f():\n    return {"a": "<b>"}\n\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=detail>\n{"units": ["C", "</x>"]}\n</parameter>\n</function>\n</tool_call>',
        "On it.",
        (
            ("write_file", {"path": "a.py", "content": 'def f():\n    return {"a": "<b>"}\n'}),
            ("get_weather", {"city": "12", "days": 3, "detail": {"units": ["C", "</x>"]}}),
        ),
    ),
    Recorded(
        "Qwen3-Coder without its tag",
        form("qwen3_coder"),
        "<function=get_time>\n</function>\n</tool_call>",
        "",
        (_TIME,),
    ),
    Recorded(
        "Llama 3.1",
        form("llama3_json"),
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}',
        "",
        (_PARIS, _ROME),
    ),
    Recorded(
        "Llama 3.2",
        form("llama3_json"),
        f'Sure: {{see below}}\n\n{{"type": "function", "name": "get_weather", "parameters": {_NESTED}}}',
        "Sure: {see below}",
        (("get_weather", NESTED),),
    ),
    Recorded(
        "Llama 3.2, pythonic",
        form("pythonic"),
        "[get_weather(city='Paris'), get_weather(city=\"Rome\", days=3), get_time()]",
        "",
        (_PARIS, _ROME, _TIME),
    ),
    Recorded(
        "Llama 4, pythonic",
        form("pythonic"),
        f"A [note].\n<|python_start|>[write_file(path={HARD['path']!r}, content={HARD['content']!r}), "
        "get_weather(city='Zürich', detail={'units': ['°C', '{', '}']})]<|python_end|>",
        "A [note].",
        (("write_file", HARD), ("get_weather", NESTED)),
    ),
    Recorded(
        "Mistral 7B v0.3",
        form("mistral"),
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
        "",
        (_PARIS, _ROME),
    ),
    Recorded(
        "Mistral Small",
        form("mistral"),
        f'One moment.[TOOL_CALLS][{{"name": "write_file", "arguments": {_HARD}, "id": "9Ae3bDc2F"}}]',
        "One moment.",
        (("write_file", HARD),),
    ),
    Recorded(
        "Ministral 3",
        form("mistral_args", "mistral"),
        f"[THINK]Two things.[/THINK]Well.[TOOL_CALLS]write_file[ARGS]{_HARD}[TOOL_CALLS]get_time[ARGS]{{}}",
        "Well.",
        (("write_file", HARD), _TIME),
        "Two things.",
    ),
    Recorded(
        "Mistral Small 3.2",
        form("mistral_args"),
        '[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time{}',
        "",
        (_PARIS, _TIME),
    ),
    Recorded(
        "DeepSeek V3",
        form("deepseek"),
        f'Let me see.{_CALLS}{_CALL}function{_SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{_END}\n'
        f"{_CALL}function{_SEP}write_file\n```json\n{_HARD}\n```{_END}{_CALLS_END}",
        "Let me see.",
        (_PARIS, ("write_file", HARD)),
    ),
    Recorded(
        "DeepSeek R1",
        form("deepseek", "think", thinking=True),
        f"<think>\nA clock.\n</think>\n\n{_CALLS}{_CALL}function{_SEP}get_time\n```json\n{{}}\n```{_END}{_CALLS_END}",
        "",
        (_TIME,),
        "A clock.",
    ),
    Recorded(
        "DeepSeek V3.1",
        form("deepseek_v3_1", "think"),
        f'Both.{_CALLS}{_CALL}get_weather{_SEP}{{"city": "Paris"}}{_END}{_CALL}get_time{_SEP}{{}}{_END}{_CALLS_END}',
        "Both.",
        (_PARIS, _TIME),
    ),
    Recorded(
        "gpt-oss, call",
        form("harmony", "harmony"),
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I'll check.<|end|><|start|>assistant<|channel|>commentary to=functions.write_file <|constrain|>json"
        f"<|message|>{_HARD}<|call|>",
        "I'll check.",
        (("write_file", HARD),),
        "Need the weather.",
    ),
    Recorded(
        "gpt-oss, recipient first",
        form("harmony", "harmony"),
        ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
        "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}",
        "",
        (_PARIS, _TIME),
    ),
    Recorded(
        "gpt-oss, answer",
        Form(reasoning_format="harmony"),
        "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>analysis<|message|>Yes.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>**Four.**",
        "**Four.**",
        reasoning="Simple.\nYes.",
    ),
)

"""A model's form is chosen from its own chat template, or by name."""

from __future__ import annotations

import pytest
from tool_texts import deepseek

from penstock.engine.text.forms import choose_form, ends_in_thought, markers
from penstock.engine.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from penstock.schemas.errors import ConfigurationError
from penstock.schemas.jobs import Form

# Pieces of public chat templates: family, piece, tool format, reasoning format.
TEMPLATES: tuple[tuple[str, str, str | None, str | None], ...] = (
    (
        "Qwen2.5",
        "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>"
        '\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>',
        "hermes",
        None,
    ),
    (
        "Qwen3",
        "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
        '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}',
        "hermes",
        "think",
    ),
    (
        "Qwen3-Coder",
        "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
        "{{- '<parameter=' + args_name + '>\\n' }}{%- set arguments = tool_call.arguments %}",
        "qwen3_coder",
        None,
    ),
    (
        "Llama 3.1",
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}"
        '{{- \'{"name": "\' + tool_call.name + \'", \' }}{{- \'"parameters": \' }}{{- "<|eom_id|>" }}',
        "llama3_json",
        None,
    ),
    ("Llama 4", "{{- '<|header_start|>assistant' }}{{- '\"parameters\": ' }}", "llama3_json", None),
    (
        "Llama 3.2, pythonic",
        "<|start_header_id|>system<|end_header_id|>\\n\\nyou MUST put it in the format of "
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        "pythonic",
        None,
    ),
    (
        "Mistral 7B v0.3",
        '{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}',
        "mistral",
        None,
    ),
    (
        "Ministral 3",
        "{{- '[THINK]' + block['thinking'] + '[/THINK]' }}"
        "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}",
        "mistral_args",
        "mistral",
    ),
    (
        "DeepSeek V3",
        "'<|tool▁calls▁begin|><|tool▁call▁begin|>' + tool['type'] + '<|tool▁sep|>' + tool['function']['name'] + '\\n'"
        " + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<|tool▁call▁end|>'",
        "deepseek",
        None,
    ),
    (
        "DeepSeek V3.1",
        "'<|tool▁call▁begin|>'+ tool['function']['name'] + '<|tool▁sep|>' + tool['function']['arguments']"
        "{%- if not thinking -%}{{'</think>'}}{%- else -%}{{'<think>'}}{%- endif -%}",
        "deepseek_v3_1",
        "think",
    ),
    (
        "gpt-oss",
        '{{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name + "<|channel|>commentary " }}'
        '{{- (tool_call.content_type if tool_call.content_type else "json") + "<|message|>" }}',
        "harmony",
        "harmony",
    ),
    (
        "GLM 4.5",
        "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>{% set _args = tc.arguments %}<think></think>",
        None,
        "think",
    ),
    ("Gemma 2", "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}", None, None),
    ("none", "", None, None),
)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"), [row[1:] for row in TEMPLATES], ids=[r[0] for r in TEMPLATES]
)
def test_form_follows_from_the_template(template: str, tools: str | None, reasoning: str | None) -> None:
    template = deepseek(template) if "▁" in template else template
    assert choose_form(template, ()) == Form(tool_format=tools, reasoning_format=reasoning)


def test_vocabulary_tells_of_thoughts_too() -> None:
    assert choose_form("", {"</think>": 1}).reasoning_format == "think"
    assert choose_form("", {"[THINK]": 1}).reasoning_format == "mistral"
    assert choose_form("", {"<|end|>": 1}).reasoning_format is None


def test_formats_may_be_named_and_switched_off() -> None:
    template = TEMPLATES[1][1]
    assert choose_form(template, (), tool_format="pythonic", reasoning_format="mistral") == Form(
        tool_format="pythonic", reasoning_format="mistral"
    )
    assert choose_form(template, (), tool_format="none", reasoning_format="none") == Form()


def test_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"tool format 'hermse'.*auto, none, .*hermes.*qwen3_coder"):
        choose_form("", (), tool_format="hermse")
    with pytest.raises(ConfigurationError, match=r"reasoning format 'thonk'.*auto, none, .*think"):
        choose_form("", (), reasoning_format="thonk")


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_all_that_a_call_begins_with_is_shown(name: str) -> None:
    row = TOOL_FORMATS[name]
    shown = markers(Form(tool_format=name))
    assert all(len(marker) > 1 for marker in shown)
    begin = row.layout.begin + row.layout.open + row.layout.middle
    for special in ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "<|channel|>", "<|message|>", deepseek("<|tool▁sep|>")):
        assert (special in begin) <= (special in shown)


def test_markers_are_of_both_formats() -> None:
    assert set(markers(Form(tool_format="hermes", reasoning_format="think"))) == {
        *("<think>", "</think>", "<tool_call>", "</tool_call>")
    }
    assert {"<|channel|>", "<|start|>", "<|end|>"} <= set(markers(Form(reasoning_format="harmony")))
    assert markers(Form()) == ()


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_prompt_may_end_in_a_thought(name: str) -> None:
    begin, end = REASONING_FORMATS[name]
    form = Form(reasoning_format=name)
    assert ends_in_thought(f"user: hi assistant: {begin}\n", form)
    assert not ends_in_thought(f"user: what is {begin}? assistant:", form)
    assert not ends_in_thought(f"{begin}\n\n{end}\n\n", form)
    assert not ends_in_thought(begin, Form())

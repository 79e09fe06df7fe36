"""Chat templates render as transformers renders them, and reach nothing but what they are given."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from templates import HERMES, NOTE, SEARCH, THINKING
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.engine.text.chat_templates import ChatTemplates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'bot:' if add_generation_prompt }}"
TEMPLATES = (
    HERMES,
    THINKING,
    PLAIN,
    "{{ bos_token }}{% for m in messages %}[{{ m.content | trim }}]{{ eos_token }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}\n    {{- m | tojson(indent=2) }}{% endfor %}",
    "{% set ns = namespace(n=0, self=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}",
    "{{ dict(a=1, **dict.fromkeys(['b', 'c'], 2)) | tojson(sort_keys=true) }}{{ messages | length }}",
    "{{ documents is none }}{{ tools | tojson if tools else 'no tools' }}{{ colour | default('none') }}",
    "{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
)
LEFT = "CONTINUE_FINAL_MESSAGE_TAG"  # in transformers' prompts that print a message's reasoning more than once
TEXTS = st.text(max_size=12)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS},
        optional={"name": st.none() | TEXTS, "reasoning_content": TEXTS, "thinking": TEXTS, "reasoning": st.none()},
    ),
    min_size=1,
    max_size=4,
)


def reference(template: str, messages: list[dict[str, Any]], **arguments: Any) -> str:
    """What transformers makes of it, which leaves out what is None before."""
    chat = [{name: value for name, value in message.items() if value is not None} for message in messages]
    rendered = render_jinja_template([chat], chat_template=template, **{**SPECIAL, **arguments})[0]
    return str(rendered[0]).replace(f"{LEFT} ", "").replace(LEFT, "")


def outcome(render: Any, *arguments: Any, **options: Any) -> str:
    """The text, or the kind of the error."""
    try:
        return f"text {render(*arguments, **options)}"
    except (TemplateError, ValueError, TypeError) as error:
        return type(error).__name__


@given(
    template=st.sampled_from(TEMPLATES),
    messages=MESSAGES,
    tools=st.sampled_from([None, [SEARCH], [SEARCH, NOTE]]),
    options=st.fixed_dictionaries(
        {}, optional={"colour": TEXTS, "bos_token": TEXTS, "enable_thinking": st.booleans(), "n": st.floats(0, 1)}
    ),
    goes_on=st.sampled_from([False, True, "content", "reasoning_content", "thinking"]),
    prompts=st.booleans(),
)
def test_every_prompt_is_that_of_transformers(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    goes_on: bool | str,
    prompts: bool,
) -> None:
    options["add_generation_prompt"] = prompts and not goes_on
    options["continue_final_message"] = goes_on
    ours = outcome(ChatTemplates(template, SPECIAL).render, template, messages, tools, **options)
    assert ours == outcome(reference, template, messages, tools=tools, **options)


def test_a_message_in_parts_goes_on_after_its_last_text() -> None:
    template = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    chat = [{"role": "assistant", "content": parts}]
    assert ChatTemplates(template, {}).render(template, chat, continue_final_message=True) == "<a><b "
    assert parts[1]["text"] == "b ", "the caller's messages stay as they are"


def test_reasoning_that_is_printed_twice_goes_on_after_the_second_and_holds_no_mark() -> None:
    template = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}</s>{% endfor %}"
    chat = [{"role": "assistant", "content": "", "reasoning": "so far "}]
    found = ChatTemplates(template, {}).render(template, chat, continue_final_message="reasoning")
    assert found == "so far |so far "


def test_a_template_that_trims_is_cut_where_its_text_ends() -> None:
    template = "{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}"
    chat = [{"role": "assistant", "content": "so far  "}]
    assert ChatTemplates(template, {}).render(template, chat, continue_final_message=True) == "so far"


@pytest.mark.parametrize(
    ("templates", "chosen"),
    [
        ("one", ("one", "one")),
        ({"default": "one", "tool_use": "two"}, ("one", "two")),
        ({"default": "one", "rag": "two"}, ("one", "one")),
    ],
)
def test_a_template_is_chosen_by_whether_there_are_tools(
    templates: str | dict[str, str], chosen: tuple[str, str]
) -> None:
    found = ChatTemplates(templates, {})
    assert (found.select(has_tools=False), found.select(has_tools=True)) == chosen


def test_several_templates_without_a_default_are_named() -> None:
    with pytest.raises(ValueError, match="the model has the templates rag, tool_use, and none is the default"):
        ChatTemplates({"rag": "x", "tool_use": "y"}, {}).select(has_tools=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{% set n = namespace(__class__=1) %}{{ n }}",
        "{% set n = namespace() %}{% set n._secret = 1 %}{{ n }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_a_template_reaches_nothing_of_python(template: str) -> None:
    ours = outcome(ChatTemplates(template, {}).render, template, [{"role": "user", "content": "hi"}])
    assert "class" not in ours and "_secret" not in ours and "object" not in ours
    assert ours == outcome(reference, template, [{"role": "user", "content": "hi"}])


def test_only_values_of_json_reach_a_template() -> None:
    class Role(StrEnum):
        USER = "user"

    template = "{{ messages[0].role.__class__ | default('hidden') }}{{ messages[0].role }}"
    assert "user" in ChatTemplates(PLAIN, {}).render(PLAIN, [{"role": Role.USER, "content": "hi"}])
    with pytest.raises(TypeError, match="a bytes is no value of JSON"):
        ChatTemplates(template, {}).render(template, [{"role": b"user"}])


def test_a_template_may_ask_for_the_date_and_refuse() -> None:
    template = "{{ strftime_now('%Y') }}{% if messages | length > 1 %}{{ raise_exception('one at most') }}{% endif %}"
    chat = [{"role": "user", "content": "hi"}]
    assert int(ChatTemplates(template, {}).render(template, chat)) in (datetime.now().year, datetime.now().year - 1)
    with pytest.raises(TemplateError, match="one at most"):
        ChatTemplates(template, {}).render(template, chat * 2)

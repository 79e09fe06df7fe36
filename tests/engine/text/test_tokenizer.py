"""Chats become prompts in one place; what templates and models do not know is adapted or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine import Tokenizer, load_tokenizer
from penstock.engine.models import BUNDLED, resolve_model
from penstock.engine.text.byte_tokenizer import ByteTokenizer
from penstock.engine.text.chat_templates import ChatTemplates
from penstock.schemas.errors import InvalidRequest

HELLO = [{"role": "user", "content": "hi"}]
TEMPLATES = {
    "parts": "{% for m in messages %}{% for part in m['content'] %}<{{ part['text'] }}>{% endfor %}{% endfor %}",
    "strict": "{% if messages[0].role != 'user' %}{{ raise_exception('user goes first') }}{% endif %}ok",
    "buggy": "{{ messages[0].content + 1 }}",
    "switch": "{{ 'quick' if enable_thinking is defined and not enable_thinking else 'slow' }}",
    "plain": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
    "open": "{{ messages[0].content }}<think>\n",
    "calls": "{% for call in messages[0].tool_calls %}{{ call.function.arguments.city }}{% endfor %}",
    "none": None,
}


@pytest.fixture
def tokenizer(model_directory: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer(model_directory("llama"))


def with_template(tokenizer: Tokenizer, name: str) -> Tokenizer:
    tokenizer._templates = ChatTemplates(TEMPLATES[name], {})
    return tokenizer


def test_a_chat_is_rendered_by_the_models_own_template(tokenizer: Tokenizer) -> None:
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(HELLO) == expected
    assert ByteTokenizer().render_chat(HELLO) == expected
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    prefilled = [*HELLO, {"role": "assistant", "content": "I"}]
    assert tokenizer.render_chat(prefilled, continue_final_message=True).endswith("assistant\nI")


def test_a_chat_in_tokens_has_no_token_but_the_templates(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(HELLO)
    assert tokenizer.decode(ids) == tokenizer.render_chat(HELLO)
    assert sum(token in tokenizer.special_token_ids for token in ids) == 3


def test_the_beginning_is_not_marked_twice(tokenizer: Tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    assert tokenizer.fast is not None
    tokenizer.fast.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer._templates = ChatTemplates("<|endoftext|>{{ messages[0].content }}", {})
    assert tokenizer.encode("hi")[0] == 0
    assert tokenizer.encode_chat(HELLO).count(0) == 1


def test_roles_and_parts_become_what_templates_know(tokenizer: Tokenizer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None},
    ]
    before = repr(messages)
    assert with_template(tokenizer, "plain").render_chat(messages) == "system:be brief;assistant:;"
    assert with_template(tokenizer, "parts").render_chat(messages) == "<be brief><>"
    assert repr(messages) == before


def test_arguments_of_tool_calls_become_objects(tokenizer: Tokenizer) -> None:
    def message(arguments: str) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call]}

    assert with_template(tokenizer, "calls").render_chat([message('{"city": "Bern"}')]) == "Bern"
    whole = "{% for call in messages[0].tool_calls %}{{ call.function.arguments }}{% endfor %}"
    tokenizer = with_template(tokenizer, "plain")
    tokenizer._templates = ChatTemplates(whole, {})
    for empty in ("", " ", "{}"):
        assert tokenizer.render_chat([message(empty)]) == "{}"
    for text in ('{"city', "[1]", "null", '{"a":' * 300 + "1" + "}" * 300, "[" * 100_000):
        assert tokenizer.render_chat([message(text)]) == text
    half = tokenizer.render_chat([message('{"c": "\\ud83d", "\\uDE00": 1}')])
    assert half == repr({"c": "\ufffd", "\ufffd": 1}) and tokenizer.encode(half)
    tokenizer._templates = ChatTemplates(whole.replace("arguments", "arguments | items | list"), {})
    assert tokenizer.render_chat([message('{"city')]) == "[]"  # it takes objects alone
    assert tokenizer.render_chat([message('{"city": "Bern"}')]) == "[('city', 'Bern')]"


def test_tools_reach_the_template(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert '"name": "weather"' in tokenizer.render_chat(HELLO, tools)
    assert '"name": "weather"' in ByteTokenizer().render_chat(HELLO, tools)


def test_thinking_is_switched_off_with_and_without_the_templates_help(tokenizer: Tokenizer) -> None:
    assert with_template(tokenizer, "switch").render_chat(HELLO, enable_thinking=False) == "quick"
    assert with_template(tokenizer, "plain").render_chat(HELLO, enable_thinking=False) == "user:hi;"
    tokenizer.vocabulary = {**tokenizer.vocabulary, "<think>": 600, "</think>": 601}
    assert tokenizer.render_chat(HELLO, enable_thinking=False) == "user:hi;<think>\n\n</think>\n\n"
    assert tokenizer.render_chat(HELLO, enable_thinking=True) == "user:hi;"
    assert with_template(tokenizer, "open").render_chat(HELLO, enable_thinking=False) == "hi<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("none", HELLO, "this model has no chat template"),
        ("strict", [{"role": "assistant", "content": "hi"}], "chat template refuses this: user goes first"),
        ("buggy", HELLO, "chat template refuses this"),
        ("plain", [{"role": "user", "content": [{"type": "image_url"}]}], "a content part is of type 'image_url'"),
        ("plain", [{"role": "user", "content": 5}], "must be a string or an array of parts"),
    ],
)
def test_what_a_template_cannot_take_is_refused(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        with_template(tokenizer, template).render_chat(messages)
    assert caught.value.param == "messages"


@given(text=st.text(max_size=60))
def test_the_bytes_of_the_pieces_are_the_bytes_of_the_text(model_directory: Callable[[str], Path], text: str) -> None:
    for tokenizer in (load_tokenizer(str(model_directory("llama"))), ByteTokenizer()):
        pieces = [tokenizer.piece(token) for token in tokenizer.encode(text)]
        assert bytes(byte for piece in pieces for byte in piece.bytes).decode() == text


def test_added_special_tokens_leave_clean_text_too(
    tokenizer: Tokenizer, model_directory: Callable[[str], Path]
) -> None:
    from tokenizers import AddedToken

    tokenizer.huggingface.add_tokens([AddedToken("<|pause|>", special=True), AddedToken("<think>")])
    saved = model_directory("llama").parent / "added"
    tokenizer.huggingface.save_pretrained(saved)
    (saved / "config.json").write_text((model_directory("llama") / "config.json").read_text())
    again = Tokenizer(saved)
    assert {512} == again.special_token_ids - tokenizer.special_token_ids
    assert again.decode([512, 513], skip_special_tokens=True) == "<think>"


def test_end_tokens_come_from_all_files(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.vocabulary_size == 512


def test_other_threads_go_on_while_a_long_text_becomes_tokens() -> None:
    """As the event loop of a server, which must not stand still for one client's text."""
    tokenizer = load_tokenizer(str(resolve_model(BUNDLED)), "paged")
    encoding = threading.Thread(target=tokenizer.encode, args=("The quick brown fox. " * 20_000,))
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0)  # lets go of the interpreter, as an event loop does where it waits
        turns += 1
    assert turns > 100


def test_the_memory_of_a_long_text_is_given_back(tokenizer: Tokenizer) -> None:
    """A bridge that had counted a few texts of 6 MB kept gigabytes."""
    text = "penstock serves models " * 50_000
    with ThreadPoolExecutor(1) as threads:  # which has a heap of its own
        threads.submit(tokenizer.encode, "short").result()
        before = psutil.Process().memory_info().rss
        assert threads.submit(lambda: len(tokenizer.encode(text))).result() > 100_000
        assert psutil.Process().memory_info().rss - before < 48 << 20

"""Grammars let a model write its own format's calls and no others, and what they allow is read as calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_texts import RECORDED, TOOLS, Call, form, written
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from penstock.engine.grammar.patterns import check_pattern
from penstock.engine.grammar.tool_grammar import answer_grammar
from penstock.engine.text.output_parser import OutputParser
from penstock.engine.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.events import ToolCallDelta
from penstock.schemas.jobs import Form
from penstock.schemas.params import Grammar

FORMATS = sorted(TOOL_FORMATS)
_WRITING = [char.encode() for char in "abz019 \n\"'{}[]()<>/=:,._;|`-#"]
_ENDS = [b"</parameter>", b"</function>", b"<|end|>", b'"}', b"<|channel|>commentary to=functions."]
_VOCABULARY = [*(bytes([value]) for value in range(256)), *_ENDS, b"<eos>"]
_STOP = len(_VOCABULARY) - 1
_COMPILER = GrammarCompiler(TokenizerInfo(_VOCABULARY, vocab_type=VocabType.RAW, stop_token_ids=[_STOP]), max_threads=1)


def grammar(
    form: Form,
    choice: str = "required",
    *,
    named: str | None = None,
    parallel: bool = True,
    strict: Collection[str] = tuple(TOOLS),
    response: Grammar | None = None,
    thinks: bool = True,
) -> Grammar | None:
    schemas = {name: form.tools[name] for name in strict if name in form.tools}
    asked: dict[str, Any] = {"parallel": parallel, "schemas": schemas, "response": response, "thinks": thinks}
    return answer_grammar(form, tool_choice=choice, named=named, **asked)


def compiled(one: Grammar | None) -> CompiledGrammar:
    assert one is not None and one.kind == "structural_tag"
    return _COMPILER.compile_structural_tag(one.text)


def allows(one: Grammar | None, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = GrammarMatcher(compiled(one))
    return matcher.accept_string(text) and matcher.accept_token(_STOP)


def message(name: str, text: str) -> str:
    """What a model of the format writes to say something."""
    return f"<|channel|>final<|message|>{text}" if name == "harmony" else text


def calls_of(form: Form, text: str) -> tuple[list[Call], str]:
    parser = OutputParser(form, "request", 0)
    made: list[ToolCallDelta] = []
    content = ""
    for parsed in (parser.push(text), parser.finish()):
        made += parsed.tool_calls
        content += parsed.text
    names = {delta.index: delta.name for delta in made if delta.name is not None}
    arguments = {index: "".join(delta.arguments for delta in made if delta.index == index) for index in names}
    return [(str(names[index]), json.loads(arguments[index])) for index in names], content


PARIS: Call = ("get_weather", {"city": "Paris"})
ROME: Call = ("get_weather", {"city": "Rome", "days": 3})
TIME: Call = ("get_time", {})
UNKNOWN: Call = ("get_mail", {})
NO_CITY: Call = ("get_weather", {"days": 3})


def text_of(name: str, *calls: Call) -> str:
    return written(TOOL_FORMATS[name].layout, list(calls), json.dumps)


@pytest.mark.parametrize("name", FORMATS)
def test_required_allows_calls_alone(name: str) -> None:
    asked = grammar(form(name))
    assert allows(asked, text_of(name, PARIS))
    assert allows(asked, text_of(name, PARIS, ROME, TIME))
    assert not allows(asked, message(name, "Paris is fine."))
    assert not allows(asked, "")
    assert not allows(asked, text_of(name, UNKNOWN))


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_where_calls_are_not_parallel(name: str) -> None:
    for choice in ("required", "auto"):
        asked = grammar(form(name), choice, parallel=False)
        assert allows(asked, text_of(name, PARIS))
        assert not allows(asked, text_of(name, PARIS, ROME))
    assert allows(grammar(form(name), "auto", parallel=False), message(name, "No call."))


@pytest.mark.parametrize("name", FORMATS)
def test_named_allows_one_call_of_that_tool(name: str) -> None:
    asked = grammar(form(name), "named", named="get_time")
    assert allows(asked, text_of(name, TIME))
    assert not allows(asked, text_of(name, PARIS))
    assert not allows(asked, text_of(name, TIME, TIME))
    assert not allows(asked, message(name, "Noon."))


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_follow_the_schema_of_strict_tools_alone(name: str) -> None:
    strict, loose = grammar(form(name)), grammar(form(name), strict=())
    assert not allows(strict, text_of(name, NO_CITY))
    assert not allows(strict, text_of(name, ("get_weather", {"city": "Rome", "days": "many"})))
    assert allows(loose, text_of(name, NO_CITY))
    assert allows(loose, text_of(name, ("get_weather", {"anything": 1, "city": "x"})))
    assert not allows(loose, text_of(name, PARIS).replace("Paris", 'Pa"ris"').replace("city", "ci<ty"))


@pytest.mark.parametrize("name", FORMATS)
def test_auto_allows_text_and_well_formed_calls(name: str) -> None:
    asked = grammar(form(name), "auto")
    assert allows(asked, message(name, "It {is} [fine], <b>really</b>."))
    assert allows(asked, text_of(name, PARIS, ROME))
    before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" if name == "harmony" else "I [look]. "
    assert allows(asked, before + text_of(name, PARIS))
    assert not allows(asked, text_of(name, NO_CITY))
    assert not allows(asked, before + text_of(name, NO_CITY))
    assert not allows(asked, text_of(name, PARIS)[: -len("get_weather")])
    # Where nothing else marks a call, a name that is no tool's is plain text.
    assert allows(asked, text_of(name, UNKNOWN)) == (name in ("llama3_json", "pythonic"))


@pytest.mark.parametrize("reasoning", sorted(set(REASONING_FORMATS) - {"harmony"}))
def test_thought_comes_first(reasoning: str) -> None:
    begin, end = REASONING_FORMATS[reasoning]
    call = text_of("hermes", PARIS)
    may = grammar(form("hermes", reasoning))
    assert allows(may, call)
    assert allows(may, f"{begin}\nI need <tool_call> now.\n{end}\n\n{call}")
    assert not allows(may, f"{begin}no end {call}")
    assert not allows(may, f"no begin {end}{call}")
    begun = grammar(form("hermes", reasoning, thinking=True))
    assert allows(begun, f"I need {{it}}.{end}{call}")
    assert not allows(begun, call)
    free = grammar(form("hermes", reasoning, thinking=True), "auto")
    assert allows(free, f"<tool_call> it is?{end}\n\nHello.")
    assert not allows(free, f"Hm.{end}\n\n<tool_call> it is?")


@pytest.mark.parametrize("reasoning", sorted(set(REASONING_FORMATS) - {"harmony"}))
def test_a_call_has_no_thought_before_it_if_thinking_is_off(reasoning: str) -> None:
    begin, end = REASONING_FORMATS[reasoning]
    call = text_of("hermes", PARIS)
    may = grammar(form("hermes", reasoning), thinks=False)
    assert allows(may, call) and allows(may, f"\n\n{call}")
    assert not allows(may, f"{begin}\nI need it.\n{end}\n\n{call}")
    free = grammar(form("hermes", reasoning), "auto", thinks=False)  # like text without tools
    assert allows(free, f"{begin}Hm.{end}\n\n{call}") and allows(free, "Hello.")


def test_harmony_thinks_in_a_channel() -> None:
    call = text_of("harmony", PARIS)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for choice in ("auto", "required"):
        assert allows(grammar(form("harmony", "harmony"), choice), thought + thought + call)
        assert allows(grammar(form("harmony", "harmony", thinking=True), choice), f"Hm.<|end|><|start|>assistant{call}")
    assert not allows(grammar(form("harmony", "harmony")), thought + message("harmony", "Text."))
    assert allows(grammar(form("harmony", "harmony"), "auto"), thought + message("harmony", "Text."))
    assert not allows(grammar(form("harmony", "harmony"), "auto"), "Text.")


_NUMBER = Grammar(
    kind="json_schema", text='{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
)
RESPONSES = (
    (_NUMBER, '{"n": 1}', '{"n": "x"}'),
    (Grammar(kind="regex", text="(yes|no)"), "yes", "maybe"),
    (Grammar(kind="ebnf", text='root ::= "a" | "b"'), "a", "c"),
    (
        Grammar(
            kind="structural_tag", text='{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'
        ),
        "x",
        "y",
    ),
)


@pytest.mark.parametrize(("response", "good", "bad"), RESPONSES, ids=[row[0].kind for row in RESPONSES])
def test_response_format_comes_after_the_thought_or_instead_of_calls(response: Grammar, good: str, bad: str) -> None:
    for asked in (
        grammar(form(None, "think"), "none", response=response),
        grammar(form("hermes", "think"), "auto", response=response),
    ):
        assert allows(asked, good) and not allows(asked, bad)
        assert allows(asked, f"<think>{bad}</think>\n\n{good}") and not allows(asked, f"<think>{good}</think>\n\n{bad}")
        # Other than JSON, a text is another one with empty lines before it.
        assert allows(asked, f"\n\n{good}") == (response.kind == "json_schema")
    assert grammar(form(None, "think"), "none", response=response, thinks=False) == response
    off = grammar(form("hermes", "think"), "auto", response=response, thinks=False)
    assert allows(off, good) and not allows(off, f"<think>{bad}</think>\n\n{good}")
    assert allows(off, text_of("hermes", PARIS)) and not allows(off, "<think>" + text_of("hermes", PARIS))
    both = grammar(form("hermes"), "auto", response=response)
    assert allows(both, text_of("hermes", PARIS)) and allows(both, good) and not allows(both, bad)
    assert not allows(both, text_of("hermes", NO_CITY))
    channel = grammar(form(None, "harmony"), "none", response=response)
    assert allows(channel, message("harmony", good)) and not allows(channel, message("harmony", bad))


def test_nothing_is_constrained_without_need() -> None:
    assert grammar(form("hermes"), "none") is None
    assert grammar(form(None, "think"), "auto") is None
    assert grammar(Form(tool_format="hermes"), "auto") is None
    assert grammar(form("hermes"), "none", response=_NUMBER) == _NUMBER


def test_call_is_not_asked_of_a_model_without_a_format() -> None:
    for choice in ("required", "named"):
        with pytest.raises(InvalidRequest, match="no tool calls"):
            grammar(form(None), choice, named="get_time")


@pytest.mark.parametrize("recorded", [one for one in RECORDED if one.calls], ids=lambda one: one.family)
def test_thought_and_text_of_recorded_answers_are_allowed(recorded: Any) -> None:
    """Up to the first call, where models vary more than a grammar lets them."""
    name = recorded.form.tool_format
    layout = TOOL_FORMATS[name].layout
    start = recorded.text.find(layout.begin + layout.open + recorded.calls[0][0] + layout.middle)
    if start > 0:
        before = recorded.text[:start]
        asked = grammar(recorded.form, "auto", strict=())
        assert allows(asked, before + text_of(name, *recorded.calls))


def test_pythonic_keywords_follow_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/unit"}, "c": {"type": "string"}},
        "required": ["b"],
        "$defs": {"unit": {"enum": ["C", "F"]}},
    }
    asked = grammar(Form(tool_format="pythonic", tools={"f": schema}), strict=("f",))
    for good in ('b="C"', 'a=1, b="F"', 'b="C", c="x"', 'a=1, b="C", c="x"'):
        assert allows(asked, f"[f({good})]"), good
    for bad in ("", "a=1", 'b="K"', 'c="x", b="C"', 'b="C", d=1', 'b="C",'):
        assert not allows(asked, f"[f({bad})]"), bad


@pytest.mark.parametrize("strict", [(), tuple(TOOLS)], ids=["loose", "strict"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_writes_is_read_as_calls(name: str, strict: tuple[str, ...]) -> None:
    given = form(name)
    tag = compiled(grammar(given, strict=strict))
    whole = 0
    for seed in range(20):
        text, ended = _walk(tag, random.Random(seed))
        if not ended:
            OutputParser(given, "request", 0).push(text)
            continue
        whole += 1
        calls, content = calls_of(given, text)
        assert content == "" and calls, text
        for called, arguments in calls:
            assert called in TOOLS
            assert not strict or set(TOOLS[called].get("required", ())) <= set(arguments), text
    assert whole >= 8


def _walk(tag: CompiledGrammar, chance: random.Random) -> tuple[str, bool]:
    """A random answer, and whether it came to its end."""
    matcher = GrammarMatcher(tag)
    mask = np.zeros((1, -(-len(_VOCABULARY) // 32)), np.int32)
    text = b""
    for _ in range(400):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [int(one) for one in np.flatnonzero(bits[: len(_VOCABULARY)])]
        closing = [one for one in allowed if one > 255 or _VOCABULARY[one] in (b'"', b"}", b"]", b")")]
        usual = [one for one in allowed if _VOCABULARY[one] in _WRITING]
        token = chance.choice(closing if closing and chance.random() < 0.5 else usual or allowed)
        assert matcher.accept_token(token)
        if token == _STOP:
            return text.decode(), True
        text += _VOCABULARY[token]
    return text.decode(errors="ignore"), False


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[01][0-9]:[0-5][0-9]", ["07:30"], ["7:30", "07:30\n", ""]),
        (r"(run|stop) \"[a-z]+\"\n\t?x", ['run "a"\n\tx', 'stop "b"\nx'], ['run "a"', "run a\nx"]),
        (r".*", ["", 'say "é" \\ {}\t<b>'], ["two\nlines"]),
        (r"(?:[+-].*\n)+x", ['+print("\\n")\n-\t東京\nx'], ["print()\nx"]),
        (r"^[^,]+,[\s\S]*$", ["a\n,", '"\\",\n\t"é東"'], [",a", "a"]),
        (r"[\"'a\\]{2}\S\s\D\W", ['"\\"\n\t\'', "'a! x-"], ['ab\n""x', "''a\n11"]),
    ],
)
def test_the_text_for_a_custom_tool_matches_its_pattern_whatever_it_is_written_in(
    name: str, pattern: str, good: list[str], bad: list[str]
) -> None:
    layout = TOOL_FORMATS[name].layout
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tools = Form(tool_format=name, tools={"run": schema, "other": {}})
    strings: Any = "raw" if layout.style == "qwen_xml" else "escaped"
    inputs = {"run": check_pattern(pattern, "here", strings=strings)}
    for choice in ("required", "auto"):
        made = answer_grammar(
            tools, tool_choice=choice, named=None, parallel=True, schemas={}, response=None, inputs=inputs
        )

        def whole(text: str) -> str:
            return written(layout, [("run", {"input": text})], lambda value: json.dumps(value, ensure_ascii=False))

        assert [text for text in good if not allows(made, whole(text))] == []
        assert [text for text in bad if allows(made, whole(text))] == []
        assert [calls_of(tools, whole(text)) for text in good] == [([("run", {"input": text})], "") for text in good]
        assert allows(made, written(layout, [("other", {"input": "anything"})], json.dumps)), "others are as they were"


@pytest.mark.parametrize("pattern", [r"[^\x4]", r"[^\u12]", r"[^a-\d]", r"[^\u{110000}]", "a(", "(?=x)"])
def test_a_custom_tools_pattern_that_cannot_be_enforced_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^here: ") as caught:
        check_pattern(pattern, "here", strings="escaped")
    assert (caught.value.param, caught.value.code) == ("here", "invalid_grammar")


SETS = [
    ".",
    r"\s",
    r"\S",
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    '[ab"]',
    r"[^\n]",
    r'[^x"]',
    r"[\s\S]",
    r"[\\\t]",
    "[é東]",
    "[^é]",
]
SETS += ['"', r"\n", r"\\", "a", "é", r"\t", "[ -~]", r"[!-\]]"]
patterns = st.recursive(
    st.sampled_from(SETS),
    lambda parts: (
        st.builds("{}{}".format, parts, parts)
        | st.builds("(?:{}|{})".format, parts, parts)
        | st.builds("(?:{}){}".format, parts, st.sampled_from(["*", "+", "?", "{2}"]))
    ),
    max_leaves=5,
)


@given(patterns, st.sampled_from(FORMATS), st.lists(st.text('ab"\\\n\t é東x1', max_size=5), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_custom_tools_texts_are_those_that_python_finds_to_match(pattern: str, name: str, texts: list[str]) -> None:
    layout = TOOL_FORMATS[name].layout
    strings: Any = "raw" if layout.style == "qwen_xml" else "escaped"
    inputs = {"run": check_pattern(pattern, "here", strings=strings)}
    tools = Form(tool_format=name, tools={"run": {"type": "object"}})
    made = answer_grammar(
        tools, tool_choice="required", named=None, parallel=False, schemas={}, response=None, inputs=inputs
    )
    for text in texts:
        whole = written(layout, [("run", {"input": text})], lambda value: json.dumps(value, ensure_ascii=False))
        assert allows(made, whole) == bool(re.fullmatch(pattern, text, re.ASCII)), text

"""A model's text is told apart into content, reasoning and calls, however it is cut."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_texts import RECORDED, TOOLS, Call, Recorded, deepseek, form, written

from penstock.engine.text.output_parser import OutputParser
from penstock.engine.text.text_cursor import id_for
from penstock.engine.text.tool_formats import TOOL_FORMATS
from penstock.schemas.jobs import Form


class Whole(NamedTuple):
    """All that a parser gave; `calls` in order, arguments as sent."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]


def read(form: Form, *pieces: str) -> Whole:
    """Read a text in pieces, as a client would join what comes."""
    parser = OutputParser(form, "request", 0)
    content = reasoning = ""
    calls: list[list[str]] = []
    for parsed in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += parsed.text
        reasoning += parsed.reasoning
        for delta in parsed.tool_calls:
            if delta.index == len(calls):
                assert delta.id is not None and delta.name is not None
                calls.append([delta.id, delta.name, ""])
            else:
                assert (delta.index, delta.id, delta.name) == (len(calls) - 1, None, None)
            calls[-1][2] += delta.arguments
    assert parser.called == bool(calls)
    return Whole(content, reasoning, tuple((one, name, text) for one, name, text in calls))


def meant(whole: Whole) -> tuple[Call, ...]:
    return tuple((name, json.loads(arguments)) for _, name, arguments in whole.calls)


def ids(recorded: Recorded) -> str:
    return recorded.family


@pytest.mark.parametrize("recorded", RECORDED, ids=ids)
def test_recorded_answer_is_read(recorded: Recorded) -> None:
    whole = read(recorded.form, recorded.text)
    assert (whole.content, whole.reasoning, meant(whole)) == (recorded.content, recorded.reasoning, recorded.calls)


@pytest.mark.parametrize("recorded", RECORDED, ids=ids)
def test_every_cut_gives_the_same(recorded: Recorded) -> None:
    text = recorded.text
    whole = read(recorded.form, text)
    assert read(recorded.form, *text) == whole
    for place in range(1, len(text)):
        assert read(recorded.form, text[:place], text[place:]) == whole, f"cut at {place}"


@pytest.mark.parametrize("recorded", RECORDED, ids=ids)
def test_truncated_call_is_never_taken_for_a_whole_one(recorded: Recorded) -> None:
    whole = read(recorded.form, recorded.text)
    for place in range(len(recorded.text)):
        part = read(recorded.form, recorded.text[:place])
        assert [call[:2] for call in part.calls] == [call[:2] for call in whole.calls[: len(part.calls)]]
        for (_, _, arguments), (_, _, wanted) in zip(part.calls, whole.calls, strict=False):
            if arguments != wanted:
                with pytest.raises(ValueError):
                    json.loads(arguments)


def test_ids_are_the_same_in_another_process_and_differ_otherwise() -> None:
    recorded = RECORDED[0]
    assert read(recorded.form, recorded.text).calls == read(recorded.form, *recorded.text).calls
    made = {id_for(form("hermes"), r, c, i) for r in ("a", "b") for c in (0, 1) for i in (0, 1)}
    assert len(made) == 8
    assert all(len(one) == 29 and one.startswith("call_") for one in made)
    assert id_for(form("mistral"), "a", 0, 0).isalnum() and len(id_for(form("mistral"), "a", 0, 0)) == 9


def test_arguments_come_while_they_are_written() -> None:
    parser = OutputParser(form("hermes"), "request", 0)
    parser.push('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert [delta.arguments for delta in parser.push('{"city": "Par').tool_calls] == ['{"city": "Par']
    assert [delta.arguments for delta in parser.push('is"').tool_calls] == ['is"']
    coder = OutputParser(form("qwen3_coder"), "request", 0)
    coder.push("<tool_call>\n<function=write_file>\n<parameter=content>\n")
    assert [delta.arguments for delta in coder.push('a "b"').tool_calls] == ['a \\"b\\"']


def test_only_a_possible_marker_is_held_back() -> None:
    parser = OutputParser(form("hermes", "think"), "request", 0)
    assert parser.push("Two < three").text == "Two < three"
    assert parser.push(" and <tool").text == " and"
    assert parser.push("s>").text == " <tools>"
    assert parser.push("\n").text == ""
    assert parser.finish().text == "\n"


def test_thinking_is_told_while_it_lasts() -> None:
    parser = OutputParser(form("hermes", "think"), "request", 0)
    seen = [(parser.push(piece), parser.thinking)[1] for piece in ("<think>", "a", "b</think>", "\n\nc")]
    assert seen == [True, True, False, False]
    assert OutputParser(form(None, "think", thinking=True), "request", 0).thinking


def test_stray_end_of_thought_is_not_said() -> None:
    assert read(form("hermes", "think"), "A.\n</think>\n\nB. </think> C.").content == "A.\nB. </think> C."
    assert read(form(None, "think"), "<think>a</think>The tag </think> ends it.").content == "The tag </think> ends it."


def test_without_a_form_text_is_text() -> None:
    text = '\n <think>x</think> <tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call> \n'
    assert read(Form(), *text) == (text, "", ())


def test_any_name_may_be_called_where_no_tools_are_given() -> None:
    whole = read(Form(tool_format="hermes"), '<tool_call>{"name": "anything", "arguments": {"a": 1}}</tool_call>')
    assert meant(whole) == (("anything", {"a": 1}),)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "[1, 'a']", [1, "a"]),
        ({}, "[10:30]", "[10:30]"),
        ({"$ref": "#/$defs/unit"}, "celsius", "celsius"),
        ({}, "\n two lines\n", "\n two lines\n"),
    ],
)
def test_xml_values_have_the_types_of_the_schema(schema: dict[str, Any], written: str, value: object) -> None:
    tools = {"f": {"type": "object", "properties": {"a": schema}}}
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert meant(read(Form(tool_format="qwen3_coder", tools=tools), *text)) == (("f", {"a": value}),)


def test_message_may_begin_before_the_last_has_ended() -> None:
    text = "<|channel|>commentary<|message|>Hm.<|channel|>final<|message|>Yes.<|start|><|channel|>final<|message|>!"
    assert read(form("harmony"), *text).content == "Hm.\nYes.\n!"


# Format, text, content, name of the call if there is one, its arguments.
MALFORMED: tuple[tuple[str, str, str, str | None, str], ...] = (
    ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', "=", None, ""),
    ("hermes", "<tool_call>not JSON</tool_call>", "=", None, ""),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": "x"}</tool_call>', "=", None, ""),
    ("hermes", '<tool_call>{"name": ["get_time"]}</tool_call>', "=", None, ""),
    ("hermes", '<tool_call>{"nom": "get_time"}</tool_call>', "=", None, ""),
    ("hermes", "<tool_call>", "=", None, ""),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", "get_time", "{}"),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": nope}}</tool_call>', "", "get_time", '{"a": nope}}'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a" 1}}</tool_call>x', "x", "get_time", '{"a" 1}'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}} hm', "hm", "get_time", "{}"),
    (
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        "get_time",
        '{"a": "x\\ny"}',
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": {"a": "\\d"}}</tool_call>',
        "",
        "get_time",
        '{"a": "\\\\d"}',
    ),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": "b', "", "get_time", '{"a": "b'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}\n</tool_', "", "get_time", "{}"),
    ("qwen3_coder", "<function=get_time><parameter=ke", "", "get_time", ""),
    ("llama3_json", '{"name": "Bob", "age": 3}', "=", None, ""),
    ("llama3_json", '{"name": "get_time"}', "=", None, ""),
    ("llama3_json", '{"name": "get_time", "parameters": [1]}', "=", None, ""),
    ("llama3_json", '{"city": {"x": 1}}', "=", None, ""),
    ("llama3_json", '{"name": "get_time", "parameters": {"a": 01}}', "", "get_time", '{"a": 01}}'),
    ("pythonic", "[1, 2] and [get_time] and [unknown(a=1)]", "=", None, ""),
    ("pythonic", "[get_time(1)]", "=", None, ""),
    ("pythonic", "[get_time(a=1, 2)]", "", "get_time", '{"a": 1, 2)]'),
    ("pythonic", "[get_time(a=b)]", "", "get_time", '{"a": b)]'),
    ("pythonic", "[get_time() so", "so", "get_time", "{}"),
    ("mistral", "[TOOL_CALLS] nothing", "=", None, ""),
    ("mistral", "[TOOL_CALLS] [1]", "=", None, ""),
    ("mistral", '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, 7]', ", 7]", "get_time", "{}"),
    ("mistral_args", "[TOOL_CALLS]unknown[ARGS]{}", "=", None, ""),
    ("mistral_args", "[TOOL_CALLS]get_time[ARGS]what", "=", None, ""),
    ("deepseek", deepseek("<|tool▁call▁begin|>" + "x" * 400), "=", None, ""),
    ("deepseek", deepseek("<|tool▁call▁begin|>function<|tool▁sep|>unknown\n```json\n{}\n```"), "=", None, ""),
    ("deepseek_v3_1", deepseek("<|tool▁call▁begin|>get_time<|tool▁sep|>{]<|tool▁call▁end|>"), "", "get_time", "{]"),
    ("harmony", "No channel at all.", "=", None, ""),
    ("harmony", "<|channel|>commentary to=functions.unknown<|message|>{}", "=", None, ""),
    ("harmony", "<|channel|>commentary to=browser.search code<|message|>x", "=", None, ""),
    ("harmony", "<|channel|>final", "=", None, ""),
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>", "=", None, ""),
    ("qwen3_coder", "<tool_call>{}</tool_call>", "=", None, ""),
    ("qwen3_coder", "<tool_call><function=get_time>what</function></tool_call>", "", "get_time", "what"),
    ("qwen3_coder", "<function=get_time><parameter=a>1</parameter>", "", "get_time", '{"a": 1'),
)


@pytest.mark.parametrize(("name", "text", "content", "called", "arguments"), MALFORMED)
def test_malformed_call_degrades(name: str, text: str, content: str, called: str | None, arguments: str) -> None:
    whole = read(form(name), text)
    assert whole == read(form(name), *text)
    assert whole.content == (text if content == "=" else content)
    assert [(one, sent) for _, one, sent in whole.calls] == ([(called, arguments)] if called else [])


_TEXT = st.text(st.characters(exclude_categories=["C"]) | st.sampled_from("\n\t\x01\\\"'{}[]<"), max_size=8)
_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
_CALLS = st.lists(st.tuples(_NAMES, st.dictionaries(_NAMES, _JSON, max_size=3)), min_size=1, max_size=3)


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@settings(max_examples=25, deadline=None)
@given(calls=_CALLS, data=st.data())
def test_calls_are_read_as_written(name: str, calls: list[Call], data: st.DataObject) -> None:
    if name == "qwen3_coder":  # its values have types by their schema alone, and a text cannot hold its own end
        calls = [
            (one, {key: str(value).replace("\n</", "<") for key, value in values.items()}) for one, values in calls
        ]
    tools = {
        one: {"properties": {key: {"type": "string"} for _, values in calls for key in values}} for one, _ in calls
    }
    text = written(TOOL_FORMATS[name].layout, calls)
    whole = read(Form(tool_format=name, tools=tools), *cut(data, text))
    assert (whole.content, whole.reasoning, meant(whole)) == ("", "", tuple(calls))


_FRAGMENTS = sorted({marker for row in TOOL_FORMATS.values() for marker in (*row.markers, *row.layout[:6]) if marker})
_PIECES = st.lists(
    st.sampled_from(
        [*_FRAGMENTS, *TOOLS, *" \n{}[]()=,:;\"'\\ax1-", "<think>", "</think>", '"arguments"', "\\u12", "é"]
    ),
    max_size=25,
)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@settings(max_examples=25, deadline=None)
@given(text=_PIECES.map("".join) | st.text(), data=st.data())
def test_no_text_is_an_error_and_no_cut_matters(name: str, text: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from([None, "think", "harmony" if name == "harmony" else "mistral"]))
    given_form = form(name, reasoning, thinking=data.draw(st.booleans()))
    whole = read(given_form, text)
    assert read(given_form, *cut(data, text)) == whole
    assert read(given_form, *text) == whole


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"harmony"}))  # whose headers are not said
@settings(max_examples=25, deadline=None)
@given(pieces=_PIECES, thinking=st.booleans())
def test_no_word_is_lost(name: str, pieces: list[str], thinking: bool) -> None:
    words = [f" word{place}of " for place in range(len(pieces))]
    text = "".join(word + piece for word, piece in zip(words, pieces, strict=True)) + " "
    whole = read(form(name, "think", thinking=thinking), text)
    seen = " ".join([whole.content, whole.reasoning, *(part for call in whole.calls for part in call)])
    assert [word for word in words if word.strip() not in seen] == []


@settings(max_examples=25, deadline=None)
@given(text=st.text(alphabet="ab \n.<{[", max_size=40))
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_text_without_a_call_comes_out_whole(name: str, text: str) -> None:
    assert read(form(name), *text).content == text

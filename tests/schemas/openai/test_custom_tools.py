"""Custom tools: a text out of the arguments of a call, however they are cut, and grammars in Lark as patterns."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.api.render.openai import Extras, Renderer
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.events import Done, Token, ToolCallDelta, Usage
from penstock.schemas.openai.chat import CustomTool, NamedTool
from penstock.schemas.openai.completions import ChatRequest, parse_body
from penstock.schemas.openai.custom_tools import InputReader, arguments_of, custom_names, input_of
from penstock.schemas.openai.lark_patterns import lark_pattern
from penstock.schemas.openai.responses.items import input_items
from penstock.schemas.openai.responses.messages import chat_messages
from penstock.schemas.openai.responses.request import parse_responses

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\\n\t/{}😀'), max_size=12)
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""  # what agents that edit files by patches send
SUMS = """
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)* -> mul
    | factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
QUERY = """
start: "select"i WORD ("," WORD)* [";"]
WORD: /[a-z]+/
%ignore " "
"""
REST = r"""
start: a | b | c |
a: "x" ~ 2 "y" ~ 1..2 | "["
b: "\n" /a\/b/ "0".."9"
c: "-".."]" "äß"i
"""


@example(text="\N{GRINNING FACE}", ascii_only=True, spaces="", cuts={*range(40)})
@given(text=TEXTS, ascii_only=st.booleans(), spaces=st.sampled_from(["", " ", "\n "]), cuts=st.sets(st.integers(0, 60)))
@settings(deadline=None)
def test_the_text_is_read_however_the_arguments_are_written_and_cut(
    text: str, ascii_only: bool, spaces: str, cuts: set[int]
) -> None:
    written = json.dumps(text, ensure_ascii=ascii_only)
    arguments = f'{spaces}{{{spaces}"input"{spaces}:{spaces}{written}{spaces}}}'
    bounds = [0, *sorted(cut for cut in cuts if cut < len(arguments)), len(arguments)]
    reader = InputReader()
    pieces = [reader.feed(arguments[begin:end]) for begin, end in pairwise(bounds)]
    assert "".join(pieces) == text, "nothing is kept back"
    assert reader.end() == ""
    assert input_of(arguments_of(text)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ('{"code": "x"}', '{"code": "x"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("plain", "plain"),
        ('{"input": "cut o', "cut o"),
        ('{"input": "cut \\', "cut "),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "half \\ud83d"}', "half \N{REPLACEMENT CHARACTER}"),
        ('{"input": "half \\ud83d\\n!"}', "half \N{REPLACEMENT CHARACTER}\n!"),
        ('{"input": "no \\x escape \\u00zz"}', "no \\x escape \\u00zz"),
        ('{"input": "a", "more": "b"}', "a"),
    ],
)
def test_of_other_arguments_everything_is_the_text(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


@given(text=TEXTS, cut=st.integers(0, 40))
@example(text="", cut=3)
@settings(deadline=None)
def test_a_stream_of_chunks_adds_up_to_the_whole_answer(text: str, cut: int) -> None:
    """Of a chat with a function, a custom tool, and one whose arguments are not what they should be."""
    body = {"tools": [{"type": "custom", "custom": {"name": "run"}}]}
    arguments = arguments_of(text)
    calls = [("f", '{"input": "x"}'), ("run", arguments), ("run", "no object")]
    tokens: list[Token] = []
    for index, (name, said) in enumerate(calls):
        begun = ToolCallDelta(index, said[:cut], f"call_{index}", name)
        tokens += [Token("r", 0, len(tokens), (1,), "", tool_calls=(begun,))]
        tokens += [Token("r", 0, len(tokens), (1,), "", tool_calls=(ToolCallDelta(index, said[cut:]),))]
    tokens += [Token("r", 0, len(tokens), (1,), "", finish_reason="tool_calls")]

    def renderer(*, streaming: bool) -> Renderer:
        return Renderer("/v1/chat/completions", "r", "m", 1, streaming=streaming, extras=Extras.of(body))

    joined: dict[int, dict[str, Any]] = {}
    stream = renderer(streaming=True)
    for chunk in (chunk for token in tokens for chunk in stream.chunks(token)):
        for call in json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"].get("tool_calls", ()):
            begun_call = joined.setdefault(call.pop("index"), call)
            if begun_call is not call:
                (kind,) = call
                (field,) = call[kind]
                begun_call[kind][field] += call[kind][field]
    done = Done("r", ("tool_calls",), Usage(1, 7, 8))
    whole = json.loads(renderer(streaming=False).whole(tokens, done))["choices"][0]["message"]["tool_calls"]
    assert whole == [*joined.values()]
    assert whole == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"input": "x"}'}},
        {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": text}},
        {"id": "call_2", "type": "custom", "custom": {"name": "run", "input": "no object"}},
    ]


def test_the_model_sees_calls_of_custom_tools_as_those_of_functions() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "run", "input": 'a"b'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    request = parse_body(ChatRequest, {"model": "m", "messages": messages})
    (made,) = request.messages[1].tool_calls or []
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": 'a"b'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ]
    given_items = input_items(parse_responses({"model": "m", "input": items}).input, "resp_1")
    chat = chat_messages(given_items, None)
    assert chat[0]["tool_calls"] == [{"id": "c", "type": "function", "function": made.function.model_dump()}]
    assert json.loads(made.function.arguments) == {"input": 'a"b'}
    assert chat[1] == {"role": "tool", "tool_call_id": "c", "content": "ok"}
    for broken in ({"type": "custom"}, {"type": "custom", "custom": {"name": "run"}}):
        with pytest.raises(InvalidRequest, match=r"messages\[1\].tool_calls\[0\]: needs custom"):
            parse_body(ChatRequest, {"model": "m", "messages": [messages[0], messages[1] | {"tool_calls": [broken]}]})


def test_names_are_found_in_requests_of_both_kinds_valid_or_not() -> None:
    tools = [
        {"type": "custom", "custom": {"name": "a"}},
        {"type": "custom", "name": "b"},
        {"type": "function", "name": "c"},
        {"type": "custom", "custom": 3},
        {"type": "custom"},
        None,
    ]
    assert custom_names(tools) == {"a", "b"}
    assert custom_names(None) == custom_names({"type": "custom"}) == frozenset()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            PATCH,
            [
                "*** Begin Patch\n*** Update File: a.py\n@@ def f\n-x\n+y\n*** End Patch\n",
                "*** Begin Patch\n*** Add File: b\n+one\n+\n*** Delete File: c\n*** End Patch",
            ],
            ["", "*** Begin Patch\n*** End Patch\n", "*** Begin Patch\n*** Add File: b\n*** End Patch\n"],
        ),
        (SUMS, ["1", "1 + 2 * 34"], ["1+2", "", "1 +"]),
        (QUERY, ["select a", "SELECT a , b;", " Select  a,b ; "], ["select", "select A", "select a b"]),
        (
            "start: /a.b/is ESCAPED_STRING\n%import common.ESCAPED_STRING",
            ['A\nB"c"', r'axb"\"\\"', 'a b""'],
            ['ab"c"', 'axb"c"d"', r'axb"\"'],
        ),
        (REST, ["", "xxy", "xxyy", "[", "\na/b7", "9äß", "AÄß"], ["xy", "xxyyy", "\na/ba", "!äß", "9äS"]),
    ],
)
def test_a_grammar_in_lark_allows_what_its_pattern_matches(grammar: str, good: list[str], bad: list[str]) -> None:
    pattern = re.compile(lark_pattern(grammar))
    assert [text for text in good if not pattern.fullmatch(text)] == []
    assert [text for text in bad if pattern.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ('start: "(" start ")" | "x"', "start refers to itself"),
        ('begin: "x"', "no rule with the name start"),
        ("start: /x/im", "of flags i, s and u are supported, and others are in /x/im"),
        ("%import .secret (X)\nstart: X", "can import from common alone"),
        ("%import python.NAME\nstart: NAME", "can import from common alone"),
        ('start: "x" (', "no grammar in Lark"),
        ("start: y", "no grammar in Lark: Rule 'y' used but not defined"),
        ('y{z}: z\nstart: y{"a"}', "template_usage, which is not supported"),
        ("%declare Q\nstart: Q", "Q has no definition"),
        (f"start: {'(' * 2000}{'x'}{')' * 2000}", "nested too deeply"),
        (
            "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(30)) + 'a30: "x"',
            "more than 20,000 characters",
        ),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason(grammar: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        lark_pattern(grammar)
    custom = {"name": "run", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": grammar}}}
    tool = CustomTool.model_validate({"type": "custom", "custom": custom})
    with pytest.raises(InvalidRequest, match="tools: the grammar of 'run' cannot be used"):
        _ = tool.pattern


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "custom"}], "tools[0].name"),
        ([{"type": "custom", "name": "a b"}], "tools[0].name"),
        ([{"type": "custom", "name": "a", "format": {"type": "json"}}], "tools[0].format"),
        (
            [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}}],
            "tools[0].format.definition",
        ),
        (
            [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}}],
            "tools[0].format.syntax",
        ),
        ([{"type": "custom", "name": "a"}, {"type": "function", "name": "a"}], "tools[1].name"),
        ([{"type": "custom", "name": "a"}] * 2, "tools[1].name"),
    ],
)
def test_what_is_wrong_with_a_custom_tool_of_a_response_is_said(tools: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_responses({"model": "m", "input": "?", "tools": tools})
    assert caught.value.param == param


def test_a_turn_of_a_response_has_the_custom_tools_as_a_chat_does() -> None:
    """Their grammars are left to the stage that validates the turn."""
    grammar = {"syntax": "lark", "definition": "no grammar"}
    tools = [
        {"type": "custom", "name": "run", "description": "Runs", "format": {"type": "grammar", **grammar}},
        {"type": "custom", "name": "say", "format": {"type": "text"}},
        {"type": "function", "name": "look", "parameters": None},
    ]
    choice = {"type": "custom", "name": "run"}
    asked = parse_responses({"model": "m", "input": "?", "tools": tools, "tool_choice": choice})
    body = asked.chat_body([{"role": "user", "content": "?"}], [], first=True, tools_allowed=True)
    assert body["tools"] == [
        {
            "type": "custom",
            "custom": {"name": "run", "description": "Runs", "format": {"type": "grammar", "grammar": grammar}},
        },
        {"type": "custom", "custom": {"name": "say"}},
        {"type": "function", "function": {"name": "look"}},
    ]
    request = parse_body(ChatRequest, body)
    assert [isinstance(tool, CustomTool) and tool.is_in_lark for tool in request.tools or ()] == [True, False, False]
    assert isinstance(request.tool_choice, NamedTool) and request.tool_choice.function.name == "run"
    with pytest.raises(InvalidRequest, match="no function 'gone'"):
        parse_responses({"model": "m", "input": "?", "tools": tools, "tool_choice": {"type": "custom", "name": "gone"}})

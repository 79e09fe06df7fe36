"""What is wrong with a regular expression or a grammar is said in whole sentences, about the text that was sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine.grammar.json_schema import ebnf_grammar, json_schema_grammar, regex_grammar
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.text.tokenizer import Tokenizer
from penstock.schemas.errors import InvalidRequest

PATTERNS = [
    ("", "an empty pattern allows no answer but an empty one; leave it out"),
    ("(", "a ( has no ) behind it; write \\( for the character"),
    ("(?<n>a", "a ( has no ) behind it"),
    ("a)", "a ) has no ( before it; write \\) for the character"),
    ("*", "* has nothing before it to repeat; write \\* for the character"),
    ("a|+", "+ has nothing before it to repeat"),
    ("(?)", "a group begins with (, (?:, (?<name>, (?=, (?!, (?<=, (?<! or a flag"),
    ("^?a", "? has nothing before it to repeat"),
    ("(?:{2})", "{2} has nothing before it to repeat"),
    ("a**", "* repeats a repetition; put what it repeats into (?:…)"),
    ("a{1,2}{3}", "{3} repeats a repetition"),
    ("a{3,1}", "the first number of {3,1} is above the second"),
    ("a{2", "a { begins a repetition such as {2}, {2,} or {2,5}; write \\{ for the character"),
    ("a{,3}", "a { begins a repetition"),
    ("(?x)a", "other kinds and flags are not supported"),
    ("(?>a)", "other kinds and flags are not supported"),
    ("(?m)a", "the flag m is not supported; write (?:^|\\n) and (?:$|\\n)"),
    ("(?=a)", "no text matches it"),
    ("(?<=a|$)b", "what looks behind cannot look on from there"),
    (r"(a)\1", r"\1 is not supported; no grammar can refer back to a group"),
    (r"[[:alpha:]]", r"[:alpha:] is not supported; write ranges, \w, \d, \s or \p{L}"),
    ("[z-a]", "the range z-a is upside down"),
    (r"[\r-\n]", r"the range \r-\n is upside down"),
    (r"[a-\d]", r"a-\d is no range of characters; write \- for the character -"),
    ("\\", "it ends with a single \\; write \\\\ for the character"),
    (r"\x{41}", r"\x needs digits of a character: \x41, \u0041 or \u{41}"),
    (r"\u12", r"\u needs digits of a character"),
    (r"\u{110000}", r"\u{110000} is no character; the last one is \u{10ffff}"),
    (r"\p{Greek}", r"\p is supported with categories of Unicode alone"),
    ("[a", "a class is not closed"),
    pytest.param("(" * 101 + "a" + ")" * 101, "groups are within each other more than 100 deep", id="101 deep"),
    # Looking at all that is left at each of them would take minutes, in the event loop of the stage.
    pytest.param("(" * 50_000, "a ( has no ) behind it", id="50,000 groups"),
    pytest.param("a" * 50_001, "it has more than 50,000 characters", id="50,001 characters"),
]
GRAMMARS = [
    ("root ::=", "line 1, column 9: Expect a text", "but the grammar ends there"),
    ('root ::= "a" |', "the name of a rule or a group (…), but the grammar ends there", ""),
    ('root ::= "a"\n\n  | ', "line 3, column 5", "but the grammar ends there"),
    ('root ::= "a"{', "Expect integer, but the grammar ends there", ""),
    ("root ::= *", "but got *", ""),
    ('root ::= "a")', "Expect the name of a rule, or the end", ""),
    (r'root ::= "\q"', "Invalid escape sequence; write \\\\ for a backslash", ""),
    (r"root ::= [\q]", "Invalid escape sequence \\q; write \\\\ for a backslash", ""),
    ("root ::= 'a'", 'Unexpected character: \'; texts stand in "…"', ""),
    ("root ::= é", 'Unexpected character: one beyond ASCII; texts stand in "…"', ""),
    ("root ::= Token(99999999)", "Token id 99999999 in the grammar is out of the vocabulary range", ""),
    ("root ::= foo", 'Rule "foo" is not defined', ""),
    ("root = 1", "guided_grammar: a grammar in GBNF has rules `name ::= …`, one of them named root", ""),
]


@pytest.fixture(scope="module")
def compiler(model_directory: Callable[[str], Path]) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(model_directory("llama")))


@pytest.mark.parametrize(("pattern", "message"), PATTERNS)
def test_a_pattern_is_refused_in_words_about_what_was_sent(pattern: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        regex_grammar(pattern)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "guided_regex")
    assert str(caught.value).startswith("guided_regex: ") and message in str(caught.value)


@pytest.mark.parametrize(("pattern", "message"), PATTERNS[1:])
def test_a_pattern_in_a_schema_is_named_by_its_path(pattern: str, message: str) -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "string", "pattern": pattern}}}
    with pytest.raises(InvalidRequest) as caught:
        json_schema_grammar(schema, path="p")
    assert caught.value.param == "p.properties.b.pattern" and message in str(caught.value)


@pytest.mark.parametrize(("text", "message", "end"), GRAMMARS)
def test_what_the_compiler_says_of_a_grammar_is_complete(
    compiler: GrammarCompiler, text: str, message: str, end: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(ebnf_grammar(text))
    said = str(caught.value)
    assert message in said and said.endswith(end)
    assert not re.search(r"(but got|Check failed.*|codec.*)$", said)


@pytest.mark.parametrize(
    "pattern",
    [
        *("a+?b", "(?:a|b)*c{2}", "(?<year>[0-9]{4})", "(a{2}){3}", "a|", "()", "[a-]", "[-a]", "[a-b-c]", "]", "}"),
        *(r"[\d-z]", r"[\x41-Z]", r"\{a\}", r"\u0041\u{42}", "^(ab|c){2,}$", r"[^\]a]+", "[+--]", r"\(\)", "a{0}b"),
    ],
)
def test_what_is_right_still_compiles(compiler: GrammarCompiler, pattern: str) -> None:
    compiler.compile(regex_grammar(pattern))

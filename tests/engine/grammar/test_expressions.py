"""Regular expressions mean for an answer what they mean for Python, in all texts and however tokens cut them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.grammar.expressions.lengths import held_to
from penstock.engine.grammar.expressions.nodes import Alt, Chars, Node, Repeat, Seq, lengths
from penstock.engine.grammar.expressions.reading import Fault
from penstock.engine.grammar.expressions.whole import whole as whole_node
from penstock.engine.grammar.json_schema import json_schema_grammar, regex_grammar
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.text.tokenizer import Tokenizer
from penstock.schemas.errors import GenerationFailed
from penstock.schemas.params import GenerationParams, Grammar

# Each with the characters of the texts that are tried.
PATTERNS = [
    *((r"[\^a]", "^ab"), (r"[^\\]\\?", "\\ab"), (r"[\x41\\b]", "Ab\\"), (r"\x41b", "Ab"), (r"[\x01a]", "\x01a\x1a")),
    *((".b", "a\nb"), ("a{0,2}|b", "ab"), ("(?:a{1,3}|a)b?", "ab"), ("(a?|b*){2,3}c", "abc"), ("((a*)*|b)*c", "abc")),
    *(("(?i:a(?-i:b)[c-d])", "aBbC"), ("(?i:É|ß)a", "éÉßa"), ("(?s:.)a", "\na"), (r"\Aa\Z|b", "ab"), ("^$|^a", "ab")),
    *(("a|^b|c$", "abc"), ("(^a|b)+", "ab"), (r"\ba\b.?", "ab "), (r"a\B.*", "ab "), (r"(\w+ ?)*!", "ab !")),
    *(("(?P<n>a)b", "ab"), ("(?!ab)[ab]*", "ab"), ("(?=.*b)(?!.*aa)[ab]+", "ab"), ("a(?=b)[ab]*", "ab")),
    *(("(?:(?!ba)[ab])*c", "abc"), ("[ab]*(?<=ab)c", "abc"), ("[ab]*(?<!a)c?", "abc"), ("(?=a(?!b))[ab]*", "ab")),
    *(("(?=(a|b)$).", "abc"), ("日{2,}|é", "日é月"), (r"\W+[!-~é]a", ", aé"), (r"[\s\S]\S\s", "a \xa0")),
    *(("[a-]b]?", "a-b]"), (r"^(\w+\.)*\w+@a$", "a.@"), ("(a|ab)(c|bcd)", "abcd"), ("(?<!b)a+", "ab")),
    *(("[^é]", "éè\n"), ("a*?b??", "ab")),
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler(model_directory: Callable[[str], Path]) -> GrammarCompiler:
    made = GrammarCompiler(Tokenizer(model_directory("llama")))
    made.load()
    return made


def whole(compiler: GrammarCompiler, grammar: Grammar, text: str, chance: random.Random) -> bool:
    """Whether a text is an answer, in tokens that `chance` chooses."""
    tokens: dict[bytes, int] = {}
    for token, piece in enumerate(compiler._texts):
        if token not in compiler._tokenizer.special_token_ids:
            tokens.setdefault(piece, token)
    matcher = compiler._matcher(grammar, compiler._compiled(grammar), frozenset())
    rest = text.encode()
    while rest:
        pieces = [rest[:length] for length in range(1, 9) if rest[:length] in tokens and length <= len(rest)]
        piece = chance.choice(pieces)
        if not may_come(matcher.mask(), tokens[piece]):
            return False
        matcher.accept(tokens[piece])
        rest = rest[len(piece) :]
    return any(may_come(matcher.mask(), token) for token in compiler._tokenizer.eos_token_ids)


def may_come(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


@pytest.mark.parametrize(("pattern", "characters"), PATTERNS)
def test_texts_are_those_that_python_finds_to_match(compiler: GrammarCompiler, pattern: str, characters: str) -> None:
    grammar = regex_grammar(pattern)
    schema = json_schema_grammar({"type": "string", "pattern": f"^(?:{pattern})$"}, path="p")
    compiler.compile(grammar)
    compiler.compile(schema)
    chance = random.Random(pattern)
    for length in range(5 if len(characters) < 4 else 4):
        for text in map("".join, product(dict.fromkeys(characters), repeat=length)):
            is_right = re.fullmatch(pattern, text, 0 if "(?i" in pattern else re.ASCII) is not None
            is_space = "\xa0" in text and "\\s" in pattern.lower()  # is one in some dialects
            assert whole(compiler, grammar, text, chance) == is_right or is_space, text
            if json.dumps(text, ensure_ascii=False) == f'"{text}"':
                assert whole(compiler, schema, f'"{text}"', chance) == is_right or is_space, text


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (r"\p{Lu}\p{L}*", ["Éa", "Я"], ["é", "1"]),
        (r"[^\p{L}]", ["1", "-"], ["a", "é"]),
        ("[\\p{Extended_Pictographic}]", ["😀"], ["a"]),
        (r"\u{1f600}|\ud83d\ude01", ["😀", "😁"], ["😂"]),
    ],
)
def test_characters_by_what_unicode_says_of_them(
    compiler: GrammarCompiler, pattern: str, inside: list[str], outside: list[str]
) -> None:
    grammar, chance = regex_grammar(pattern), random.Random(1)
    assert [text for text in inside if not whole(compiler, grammar, text, chance)] == []
    assert [text for text in outside if whole(compiler, grammar, text, chance)] == []


def test_what_may_be_read_in_many_ways_takes_no_time(compiler: GrammarCompiler) -> None:
    """It would end the answer where a token takes long."""
    for pattern in (r"(\w+\s?)*", "((a*)*)*b", "(a|ab|b)*c?", "(.*,)*.*"):
        grammar = regex_grammar(pattern)
        assert whole(compiler, grammar, "ab" * 200 + ("b" if pattern.endswith("b") else ""), random.Random(1)) == (
            pattern != "((a*)*)*b"
        )


@pytest.mark.parametrize(
    ("pattern", "is_followed_by_one"),
    [(r"(- [^\n]{5,80}\n){3,10}", False), (r".{1,200}", True), (r"(?:\d{1,99}-){50}", True)],
)
def test_automata_are_for_what_they_take_little_time_for(pattern: str, is_followed_by_one: bool) -> None:
    """The first took seven seconds to compile with 49,152 tokens, more than is allowed, and by rules half a second."""
    assert (regex_grammar(pattern).kind == "ebnf") == is_followed_by_one


def test_one_token_may_take_long_now_and_then(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where xgrammar needs more room for what it has read. An ambiguous grammar takes long for each token."""
    took: list[float] = []
    now = 0.0

    def thread_time() -> float:
        nonlocal now
        now += took.pop() if took else 0.0
        return now

    monkeypatch.setattr("penstock.engine.grammar.matcher.time", SimpleNamespace(thread_time=thread_time))
    matcher = compiler.matcher(GenerationParams(grammar=regex_grammar("a*b")))
    assert matcher is not None
    token = compiler._texts.index(b"a")

    def accept(seconds: float) -> None:
        matcher.mask()
        took[:] = [seconds, 0.0]  # what passes before its second look at the clock, and before its first
        matcher.accept(token)

    for seconds in (0.03, 0.0, *[0.0] * 10, 0.03, 0.0):
        accept(seconds)
    accept(0.03)
    accept(0.03)
    with pytest.raises(GenerationFailed, match="too ambiguous"):
        accept(0.0)


def text_of(node: Node, chance: random.Random) -> str:
    """A text of an expression without looks."""
    match node:
        case Chars(known):
            return chr(chance.choice([one for ends in known for one in ends]))
        case Seq(parts):
            return "".join(text_of(part, chance) for part in parts)
        case Alt(options):
            return text_of(chance.choice(options), chance)
        case Repeat(part, least, most):
            count = chance.choice([least, least + 3 if most is None else most])
            return "".join(text_of(part, chance) for _ in range(count))
    raise AssertionError(node)


LONG = [
    *(r"[a-z]+(-[a-z]+)*", r"(\w+ )*\w+", r"(?!\.)(?!.*\.\.)[a-z.]*[a-z]@([a-z][a-z-]*\.)+[a-z]{2,}", "(a{3}|b+c*)+d?"),
    *(r"\d+(\.\d+){0,3}", "(?:ab*){2,}c{0,90}", "([a-z]{1,20}/){0,9}x*", "(?:(?:a+b){2}c){1,}|z{5,}"),
]


@given(st.sampled_from(LONG), st.integers(0, 40), st.integers(1, 400), st.randoms())
@settings(deadline=None)
def test_a_pattern_beside_lengths_has_texts_of_both(pattern: str, least: int, more: int, chance: random.Random) -> None:
    """None that is longer or shorter, and none beyond the pattern."""
    try:
        node = held_to(whole_node(pattern), least, least + more)
    except Fault:
        return
    if node is not None:
        shortest, longest = lengths(node)
        assert least <= shortest <= longest <= least + more
        for _ in range(20):
            text = text_of(node, chance)
            assert shortest <= len(text) <= longest
            assert re.fullmatch(pattern, text, re.ASCII), text


@pytest.mark.parametrize("pattern", [r"[a-z]+(-[a-z]+)*", r"(\w+ )*\w+", r"\d+(\.\d+){0,3}", "([a-z]{1,20}/){0,9}x*"])
def test_lengths_of_usual_sizes_can_be_held_to(pattern: str) -> None:
    assert held_to(whole_node(pattern), 0, 100) is not None

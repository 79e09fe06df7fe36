"""What a grammar allows next, looked up again only where it may have changed."""

from __future__ import annotations

import json
import random
from codecs import getincrementaldecoder
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import BY_HAND, generate, record
from tool_texts import TOOLS, form, written
from xgrammar import GrammarMatcher, TokenizerInfo, VocabType

from penstock.engine import GenerationParams
from penstock.engine.grammar.free_text import free_text
from penstock.engine.grammar.json_schema import ebnf_grammar, json_schema_grammar, regex_grammar
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.grammar.tool_grammar import answer_grammar
from penstock.engine.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from penstock.schemas.params import Grammar

_WORDS = [
    "the",
    " the",
    " cat",
    "tool",
    "_call",
    "call",
    "name",
    "args",
    "rue",
    "é",
    " e",
    "ne",
    "TOOL",
    "CALLS",
    "f",
    "o",
]
_ENDS = [
    '"}',
    '", "',
    '","',
    '":',
    '": ',
    'x"',
    'x", "b"',
    '"e',
    "l>",
    ">x",
    ">\n",
    "_CALLS]",
    "]x",
    "x<",
    "<t",
    '{"',
    "\n\n",
]
_CHARACTERS = [chr(code) for code in range(32, 127)]
_PARTS = [
    b"x\xed",
    b"\xed\xa0",
    b"\xed\x9f",
    b"x\xf4",
    b"\xf4\x90",
    b"\x90\x80",
    b"\xa0\x80",
]
VOCABULARY = [*(bytes([byte]) for byte in range(256)), *(one.encode() for one in _WORDS + _ENDS), *_PARTS, b"<eos>"]
PRINTABLE = [token for token, text in enumerate(VOCABULARY) if text.decode(errors="replace").isprintable()]
STOP = len(VOCABULARY) - 1

# Documents in which a letter of a string may decide what follows it.
FORKS: list[dict[str, Any]] = [
    {"anyOf": [record({"a": {"type": "string"}, "b": {"enum": [1]}}), record({"a": {"enum": ["x", "xy"]}})]},
    {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"enum": ["e", "en"]}}]},
    {"anyOf": [{"type": "string"}, {"enum": ["e", "en"]}, {"type": "null"}]},
    {"type": "array", "items": {"type": "string", "maxLength": 30}},
    {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": "^[a-z ]*ne$"}, {"type": "null"}]}},
    {"type": "object", "patternProperties": {"^[a-z ]*e$": {"type": "null"}}, "additionalProperties": False},
]
# As the library may be given it; our own schemas exclude the name from the others.
RAW = {"type": "object", "properties": {"e": {"enum": [1]}}, "additionalProperties": {"type": "string"}}
# Those in which no letter does, and answers of mostly words.
PLAIN: list[tuple[dict[str, Any], str]] = [
    ({"type": "object"}, '{"the cat named the call": "the tool of the cat", "the": ["the cat the cat"]}'),
    (
        {"type": "array", "items": {"type": ["string", "null", "number"]}, "minItems": 4},
        '["the cat the tool", "the cat',
    ),
    (record({"name": {"type": "string"}, "n": {}}), '{"name": "the cat the cat", "n": ["the cat the cat'),
    (
        {"type": "object", "additionalProperties": {"anyOf": [{"type": "string"}, {"enum": [1]}]}},
        '{"a": "the cat the cat',
    ),
    (
        {
            "$ref": "#/$defs/tree",
            "$defs": {"tree": record({"a": {"type": "string"}, "b": {"$ref": "#/$defs/tree"}}, "b")},
        },
        '{"a": "the cat", "b": {"a": "the cat the cat the cat',
    ),
]


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    return json_schema_grammar(schema, path="p")


def tool_grammar(name: str, choice: str, **others: Any) -> Grammar:
    schemas = {tool: json.loads(schema_grammar(schema).text) for tool, schema in TOOLS.items()}
    asked = {"tool_choice": choice, "named": None, "parallel": True, "schemas": schemas, "response": None} | others
    made = answer_grammar(form(name, asked.pop("reasoning", None)), **asked)
    assert made is not None
    return made


def script(name: str, reasoning: str | None = None) -> str:
    """Text and calls, as a model of the format may write them."""
    thought = "the cat the cat".join(REASONING_FORMATS[reasoning]) + "\n" if reasoning else ""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("write_file", {"path": "the cat", "content": "the tool_call of the cat, a nameless e"}),
        ("get_weather", {"city": "the cat named call"}),
    ]
    return f"{thought}the cat, {written(TOOL_FORMATS[name].layout, calls, json.dumps)} the cat"


def tag(part: dict[str, Any]) -> Grammar:
    return Grammar(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": part}))


def document(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "style": "json"}


TEXT = {"type": "any_text", "excludes": ["<"]}
BRANCHES = [{"type": "tag", "begin": "<", "content": document(one), "end": ">"} for one in FORKS[0]["anyOf"]]
STRING = document({"type": "array", "items": {"type": "string"}})


def calls(content: dict[str, Any], end: Any = ">") -> dict[str, Any]:
    one = {"type": "tag", "begin": "<", "content": content, "end": end}
    return {"type": "tags_with_separator", "tags": [one], "separator": ";", "at_least_one": True}


OTHER = {"type": "any_text", "excludes": ["#"]}
TAGS: list[dict[str, Any]] = [
    calls(document(FORKS[0])),
    calls(STRING, [">", "#>"]),
    {"type": "or", "elements": [OTHER, {"type": "sequence", "elements": [OTHER, calls(STRING)]}]},
    {"type": "or", "elements": [OTHER, {"type": "sequence", "elements": [TEXT, calls(STRING)]}]},
    {"type": "tag", "begin": "<t>", "content": TEXT, "end": ["</a>", "#b"]},
    {"type": "sequence", "elements": [TEXT, {"type": "const_string", "value": "#"}, document({"enum": ["a<"]})]},
    {"type": "or", "elements": [TEXT, {"type": "sequence", "elements": [{"type": "const_string", "value": "<"}]}]},
    {"type": "or", "elements": BRANCHES},
    {"type": "or", "elements": list(map(document, FORKS[0]["anyOf"]))},
    {"type": "tags_with_separator", "tags": BRANCHES, "separator": ";", "at_least_one": True},
    {"type": "sequence", "elements": [TEXT, document({"enum": [True, None, "the"]})]},
    document(FORKS[0]),
    {"type": "sequence", "elements": [TEXT, {"type": "const_string", "value": "the cat"}]},
]
DECIDING = [
    *(schema_grammar(schema) for schema in FORKS),
    Grammar(kind="json_schema", text=json.dumps(RAW)),
    *map(tag, TAGS),
]
DOCUMENTS = [*DECIDING, *(schema_grammar(schema) for schema, _ in PLAIN)]
DOCUMENTS += [schema_grammar(schema) for schema in [*BY_HAND.values(), *map(generate, range(100))]]
ANSWER = schema_grammar(record({"name": {"type": "string"}, "arguments": {"type": "object"}}))
OTHERS: list[dict[str, Any]] = [
    *({}, {"parallel": False}, {"reasoning": "think"}, {"reasoning": "mistral"}, {"response": ANSWER}),
]
CALLS = [
    (tool_grammar(name, choice, **others), script(name, others.get("reasoning")))
    for name in TOOL_FORMATS
    for choice in ("auto", "required")
    for others in OTHERS
    if not (choice == "required" and "response" in others)
]


class Spelt(GrammarCompiler):
    """For a vocabulary of our own, in which tokens cross every border there is."""

    def _read_vocabulary(self) -> Any:
        self._texts = VOCABULARY
        self._ends = np.zeros(-(-len(VOCABULARY) // 32), np.int32)
        self._ends[STOP >> 5] = np.int64(1 << (STOP & 31)).astype(np.int32)
        return TokenizerInfo(VOCABULARY, vocab_type=VocabType.RAW, stop_token_ids=[STOP])


COMPILER = Spelt(
    SimpleNamespace(special_token_ids=frozenset({STOP}), vocabulary_size=len(VOCABULARY), eos_token_ids=(STOP,))
)


class Counted:
    """A matcher of xgrammar's that counts how many masks it made."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self.masks = matcher, 0

    def fill_next_token_bitmask(self, bits: Any) -> None:
        self.masks += 1
        self._matcher.fill_next_token_bitmask(bits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def walk(grammar: Grammar, chance: random.Random, script: str = "") -> tuple[int, int]:
    """Go along a part of `script` and then anywhere, comparing masks with new ones; how many looked at, and made."""
    compiled, matcher = COMPILER.compile(grammar), COMPILER.matcher(GenerationParams(grammar=grammar))
    assert matcher is not None
    matcher._matcher = counted = Counted(matcher._matcher)  # type: ignore[assignment]
    fresh, looked = GrammarMatcher(compiled), 0
    left = script.encode()[: chance.randrange(len(script) + 1)]
    for _ in range(len(left) + 40):
        bits = np.full_like(matcher._permitted, -1)
        fresh.fill_next_token_bitmask(bits)
        bits &= matcher._permitted
        if matcher._follows is not None:
            bits &= matcher._follows
        if chance.random() < 0.7:  # tokens that another worker has chosen are accepted without a look
            np.testing.assert_array_equal(matcher.mask(), bits)
            looked += 1
        indices = np.flatnonzero(np.unpackbits((bits & ~matcher._ends).view(np.uint8), bitorder="little"))
        allowed = set(indices[indices < len(VOCABULARY)].tolist())
        along = [token for token in allowed if left.startswith(VOCABULARY[token])] if left else []
        usual = allowed.intersection(PRINTABLE) if chance.random() < 0.95 else allowed
        if not allowed:
            break
        token = chance.choice(along or sorted(usual or allowed))
        left = left[len(VOCABULARY[token]) :] if along else b""
        matcher.accept(token)
        assert fresh.accept_token(token)
    return looked, counted.masks


@given(one=st.sampled_from(DOCUMENTS), chance=st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_mask_used_again_in_a_document_is_the_one_a_new_look_would_give(one: Grammar, chance: random.Random) -> None:
    walk(one, chance)


@given(one=st.sampled_from(CALLS), chance=st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_and_so_it_is_in_calls_and_the_text_around_them(one: tuple[Grammar, str], chance: random.Random) -> None:
    walk(one[0], chance, one[1])


@given(
    one=st.sampled_from(
        [
            schema_grammar({"type": "string"}),
            schema_grammar({"type": "string", "maxLength": 9}),
            schema_grammar({"type": "object"}),
            regex_grammar(r"[^a]{9}"),
            ebnf_grammar("root ::= [^a-z]*"),
        ]
    ),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=120, deadline=None)
def test_each_grammar_allows_utf_8_alone(one: Grammar, chance: random.Random) -> None:
    """No half of a surrogate pair, and nothing beyond the last character, in one token or in several."""
    COMPILER.compile(one)
    matcher, decoder = COMPILER.matcher(GenerationParams(grammar=one)), getincrementaldecoder("utf-8")()
    assert matcher is not None
    for _ in range(40):
        indices = np.flatnonzero(np.unpackbits((matcher.mask() & ~matcher._ends).view(np.uint8), bitorder="little"))
        allowed = indices[indices < len(VOCABULARY)].tolist()
        if not allowed:
            break
        odd = [token for token in allowed if not VOCABULARY[token].isascii()]
        decoder.decode(VOCABULARY[token := chance.choice(odd or allowed)])
        matcher.accept(token)


def after(one: Grammar, text: bytes) -> list[bytes]:
    """The texts that may come next."""
    COMPILER.compile(one)
    matcher = COMPILER.matcher(GenerationParams(grammar=one))
    assert matcher is not None
    for byte in text:
        matcher.accept(byte)
    indices = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
    assert indices.max() < len(VOCABULARY)
    assert isinstance(matcher.forced(8), str)
    return [VOCABULARY[token] for token in indices]


@pytest.mark.parametrize("pattern", ["[^a]{9}", ".*", r"\S+"])
def test_no_character_takes_more_bytes_than_it_needs(pattern: str) -> None:
    """And the mask ends where the vocabulary does."""
    one = schema_grammar({"type": "string", "pattern": pattern})
    assert b"\xa0" in after(one, b'"\xe0') and b"\x80" not in after(one, b'"\xe0')
    assert b"\x90" in after(one, b'"\xf0') and b"\x80" not in after(one, b'"\xf0')


@pytest.mark.parametrize("bounds", [{"minLength": 3}, {"maxLength": 30}, {"minLength": 1, "maxLength": 140}])
def test_a_string_of_bounded_length_in_a_call_has_no_tab(bounds: dict[str, int]) -> None:
    part = {"type": "json_schema", "json_schema": json.loads(schema_grammar({"type": "string"} | bounds).text)}
    document = part | {"style": "json", "max_whitespace_cnt": 2}
    elements = [{"type": "const_string", "value": "a\tb"}, document, {"type": "any_text"}]
    format = {"type": "sequence", "elements": elements}
    one = Grammar(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": format}))
    assert b"\t" in after(one, b"a")
    assert b"x" in after(one, b'a\tb"') and b"\t" not in after(one, b'a\tb"')
    assert b"\t" in after(one, b'a\tb"xyz"')


def cost(grammar: Grammar, text: str) -> float:
    """Masks made for each token of a text, in long tokens."""
    matcher, left, tokens = COMPILER.matcher(GenerationParams(grammar=grammar)), text.encode(), 0
    assert matcher is not None
    matcher._matcher = counted = Counted(matcher._matcher)  # type: ignore[assignment]
    while left:
        matcher.mask()
        token = max(range(STOP), key=lambda token: len(VOCABULARY[token]) * left.startswith(VOCABULARY[token]))
        matcher.accept(token)
        left, tokens = left[len(VOCABULARY[token]) :], tokens + 1
    return counted.masks / tokens


@pytest.mark.parametrize(("schema", "text"), PLAIN)
def test_words_in_a_string_cost_one_mask(schema: dict[str, Any], text: str) -> None:
    assert cost(schema_grammar(schema), text) < 0.8


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "deepseek_v3_1"])
def test_words_beside_calls_and_in_them_cost_few(name: str) -> None:
    text = "the cat the cat the tool of the cat, the cat of the tool"
    assert cost(tool_grammar(name, "auto"), text) < 0.4
    calls = [("write_file", {"path": text, "content": text * 5})]
    assert cost(tool_grammar(name, "required"), written(TOOL_FORMATS[name].layout, calls, json.dumps)) < 0.6


def test_definitions_that_all_name_each_other_are_looked_at_once() -> None:
    names = [f"n{index}" for index in range(20)]
    all_of_them = [{"$ref": f"#/$defs/{name}"} for name in names]
    definitions = {name: {"anyOf": [*all_of_them, {"type": "null"}]} for name in names}
    assert free_text(Grammar(kind="json_schema", text=json.dumps({"$ref": "#/$defs/n0", "$defs": definitions}))) is None
    small = {name: {"anyOf": all_of_them[:4]} for name in names[:9]}
    assert free_text(Grammar(kind="json_schema", text=json.dumps({"$ref": "#/$defs/n0", "$defs": small}))) is not None


@pytest.mark.parametrize("deciding", DECIDING)
def test_where_letters_decide_every_mask_is_new(deciding: Grammar) -> None:
    for seed in range(10):
        looked, masks = walk(deciding, random.Random(seed))
        assert masks >= looked

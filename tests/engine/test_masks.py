"""What a grammar allows next, looked up again only where it may have changed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import BY_HAND, generate, record

from penstock.engine import GenerationParams
from penstock.engine.grammar import GrammarCompiler
from penstock.engine.json_schema import json_schema_grammar
from penstock.engine.tokenizer import Tokenizer
from penstock.schemas.params import Grammar

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
# Those in which no letter does.
PLAIN: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "array", "items": {"type": ["string", "null", "number"]}, "minItems": 4},
    record({"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}, "n": {}}, "tags"),
    {"type": "object", "additionalProperties": {"anyOf": [{"type": "string"}, {"enum": [1, None]}]}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": record({"a": {"type": "string"}, "b": {"$ref": "#/$defs/tree"}}, "b")}},
]


class Counted:
    """A matcher of xgrammar's that counts how many masks it made."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self.masks = matcher, 0

    def fill_next_token_bitmask(self, bits: Any) -> None:
        self.masks += 1
        self._matcher.fill_next_token_bitmask(bits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.fixture(scope="module")
def walk(model_directory: Callable[[str], Path]) -> Callable[[Grammar, random.Random], tuple[int, int]]:
    """Goes some random way through a grammar, comparing masks with new ones; how many looked at, and made."""
    from xgrammar import GrammarMatcher

    compiler = GrammarCompiler(Tokenizer(model_directory("llama")))

    def go(grammar: Grammar, chance: random.Random) -> tuple[int, int]:
        compiled, matcher = compiler.compile(grammar), compiler.matcher(GenerationParams(grammar=grammar))
        assert matcher is not None
        matcher._matcher = counted = Counted(matcher._matcher)  # type: ignore[assignment]
        fresh, looked = GrammarMatcher(compiled), 0
        for _ in range(60):
            bits = np.full_like(matcher._permitted, -1)
            fresh.fill_next_token_bitmask(bits)
            bits &= matcher._permitted
            if chance.random() < 0.5:  # tokens that another worker has chosen are accepted without a look
                np.testing.assert_array_equal(matcher.mask(), bits)
                looked += 1
            allowed = np.flatnonzero(np.unpackbits((bits & ~matcher._ends).view(np.uint8), bitorder="little"))
            if not len(allowed):
                break
            token = int(chance.choice(allowed))
            matcher.accept(token)
            assert fresh.accept_token(token)
        return looked, counted.masks

    return go


def grammar(schema: dict[str, Any]) -> Grammar:
    return json_schema_grammar(schema, path="p")


DECIDING = [*(grammar(schema) for schema in FORKS), Grammar(kind="json_schema", text=json.dumps(RAW))]
ALL = [*DECIDING, *(grammar(schema) for schema in [*PLAIN, *BY_HAND.values(), *map(generate, range(100))])]


@given(one=st.sampled_from(ALL), chance=st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_a_mask_used_again_is_the_one_a_new_look_would_give(
    walk: Callable[..., Any], one: Grammar, chance: random.Random
) -> None:
    walk(one, chance)


@pytest.mark.parametrize("schema", PLAIN)
def test_the_letters_of_a_free_string_cost_one_mask(walk: Callable[..., Any], schema: dict[str, Any]) -> None:
    walks = [walk(grammar(schema), random.Random(seed)) for seed in range(10)]
    assert sum(masks for _, masks in walks) < 0.8 * sum(looked for looked, _ in walks)


@pytest.mark.parametrize("deciding", DECIDING)
def test_where_letters_decide_every_mask_is_new(walk: Callable[..., Any], deciding: Grammar) -> None:
    for seed in range(10):
        looked, masks = walk(deciding, random.Random(seed))
        assert masks >= looked

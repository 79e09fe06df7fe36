"""What of JSON Schema can be held to, and what is refused, with the path of the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from json_schemas import BY_HAND, generate, record

from penstock.engine.grammar.json_schema import (
    any_json_object,
    choice_grammar,
    ebnf_grammar,
    json_schema_grammar,
    regex_grammar,
)
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.grammar.schema_facts import longest_counted
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.params import Grammar

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_HOSTNAME = (
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)


def accepts(grammar: Grammar, text: str) -> bool:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    match grammar.kind:
        case "json_schema":
            made = xgrammar.Grammar.from_json_schema(grammar.text, any_whitespace=False)
        case "regex":
            made = xgrammar.Grammar.from_regex(grammar.text)
        case _:
            made = xgrammar.Grammar.from_ebnf(grammar.text)
    return bool(_is_grammar_accept_string(made, text))


def fault_of(schema: Any, strict: bool = False) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        json_schema_grammar(schema, path="p", strict=strict)
    return caught.value


@pytest.mark.parametrize("name", BY_HAND)
def test_realistic_schemas_are_taken(name: str) -> None:
    assert json_schema_grammar(BY_HAND[name], path="p").kind == "json_schema"


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"age": {"type": "integer", "multipleOf": 5, "minimum": 0}}}, "properties.age.multipleOf"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "integer", "multipleOf": 5000}, "multipleOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"contains": {}}}, "items.contains"),
        ({"type": "array", "minContains": 1}, "minContains"),
        ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
        ({"anyOf": [STRING, {"not": STRING}]}, "anyOf[1].not"),
        ({"if": STRING, "then": STRING}, "if"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependentSchemas": {}}, "dependentSchemas"),
        ({"dependencies": {}}, "dependencies"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"type": "string", "nullable": 1}, "nullable"),
        ({"type": "string", "format": "uuid", "maxLength": 35}, "maxLength"),
        ({"type": "string", "format": "email", "maxLength": 50}, "maxLength"),  # most addresses would be left out
        ({"type": "string", "format": "date", "minLength": 11}, "minLength"),
        ({"type": "array", "items": [STRING, {"not": {}}]}, "prefixItems[1].not"),
        ({"type": "string", "maxLenght": 3}, "maxLenght"),
        ({"patternProperties": {"^a$": STRING}, "properties": {"b": STRING}}, "patternProperties"),
        ({"patternProperties": {"^a$": STRING, "^b$": STRING}}, "patternProperties"),
        ({"propertyNames": {"maxLength": 3}, "properties": {"b": STRING}}, "propertyNames"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "string", "pattern": "^a$", "maxLength": 0}, "pattern"),
        ({"type": "string", "pattern": "^(a+b)+$", "minLength": 300}, "minLength"),
        ({"type": "string", "pattern": "(?!a)a"}, "pattern"),
        ({"type": "string", "pattern": "(?<=a(?=b))b"}, "pattern"),
        ({"type": "string", "pattern": "^(?=.{900}$)(a|b)+$"}, "pattern"),
        ({"type": "string", "pattern": "(?:(?:a{99}){99}b){999}"}, "pattern"),
        ({"type": "string", "pattern": "[[:alpha:]]"}, "pattern"),
        ({"type": "string", "pattern": "\\p{Greek}"}, "pattern"),
        ({"type": "string", "format": "iri"}, "format"),
        ({"type": "string", "format": "json-pointer"}, "format"),
        ({"type": "string", "pattern": "(a)\\1"}, "pattern"),
        ({"type": "string", "pattern": "[z-a]"}, "pattern"),
        ({"enum": ["abc"], "maxLength": 2}, "maxLength"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [record({"a": STRING}), record({"b": STRING})]}, "oneOf"),
        ({"allOf": [record({"a": STRING}), record({"b": STRING})]}, "allOf[1]"),
        ({"allOf": [{"prefixItems": [INTEGER]}], "items": STRING}, "allOf[0]"),
        ({"allOf": [{"patternProperties": {"^a$": STRING}}, {"additionalProperties": False}]}, "allOf[1]"),
        ({"allOf": [{"const": 1}, {"const": True}]}, "allOf[1].const"),
        ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, ""),
        ({"$defs": {"a": {"$id": "urn:a", "$ref": "#/$defs/b"}, "b": {}}, "$ref": "#/$defs/a"}, "$defs.a.$id"),
        ({"$ref": "http://example.com/schema"}, "$ref"),
        ({"$ref": "other.json#/a"}, "$ref"),
        ({"$ref": "#anchor"}, "$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"a": {}}}, "properties.a.$ref"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_path(schema: Any, path: str) -> None:
    error = fault_of(schema)
    assert error.param == f"p.{path}".rstrip(".")
    assert str(error).startswith(f"{error.param}: ")
    assert error.status == 400


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "strin"}, ".type"),
        ({"type": []}, ".type"),
        ({"type": ["string", 5]}, ".type"),
        ({"properties": []}, ".properties"),
        ({"properties": {"a": 5}}, ".properties.a"),
        ({"required": "a"}, ".required"),
        ({"required": [1]}, ".required"),
        ({"minLength": -1}, ".minLength"),
        ({"maxItems": 1.5}, ".maxItems"),
        ({"minimum": "3"}, ".minimum"),
        ({"minimum": True}, ".minimum"),
        ({"minimum": float("inf")}, ".minimum"),
        ({"enum": []}, ".enum"),
        ({"enum": 5}, ".enum"),
        ({"anyOf": {}}, ".anyOf"),
        ({"pattern": 5}, ".pattern"),
        ({"$defs": {"a": {"type": 5}}, "$ref": "#/$defs/a"}, ".$defs.a.type"),
        ({"$ref": 5}, ".$ref"),
        (5, ""),
        # what no value fits
        (False, ""),
        ({"properties": {"a": False}, "required": ["a"]}, ".required"),
        ({"properties": {}, "required": ["a"], "additionalProperties": False}, ".required"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, ".minLength"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, ""),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3}, ""),
        ({"type": "integer", "minimum": 1e30}, ""),
        ({"type": "array", "items": False, "minItems": 1}, ".minItems"),
        ({"type": "integer", "enum": ["a"]}, ""),
        ({"const": 2**63}, ""),
        ({"enum": [[-(2**70)]]}, ""),
        ({"allOf": [STRING, INTEGER]}, ".allOf[1]"),
        ({"$ref": "#"}, ""),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ""),
        ({"$defs": {"a": {"$ref": "#/$defs/a", "maxLength": 3}}, "$ref": "#/$defs/a"}, ""),
        (record({"next": {"$ref": "#"}}), ""),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ""),
    ],
)
def test_malformed_and_empty_schemas_are_refused_with_the_path(schema: Any, path: str) -> None:
    assert fault_of(schema).param == f"p{path}"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ['{"a": [1, null]}', "1"], ['{"a":  1}', " 1", "1 "]),
        ({"type": "object"}, ['{"a": 1}', "{}"], ["[]", '{\n"a": 1}']),
        ({"properties": {"a": STRING}}, ["{}", '{"a": "x"}'], ['{"b": 1}', '{"a": 1}', "[]"]),
        ({"required": ["a"]}, ['{"a": 1}', '{"a": 1, "c": 2}'], ["{}", '{"b": 1}']),
        ({"maxLength": 2}, ['"ab"'], ['"abc"', "1"]),
        ({"type": "array", "maxItems": 2}, ['[1, "a"]', "[]"], ["[1, 2, 3]"]),
        ({"type": "array", "prefixItems": [STRING], "minItems": 2}, ['["a", 1]'], ['["a"]']),
        ({"type": "array", "prefixItems": [STRING, INTEGER], "maxItems": 1}, ['["a"]'], ['["a", 1]']),
        ({"type": "integer", "maximum": 1e25, "minimum": 7}, ["7", "99999"], ["6"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"2100-02-29"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"01:02:03.5+01:00"'], ['"24:00:00Z"', '"12:00:60Z"']),
        ({"type": "string", "format": "ipv4"}, ['"10.0.255.1"'], ['"10.00.255.1"', '"256.1.1.1"']),
        ({"type": "string", "format": "email"}, ['"first.last@a-b.org"'], ['"a..b@c.de"', '"a@b"']),
        ({"type": "string", "pattern": "^a(?:bc+?)?d$"}, ['"abccd"', '"ad"'], ['"acd"', '"abd"']),
        ({"type": "string", "pattern": '^"$'}, ['"\\""'], ['"""']),
        ({"type": "string", "pattern": "^\\x0a\\t$"}, ['"\\n\\t"'], ['"\n\t"']),
        ({"type": "string", "pattern": "^[^ä]$"}, ['"b"'], ['"""', '"\\"', '"\n"']),
        ({"type": "string", "pattern": "^[^-ä]$"}, ['"b"', '"+"'], ['"-"', '"""']),
        ({"type": "string", "pattern": "^[\\w\\sÀ-ÿ]+$"}, ['"a É"'], ['"\n"', '"a\\"']),
        ({"type": "string", "pattern": "^https://"}, ['"https://"', '"https://a b"'], ['"http://a"', '" https://"']),
        ({"type": "string", "pattern": "\\.png$"}, ['".png"', '"a.png"'], ['"a.pngs"', '"apng"']),
        ({"type": "string", "pattern": "^a|b$"}, ['"ac"', '"cb"', '"a"'], ['"c"', '"ca"', '"bc"']),
        ({"type": "string", "pattern": "(^|,)a(,|$)"}, ['"a"', '"b,a"', '",a,"'], ['"ba"', '"ab"']),
        ({"type": "string", "pattern": "^[$^]\\$"}, ['"$$"', '"^$x"'], ['"$"', '"x$$"']),
        ({"type": "string", "pattern": "foo|bar"}, ['"foo"', '"bar"'], ['"foos"', '"foobar"']),
        ({"type": "string", "pattern": "@", "format": "includes"}, ['"@"', '"a@b"'], ['"ab"']),
        ({"patternProperties": {"^x-": INTEGER}}, ['{"x-a": 1}', "{}"], ['{"y": 1}']),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ['"ab"', '"a-b"'], ['"a"', '"b"', '"ba"']),
        (
            {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3, "minLength": 2},
            ['"ab"', '"abc"'],
            ['"a"', '"abcd"'],
        ),
        ({"type": "string", "pattern": "^(ab?)+$", "maxLength": 4}, ['"abab"', '"aaaa"'], ['"ababa"', '"b"']),
        ({"type": "string", "pattern": "^(a+b)+$", "maxLength": 300}, ['"aabab"'], ['"aba"', f'"{"ab" * 151}"']),
        (
            {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "minLength": 3, "maxLength": 100},
            ['"abc"', '"some-words-here"', f'"{"a" * 13}-{"b" * 13}"'],
            ['"a"', '"ab"', f'"{"abc-" * 25}d"'],
        ),
        (
            {"type": "string", "pattern": ZOD_EMAIL, "maxLength": 180},
            ['"a.b@c-d.org"', f'"{"a" * 20}@{"b" * 13}.org"'],
            ['".a@b.org"', '"a..b@c.org"', f'"{"a" * 150}@{"b" * 30}.org"'],
        ),
        (
            {"type": "string", "format": "email", "minLength": 10, "maxLength": 255},
            ['"someone@b.org"'],
            ['"a@b.org"'],
        ),
        (
            {"type": "string", "format": "uri", "maxLength": 255},
            ['"https://example.org/a?b=c"'],
            ['"example.org"', f'"https://example.org/{"a" * 240}"'],
        ),
        ({"type": "string", "pattern": "^a", "maxLength": 300}, ['"a"', f'"a{"b" * 299}"'], [f'"a{"b" * 300}"']),
        ({"type": "string", "pattern": "^a{3,200}$"}, [f'"{"a" * 200}"'], [f'"{"a" * 201}"', '"aa"']),
        ({"type": "string", "pattern": "^(?:a{1,3}|a)$"}, ['"aaa"'], ['"aaaa"']),
        ({"type": "string", "pattern": '^(?:[ab]{0,2}|"c)$'}, ['"ab"', '"\\"c"'], ['"aba"', '"c"']),
        ({"type": "string", "pattern": ZOD_EMAIL}, ['"a.b@c-d.org"'], ['".a@b.org"', '"a..b@c.org"', '"a@b"']),
        ({"type": "string", "pattern": ZOD_HOSTNAME, "format": "hostname"}, ['"a.b-c.org"'], ['"-a"', '"a b"']),
        (
            record({"ab": STRING}) | {"additionalProperties": INTEGER},
            ['{"ab": "x", "a": 1, "": 2}'],
            [r'{"ab": "x", "\u0061b": 1}'],
        ),
        (record({"ä": STRING}, "ä") | {"additionalProperties": INTEGER}, ['{"ö": 1}'], ['{"ä": 1}', r'{"\u00e4": 1}']),
        ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
        ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": INTEGER}}, ["1"], ["null"]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 2}, ["1.5", "2"], ["1", "2.5"]),
        ({"items": [STRING, INTEGER], "minItems": 2, "maxItems": 2}, ['["a", 1]'], ['["a"]', '["a", 1, 2]']),
        ({"items": [STRING], "additionalItems": INTEGER}, ['["a"]', '["a", 1, 2]'], ['["a", "b"]']),
        ({"items": STRING, "additionalItems": False}, ['["a"]', '["a", "b"]'], ["[1]"]),
        (
            {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},  # pydantic's HttpUrl
            ['"https://example.com"', '"http://a-b.example.org:8080/x/y?z=1&w=2"'],
            ['"example.com"', '""', '"https://a b"', f'"https://example.com/{"x" * 100}"'],
        ),
        ({"type": "string", "format": "uri", "minLength": 1}, ['"https://example.com"'], ['""']),
        ({"type": "string", "format": "email", "maxLength": 320}, ['"a@b.org"'], ['"a"']),
        ({"type": "string", "format": "uuid", "pattern": "^[0-9a-f]{4}$"}, ['"12ab"'], ['"12"']),
        ({"type": "string", "pattern": "^\\S$"}, ['"a"', '"é"'], ['"\xa0"', '"\u2003"', '" "']),
        ({"type": "string", "pattern": "^[^,\\s-]$"}, ['"a"', '"é"'], ['"\xa0"', '","', '"-"']),
        ({"type": "string", "pattern": "^[\\s\\S]$"}, ['"a"', '"\xa0"'], ['"ab"']),
        (
            {"type": "string", "format": "hostname"},
            ['"a"', '"api.eu-1.example.com"'],
            ['"-a"', f'"{"a" * 64}.org"', f'"{".".join(["a" * 30] * 9)}"'],
        ),
        ({"type": "string", "maxLength": 250}, [f'"{"ä" * 250}"', '""'], [f'"{"ä" * 251}"', '"\t"']),
        (
            {"type": "string", "minLength": 130, "maxLength": 350},
            [f'"{"a" * 130}"', f'"{"a" * 350}"'],
            [f'"{"a" * 129}"'],
        ),
        ({"type": "string", "minLength": 200}, [f'"{"a" * 200}"', f'"{"a" * 999}"'], [f'"{"a" * 199}"']),
        (
            {"propertyNames": {"maxLength": 150}, "additionalProperties": INTEGER},
            ['{"ab": 1}'],
            [f'{{"{"a" * 151}": 1}}'],
        ),
        ({"type": "number", "minimum": 1e-6, "exclusiveMaximum": 2e-6}, ["0.000001"], ["", "0.000002"]),
        ({"allOf": [{"type": "array"}, {"prefixItems": [STRING], "items": False}]}, ['["a"]'], ['["a", 1]']),
        ({"$id": "urn:a", "$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": INTEGER}}, ["1"], ["0"]),
        ({"allOf": [INTEGER, {"minimum": 3}], "maximum": 4}, ["3", "4"], ["2", "5", '"3"']),
        ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": STRING}}, ['"x"'], ['"xx"', "1"]),
        ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"]),
        ({"properties": {"a": False, "b": STRING}, "additionalProperties": True}, ['{"b": "x"}'], ['{"a": 1}']),
        ({"type": ["integer", "number"], "minimum": 1}, ["1", "1.5"], ["0"]),
    ],
)
def test_what_xgrammar_alone_would_get_wrong(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar(schema, path="p")
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_strict_demands_what_openai_demands() -> None:
    whole = record({"a": record({"b": STRING})})
    assert json_schema_grammar(whole, path="p", strict=True)
    open_inside = fault_of(record({"a": {"type": "object", "properties": {}}}), strict=True)
    assert open_inside.param == "p.properties.a.additionalProperties"
    assert "'additionalProperties' is required to be supplied and to be false" in str(open_inside)
    optional = fault_of(record({"a": STRING, "b": STRING}, "b"), strict=True)
    assert optional.param == "p.required"
    assert "Missing 'b'" in str(optional)
    assert json_schema_grammar(record({"a": STRING, "b": STRING}, "b"), path="p")


def test_lengths_that_recur_are_counted_once_and_a_tool_that_is_not_strict_goes_without() -> None:
    several = record({"a": {"maxLength": 400}, "b": {"maxLength": 400}, "c": {"maxLength": 112, "minLength": 1}})
    assert longest_counted(json_schema_grammar(several, path="p")) == 112
    with pytest.raises(InvalidRequest, match=r"p.properties.a.maxLength: cannot be enforced above 128\.") as caught:
        json_schema_grammar(several, path="p", counts=False)
    assert caught.value.code == "unsupported_schema"


def test_long_strings_of_many_lengths_need_a_small_vocabulary() -> None:
    several = record({"a": {"maxLength": 300}, "b": {"maxLength": 300}, "c": {"minLength": 213}})
    grammar = json_schema_grammar(several, path="p")
    assert longest_counted(grammar) == 213
    with pytest.raises(InvalidRequest, match="need a Hugging Face tokenizer"):  # which is asked for behind that
        GrammarCompiler(cast(Any, SimpleNamespace(vocabulary_size=49_152))).compile(grammar)
    with pytest.raises(InvalidRequest, match=r"above 128 may come to 512 characters .* vocabulary of 151,936 tokens"):
        GrammarCompiler(cast(Any, SimpleNamespace(vocabulary_size=151_936))).compile(grammar)


def test_size_is_limited() -> None:
    wide = {"type": "object", "properties": {f"p{place}": STRING for place in range(4000)}}
    assert json_schema_grammar(wide, path="p")
    wider = {"type": "object", "properties": {f"p{place}": STRING for place in range(10_000)}}
    assert "10000 nodes" in str(fault_of(wider))
    deep: Any = STRING
    for _ in range(100):
        deep = record({"a": deep})
    assert "deeper than" in str(fault_of(deep))
    half: Any = STRING
    for _ in range(50):
        half = record({"a": half})
    assert json_schema_grammar(half, path="p")


def test_references_that_multiply_are_limited() -> None:
    parts: dict[str, Any] = {"a0": {"type": "object"}}
    for place in range(30):
        ref = {"$ref": f"#/$defs/a{place}", "minProperties": 0}
        parts[f"a{place + 1}"] = {"properties": {"l": ref, "r": ref}}
    assert "10000 nodes" in str(fault_of({"$ref": "#/$defs/a30", "$defs": parts}))


def test_other_grammars() -> None:
    choices = ['a"b', "\\", "\n", "é😀", "]"]
    grammar = choice_grammar(choices)
    assert all(accepts(grammar, choice) for choice in choices)
    assert not accepts(grammar, 'a"bx')
    assert accepts(regex_grammar(r'^"[^"]{3}"\n$'), '"abc"\n')
    assert accepts(ebnf_grammar('root ::= "a" b\nb ::= "c"'), "ac")
    of_parts = ebnf_grammar(r'root ::= "\x41b" [\x01a] . "." # .')
    assert accepts(of_parts, "Ab\x01é.") and accepts(of_parts, "Abax.") and not accepts(of_parts, "Ab\x1ax.")
    assert accepts(any_json_object(), '{"a": []}') and not accepts(any_json_object(), "[]")
    wrong: list[Callable[[], Grammar]] = [
        lambda: choice_grammar([]),
        lambda: choice_grammar(["a", ""]),
        lambda: regex_grammar("(?!b)b"),
        lambda: ebnf_grammar("expr: NUMBER"),
    ]
    for make in wrong:
        with pytest.raises(InvalidRequest) as caught:
            make()
        assert str(caught.value.param).startswith("guided_")


def test_generated_schemas_are_taken() -> None:
    for seed in range(300):
        json.loads(json_schema_grammar(generate(seed), path="p").text)

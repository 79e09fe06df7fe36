"""Realistic JSON Schemas of bounded size: written by hand, and made up by a generator."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 6}
_COLOUR: Schema = {"type": "string", "enum": ["red", "green", "bleu-ciel", 'a "quoted" one']}
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid")


def record(properties: Schema, *optional: str, **others: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False} | others


BY_HAND: dict[str, Schema] = {
    "person": record(
        {"name": _NAME, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "member": {"type": "boolean"}}
    ),
    "optional": record(
        {"a": _NAME, "b": {"type": "integer", "maximum": 9, "minimum": 0}, "c": {"type": "null"}}, "a", "b", "c"
    ),
    "nested": record(
        {
            "user": record(
                {
                    "address": record(
                        {"city": _NAME, "geo": record({"lat": {"type": "number", "minimum": -90, "maximum": 90}})}
                    )
                }
            )
        }
    ),
    "tags": record({"tags": {"type": "array", "items": _NAME, "minItems": 1, "maxItems": 3}}),
    "matrix": {
        "type": "array",
        "items": {
            "type": "array",
            "items": {"type": "integer", "minimum": -9, "maximum": 9},
            "minItems": 2,
            "maxItems": 2,
        },
        "maxItems": 2,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [_NAME, {"type": "boolean"}, {"enum": [1, 2]}],
        "minItems": 3,
        "maxItems": 3,
    },
    "tuple and rest": {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"enum": ["x"]}, "maxItems": 3},
    "enum of all types": {"enum": ["a", 1, 1.5, None, True, {"x": [1]}, [1, {"y": "z"}]]},
    "typed enum": {"type": ["string", "null"], "enum": ["a", 1, None]},
    "const": record({"kind": {"const": "circle"}, "version": {"const": 3}, "shape": {"const": {"sides": [1, 2]}}}),
    "any of": {"anyOf": [_NAME, {"type": "integer", "minimum": 1, "maximum": 5}, {"type": "null"}]},
    "one of by type": {"oneOf": [_NAME, {"type": "integer", "minimum": 1, "maximum": 5}]},
    "one of by tag": {
        "oneOf": [record({"t": {"const": "a"}, "n": {"enum": [1]}}), record({"t": {"const": "b"}, "m": _NAME})]
    },
    "discriminated refs": {
        "$defs": {
            "Cat": record({"pet": {"const": "cat", "type": "string"}}),
            "Dog": record({"pet": {"const": "dog", "type": "string"}, "b": {"type": "boolean"}}),
        },
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "pet"},
    },
    "nullable by type": record(
        {
            "a": {"type": ["string", "null"], "maxLength": 3},
            "b": {"type": ["integer", "null"], "minimum": 5, "maximum": 6},
        }
    ),
    "refs": {
        "$defs": {"colour": _COLOUR},
        **record({"one": {"$ref": "#/$defs/colour"}, "two": {"$ref": "#/$defs/colour", "description": "the second"}}),
    },
    "definitions": {"definitions": {"a/b c": {"enum": [7]}}, **record({"x": {"$ref": "#/definitions/a~1b%20c"}})},
    "ref narrowed": {
        "$defs": {"n": {"type": "integer", "minimum": 3}},
        **record({"x": {"$ref": "#/$defs/n", "maximum": 9}}),
    },
    "ref into a list": record({"x": {"anyOf": [{"enum": ["q"]}]}, "y": {"$ref": "#/properties/x/anyOf/0"}}),
    "tree": record({"value": {"enum": [1]}, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}),
    "linked list": {
        "$defs": {
            "node": record({"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
        },
        "$ref": "#/$defs/node",
    },
    "expression": {
        "$defs": {
            "e": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 9},
                    record(
                        {
                            "op": {"enum": ["+", "-"]},
                            "of": {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 1, "maxItems": 1},
                        }
                    ),
                ]
            }
        },
        "$ref": "#/$defs/e",
    },
    "all of": {
        "allOf": [
            record({"a": _NAME}) | {"additionalProperties": True},
            record({"b": _COLOUR}) | {"additionalProperties": True},
        ]
    },
    "all of a base": {
        "$defs": {"base": {"type": "object", "properties": {"id": {"enum": [1]}}, "required": ["id"]}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"name": _NAME}, "required": ["name"]}],
    },
    "all of one": {"allOf": [_NAME], "description": "a name"},
    "tightened": {
        "allOf": [
            {"type": "integer", "minimum": 3},
            {"minimum": 5, "maximum": 20},
            {"type": "number", "exclusiveMaximum": 8},
        ]
    },
    "either required": {
        "type": "object",
        "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "propertyNames": {"maxLength": 3},
        "maxProperties": 2,
    },
    "map by pattern": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "map by enum": {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/k"},
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
        "$defs": {"k": {"enum": ["a", "b"]}},
    },
    "open record": record({"ä": {"enum": ["x"]}, "ab": {"enum": [1]}})
    | {"additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "required elsewhere": {
        "type": "object",
        "properties": {},
        "required": ["z"],
        "additionalProperties": {"enum": [1]},
        "maxProperties": 1,
    },
    "counted": record(
        {"a": {"enum": [1]}, "b": {"enum": [1]}, "c": {"enum": [1]}}, "a", "b", "c", minProperties=1, maxProperties=2
    ),
    "names": record(
        {
            "größe": {"enum": [1]},
            "名前": _NAME,
            'q"\\/\n': {"type": "boolean"},
            "": {"type": "null"},
            "😀": {"enum": ["é", "😀"]},
        }
    ),
    "number bounds": record(
        {
            "p": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "t": {"type": "number", "minimum": -1.25, "maximum": 3.5},
        }
    ),
    "integer bounds": record(
        {
            "i": {"type": "integer", "exclusiveMinimum": -3, "maximum": 3.5},
            "j": {"type": "integer", "minimum": 98, "maximum": 1012},
        }
    ),
    "multiples": record({"m": {"type": "integer", "multipleOf": 5}}),
    "untyped": {"properties": {"a": {"minimum": 2, "maximum": 4}, "b": {"maxLength": 3}}, "required": ["a", "b"]},
    "pattern": record(
        {
            "plate": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
            "quoted": {"type": "string", "pattern": '^"[ab]\\\\\\n"$'},
            "text": {"type": "string", "pattern": "^[^ä]{1,4}$"},
        }
    ),
    "formats": record(
        {
            "d": {"type": "string", "format": "date"},
            "t": {"type": "string", "format": "date-time"},
            "u": {"type": "string", "format": "uuid"},
            "i": {"type": "string", "format": "ipv4"},
        }
    ),
    "address": {"type": "string", "format": "ipv6"},
    "lengths": record(
        {"empty": {"type": "string", "maxLength": 0}, "exact": {"type": "string", "minLength": 4, "maxLength": 4}}
    ),
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:x",
        "title": "T",
        "x-mine": 1,
        **record({"a": {"type": "boolean", "default": True, "examples": [False], "deprecated": True}}),
    },
    "true and false": record({"yes": {"anyOf": [{"enum": [True]}, {"enum": [False]}]}})
    | {"additionalProperties": False},
}


def generate(seed: int) -> Schema:
    """A random schema whose answers are short; the same for the same seed."""
    return _schema(random.Random(seed), 3)


def _schema(chance: random.Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _choice, _format]
    return chance.choice(kinds + ([_record, _record, _record, _list, _union, _map] if depth else []))(chance, depth)


def _string(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 4)}


def _integer(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(-200, 200)
    return {"type": "integer", "minimum": least, "maximum": least + chance.choice([0, 1, 7, 1000])}


def _number(chance: random.Random, depth: int) -> Schema:
    least = round(chance.uniform(-50, 50), chance.randint(0, 3))
    return {"type": "number", chance.choice(["minimum", "exclusiveMinimum"]): least, "maximum": least + 12.5}


def _choice(chance: random.Random, depth: int) -> Schema:
    values = ["a", "ß", "two words", 'say "no"', "\\", 1, -2, 0.5, None, False, [1, "x"], {"k": None}]
    return {"enum": chance.sample(values, chance.randint(1, 4))} if chance.random() < 0.7 else {"const": values[0]}


def _format(chance: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": chance.choice(_FORMATS)}


def _record(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(["id", "name", "größe", "is open", "价格", "x", "y-z", "$ref", "enum"], chance.randint(1, 4))
    properties = {name: _schema(chance, depth - 1) for name in names}
    return record(properties, *(name for name in names if chance.random() < 0.3))


def _list(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    return {"type": "array", "items": _schema(chance, depth - 1), "minItems": least, "maxItems": least + 1}


def _union(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(chance, depth - 1) for _ in range(chance.randint(2, 3))]}


def _map(chance: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "propertyNames": {"type": "string", "maxLength": 4},
        "additionalProperties": _schema(chance, depth - 1),
        "maxProperties": 2,
    }

"""What can be shown about the values of a rewritten schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any

from ...schemas.params import Grammar
from .schema_keywords import walk

MAX_COMPARISONS = 20_000  # of branches in a whole schema, to show that they exclude each other
_lengths = re.compile(r'"m(?:in|ax)Length":\s*(\d+)').findall
_LONGEST_BOUNDED = 64 << 10  # characters that a schema may force where xgrammar looks for them
_may_be_endless = re.compile(r'"(\$\w*ref|pattern\w*)"|\\u', re.IGNORECASE).search
_repeated = re.compile(r'"min(?:Items|Length|Properties|Contains)":\s*([-+.\deE]+)').findall


def disjoint(one: Any, two: Any, definitions: Mapping[str, Any], budget: list[int], depth: int = 4) -> bool:
    """Whether no value can fit both; False in doubt. `budget` holds the number of comparisons that are left."""
    budget[0] -= 1
    if budget[0] < 0:
        return False
    one, two = (definitions[target(node)] if "$ref" in node else node for node in (one, two))
    for node, other in ((one, two), (two, one)):
        if "anyOf" in node:
            return all(disjoint(branch, other, definitions, budget, depth) for branch in node["anyOf"])
    if "enum" in one and "enum" in two:
        return not any(value == other for value in one["enum"] for other in two["enum"])
    kinds, others = ({type_of(v) for v in n["enum"]} if "enum" in n else {n.get("type")} for n in (one, two))
    if None in kinds or None in others:
        return False
    if not kinds & others and not ({"integer", "number"} <= kinds | others):
        return True
    shared = [name for name in one.get("required", ()) if name in two.get("required", ())]
    return depth > 0 and any(
        disjoint(one["properties"][name], two["properties"][name], definitions, budget, depth - 1) for name in shared
    )


def has_finite_value(node: Any, finite: set[str]) -> bool:
    """Whether some value of a node is finite, given that the definitions `finite` have finite values."""
    if "$ref" in node:
        return target(node) in finite
    if "anyOf" in node:
        return any(has_finite_value(branch, finite) for branch in node["anyOf"])
    least, prefix = node.get("minItems", 0), node.get("prefixItems", [])
    needed = [node["properties"][name] for name in node.get("required", ())]
    needed += prefix[:least] + ([node["items"]] if least > len(prefix) else [])
    return all(has_finite_value(one, finite) for one in needed)


def longest_counted(grammar: Grammar) -> int:
    """The largest length of strings that xgrammar counts in a grammar; 0 if there is none."""
    return max(map(int, _lengths(grammar.text)), default=0) if grammar.kind in ("json_schema", "structural_tag") else 0


def refers(schema: Any) -> bool:
    """Whether a schema has references; True in doubt."""
    return any(isinstance(one, Mapping) and isinstance(one.get("$ref"), str) for one, _ in walk(schema))


def same(one: Any, two: Any) -> bool:
    """Whether two values are equal in JSON, where 1 is not true."""
    return one is two or (one == two and json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True))


def target(node: Any) -> str:
    return str(node["$ref"]).removeprefix("#/$defs/")


def type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return kinds.get(type(value), "object")


def is_bounded(grammar: Grammar) -> bool:
    """Whether it is a schema that forces no long text: no rule is within itself, and few repeat what they force."""
    length = len(grammar.text)
    if grammar.kind != "json_schema" or length > _LONGEST_BOUNDED or _may_be_endless(grammar.text):
        return False
    return length * prod(max(1.0, float(times)) for times in _repeated(grammar.text)) <= _LONGEST_BOUNDED

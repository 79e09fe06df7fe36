"""What is certain about a normalised schema: which values it has, and in how many ways they can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema_keywords import TYPES

MOST_COMPARISONS = 20_000  # of branches, to show for a whole schema that they exclude each other

_PLAIN = {  # keywords that count nothing within a string
    *("$defs", "$ref", "type", "enum", "anyOf", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}


def disjoint(one: Any, two: Any, definitions: Mapping[str, Any], budget: list[int], depth: int = 4) -> bool:
    """Whether it is certain that no value fits both. `budget` holds how many comparisons may still be made for it."""
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


def ends(node: Any, finite: set[str]) -> bool:
    """Whether some value of a node comes to an end, if those of the definitions `finite` do."""
    if "$ref" in node:
        return target(node) in finite
    if "anyOf" in node:
        return any(ends(branch, finite) for branch in node["anyOf"])
    least, prefix = node.get("minItems", 0), node.get("prefixItems", [])
    needed = [node["properties"][name] for name in node.get("required", ())]
    needed += prefix[:least] + ([node["items"]] if least > len(prefix) else [])
    return all(ends(one, finite) for one in needed)


def is_plain(root: Any) -> bool:
    """Whether the first character of a value tells which alternative it is, and all strings are fixed or free.

    A document then has one reading at any place, and one more letter of a free string changes nothing about what may
    follow it. False where that is not certain.
    """
    if not isinstance(root, Mapping):
        return False
    definitions = root.get("$defs", {})
    return all(_is_plain(node, definitions) for node in (root, *definitions.values()))


def _is_plain(node: Any, definitions: Mapping[str, Any]) -> bool:
    if node is False:
        return True
    if not isinstance(node, Mapping) or node.keys() - _PLAIN or ("$ref" in node and target(node) not in definitions):
        return False
    if "properties" in node and node.get("additionalProperties") is not False:  # a free name may begin like a fixed one
        return False
    branches = node.get("anyOf", ())
    inner = [*branches, *node.get("properties", {}).values(), *node.get("prefixItems", ())]
    inner += [node[name] for name in ("items", "additionalProperties") if name in node]
    if not all(_is_plain(one, definitions) for one in inner):
        return False
    begun = [kind for branch in branches for kind in _kinds(branch, definitions)]
    return len(begun) == len(set(begun))


def _kinds(node: Any, definitions: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> set[str]:
    """The types of a node's values."""
    if "$ref" in node:
        name = target(node)
        return set() if name in seen else _kinds(definitions[name], definitions, seen | {name})
    if "anyOf" in node:
        return {kind for branch in node["anyOf"] for kind in _kinds(branch, definitions, seen)}
    if "enum" in node:
        return {type_of(value) for value in node["enum"]}
    asked = node.get("type", TYPES)
    return {asked} if isinstance(asked, str) else {*asked}


def target(node: Any) -> str:
    return str(node["$ref"]).removeprefix("#/$defs/")


def type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return kinds.get(type(value), "object")

"""Where in a grammar text is free: the next word of it changes nothing about what may follow.

That is within the strings of a JSON document, and in text around tool calls; not in every grammar it is certain.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from ..schemas.params import Grammar
from .schema_facts import target, type_of
from .schema_keywords import TYPES
from .tool_grammar import GAP

_KEYWORDS = {  # that count nothing within a string
    *("$defs", "$ref", "type", "enum", "anyOf", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}


class FreeText(NamedTuple):
    """Free text has no character of `openers`, but for what begins one of `literals` or ends the text."""

    openers: frozenset[str]
    literals: tuple[str, ...]


@lru_cache(maxsize=256)
def free_text(grammar: Grammar) -> FreeText | None:
    """None where it is not certain that at any place one reading alone of an answer is possible."""
    try:
        if grammar.kind == "json_schema" and _is_plain(json.loads(grammar.text)):
            return FreeText(frozenset('"\\'), ())
        if grammar.kind == "structural_tag":
            literals = tuple(filter(None, _literals(json.loads(grammar.text)["format"])))
            if not any(one[0].isalnum() or one[0] == " " for one in literals):
                return FreeText(frozenset('"\\').union(one[0] for one in literals), literals)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass  # ambiguous, or nothing that we would write: xgrammar reads more
    return None


class _Ambiguous(ValueError):
    """Part of a grammar of which it is not certain that it has one reading."""


def _literals(part: Mapping[str, Any]) -> Iterator[str]:
    """What of a structural tag is written as it stands. Raises `_Ambiguous`."""
    kind = part["type"]
    if kind == "const_string":
        yield part["value"]
    elif kind == "any_text":
        yield from part.get("excludes", ())
    elif kind == "json_schema" and part["style"] == "json":
        if not _is_plain(part["json_schema"]):
            raise _Ambiguous
    elif kind == "tag":
        yield part["begin"]
        yield from _literals(part["content"])
        yield part["end"]
    elif kind in ("optional", "star"):
        yield from _literals(part["content"])
    elif kind == "tags_with_separator":
        _check_distinct(part["tags"])
        yield part["separator"]
        for tag in part["tags"]:
            yield from _literals(tag)
    elif kind in ("or", "sequence"):
        if kind == "or":
            _check_distinct(part["elements"])
        for before, after in pairwise(part["elements"]) if kind == "sequence" else ():
            if before["type"] in ("any_text", "optional", "or", "star"):  # nothing says where it ends but what follows
                list(_beginnings(after))
        for element in part["elements"]:
            yield from _literals(element)
    elif part != GAP:
        raise _Ambiguous


def _check_distinct(parts: Iterable[Mapping[str, Any]]) -> None:
    begun = [one for part in parts for one in _beginnings(part)]
    if any(one.startswith(other) for one, other in permutations(begun, 2)):
        raise _Ambiguous


def _beginnings(part: Mapping[str, Any]) -> Iterator[str]:
    """The literals by which a part begins, where it is not free text. Raises `_Ambiguous` where it may begin else."""
    kind = part["type"]
    if kind == "const_string" or (kind == "tag" and part["begin"]):
        yield part["value" if kind == "const_string" else "begin"]
    elif kind in ("optional", "star", "tag"):
        yield from _beginnings(part["content"])
    elif kind == "sequence":
        yield from _beginnings(part["elements"][0])
    elif kind in ("or", "tags_with_separator"):
        for one in part["elements" if kind == "or" else "tags"]:
            yield from _beginnings(one)
    elif kind != "any_text" and part != GAP:
        raise _Ambiguous


def _is_plain(root: Any) -> bool:
    """Whether the first character of a value tells which alternative it is, and all strings are fixed or free."""
    if not isinstance(root, Mapping):
        return root is True
    definitions = root.get("$defs", {})
    return all(_is_plain_node(node, definitions) for node in (root, *definitions.values()))


def _is_plain_node(node: Any, definitions: Mapping[str, Any]) -> bool:
    if isinstance(node, bool):
        return True
    if node.keys() - _KEYWORDS or ("$ref" in node and target(node) not in definitions):
        return False
    if "properties" in node and node.get("additionalProperties") is not False:  # a free name may begin like a fixed one
        return False
    branches = node.get("anyOf", ())
    inner = [*branches, *node.get("properties", {}).values(), *node.get("prefixItems", ())]
    inner += [node[name] for name in ("items", "additionalProperties") if name in node]
    if not all(_is_plain_node(one, definitions) for one in inner):
        return False
    begun = [kind for branch in branches for kind in _types(branch, definitions)]
    return len(begun) == len(set(begun))


def _types(node: Any, definitions: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> set[str]:
    """Those of a node's values."""
    if "$ref" in node:
        name = target(node)
        return set() if name in seen else _types(definitions[name], definitions, seen | {name})
    if "anyOf" in node:
        return {kind for branch in node["anyOf"] for kind in _types(branch, definitions, seen)}
    if "enum" in node:
        return {type_of(value) for value in node["enum"]}
    asked = node.get("type", TYPES)
    return {asked} if isinstance(asked, str) else {*asked}

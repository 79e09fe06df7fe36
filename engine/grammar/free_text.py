"""Finds the grammars whose free text may go on without a new mask: another word changes nothing about what may follow.

Text is free within the strings of a JSON document, and around tool calls and their arguments. Only grammars count in
which no answer can be parsed in two ways at any point.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ...schemas.params import Grammar
from .schema_facts import target, type_of
from .schema_keywords import TYPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_LENGTH = 16 << 10  # characters; a longer grammar is not analysed
_KEYWORDS = {  # that do not constrain the text of a string
    *("$defs", "$ref", "type", "enum", "anyOf", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}


class FreeText(NamedTuple):
    """`openers` are the characters that may begin the end of free text or of a string; `literals` are the fixed parts
    of all calls."""

    openers: frozenset[str]
    literals: tuple[str, ...]


class FreeTokens(NamedTuple):
    """The tokens after which free text goes on with the same mask, once one of them rules out an unfinished literal."""

    texts: Sequence[bytes]  # of all tokens
    mask: NDArray[np.int32]
    literals: tuple[str, ...]

    def has(self, token: int) -> bool:
        return bool(self.mask[token >> 5] >> (token & 31) & 1)

    def settles(self, token: int) -> bool:
        """Whether a token of `mask`, none of which begins a literal, cannot be inside one either."""
        text = self.texts[token].decode()
        return not any(text in literal for literal in self.literals)


def free_text(grammar: Grammar) -> FreeText | None:
    """None for a grammar that may be ambiguous."""
    return _free_text(grammar) if len(grammar.text) <= _MAX_LENGTH else None


@lru_cache(maxsize=256)
def _free_text(grammar: Grammar) -> FreeText | None:
    try:
        if grammar.kind == "json_schema" and _is_plain(json.loads(grammar.text)):
            return FreeText(frozenset('"\\'), ())
        if grammar.kind == "structural_tag":
            literals = tuple(_literals(json.loads(grammar.text)["format"]))
            if not any(one[:1].isalnum() or one[:1] in ("", " ") for one in literals):
                return FreeText(frozenset('"\\').union(one[0] for one in literals), literals)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        pass  # ambiguous, or of a form that xgrammar takes and Penstock never writes
    return None


class _Ambiguous(ValueError):
    """A grammar that may be ambiguous."""


def _literals(part: Mapping[str, Any]) -> Iterator[str]:
    """The fixed parts of calls: calls alone, one after text, or any number within text. Raises `_Ambiguous`."""
    match part:
        case {"type": "sequence", "elements": [{"type": "star", "content": inner}, text]}:
            yield from _text_and_calls(inner, text)
        case {"type": "or", "elements": [text, inner]}:
            yield from _text_and_calls(inner, text)
        case _:
            yield from _calls(part)


def _text_and_calls(part: Mapping[str, Any], text: Any) -> Iterator[str]:
    """The fixed parts of calls after text that cannot contain the beginning of one."""
    match part:
        case {"type": "sequence", "elements": [{"type": "any_text", "excludes": markers} as first, calls]}:
            if first != text or not all(one.startswith(tuple(markers)) for one in _beginnings(calls)):
                raise _Ambiguous
            yield from (*markers, *_calls(calls))
        case _:
            raise _Ambiguous


def _beginnings(calls: Mapping[str, Any]) -> list[str]:
    match calls:
        case {"type": "sequence", "elements": [first, *_]}:
            return _beginnings(first)
        case {"type": "const_string", "value": value}:
            return [value]
    return [tag["begin"] for tag in calls["tags"]]


def _calls(part: Mapping[str, Any]) -> Iterator[str]:
    """The fixed parts of calls with JSON arguments, which their beginnings tell apart."""
    if part["type"] == "sequence":
        fixed = [element["value"] for element in part["elements"] if element["type"] == "const_string"]
        if len(fixed) < len(part["elements"]) - 1:
            raise _Ambiguous
        yield from fixed
        for element in part["elements"]:
            if element["type"] != "const_string":
                yield from _calls(element)
        return
    if part["type"] != "tags_with_separator":
        raise _Ambiguous
    begins = sorted(_beginnings(part))
    if any(later.startswith(one) for one, later in pairwise(begins)):
        raise _Ambiguous
    if part["separator"]:
        yield part["separator"]
    for tag in part["tags"]:
        content = tag["content"]
        if content["type"] != "json_schema" or content["style"] != "json" or not _is_plain(content["json_schema"]):
            raise _Ambiguous
        yield from (tag["begin"], tag["end"])


def _is_plain(root: Any) -> bool:
    """Whether the first character of every value decides between alternatives, and all strings are fixed or free."""
    if not isinstance(root, Mapping):
        return root is True
    definitions = root.get("$defs", {})
    return all(_is_plain_node(node, definitions) for node in (root, *definitions.values()))


def _is_plain_node(node: Any, definitions: Mapping[str, Any]) -> bool:
    if isinstance(node, bool):
        return True
    if node.keys() - _KEYWORDS or ("$ref" in node and target(node) not in definitions):
        return False
    if (
        "properties" in node and node.get("additionalProperties") is not False
    ):  # another name may begin like one of these
        return False
    branches = node.get("anyOf", ())
    inner = [*branches, *node.get("properties", {}).values(), *node.get("prefixItems", ())]
    inner += [node[name] for name in ("items", "additionalProperties") if name in node]
    if not all(_is_plain_node(one, definitions) for one in inner):
        return False
    begun = [kind for branch in branches for kind in _types(branch, definitions, set())]
    return len(begun) == len(set(begun))


def _types(node: Any, definitions: Mapping[str, Any], seen: set[str]) -> set[str]:
    """The types of a node's values; definitions in `seen` add none."""
    if "$ref" in node:
        name = target(node)
        if name in seen:
            return set()
        seen.add(name)
        return _types(definitions[name], definitions, seen)
    if "anyOf" in node:
        return {kind for branch in node["anyOf"] for kind in _types(branch, definitions, seen)}
    if "enum" in node:
        return {type_of(value) for value in node["enum"]}
    asked = node.get("type", TYPES)
    return {asked} if isinstance(asked, str) else {*asked}

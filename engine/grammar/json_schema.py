"""Rewrites a user's JSON Schema so that xgrammar enforces all of it, or refuses it with the path of the fault.

xgrammar 0.2.8 silently ignores what it does not enforce: keywords beside `$ref`, `enum` or `anyOf`, those of a node
without `type`, `required` names without a property, lengths beside a `pattern`, half of `multipleOf`, and more. The
rewritten schema states everything in the way that xgrammar enforces. An answer may be narrower than the schema, never
wider: properties come in the order given, other properties only where `additionalProperties` allows them (a bare object
may have any), a `pattern` has to match the whole string, and years have four digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import inf
from typing import Any
from urllib.parse import unquote

from ...schemas.params import Grammar
from .number_schemas import INT64, number_node
from .older_forms import modern
from .patterns import Strings, both_patterns, key_pattern, schema_pattern, text_grammar
from .schema_facts import MAX_COMPARISONS, disjoint, has_finite_value, refers, same, target, type_of
from .schema_keywords import TYPED, TYPES, check_node, fault, is_annotation, walk
from .string_schemas import MAX_CHEAP_LENGTH, MAX_PATTERNS, counted_pattern, string_node

MAX_NODES = 10_000
MAX_DEPTH = 128  # of objects and lists within each other

_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(?<![\w.-])\.(?![\w.-])')  # of a grammar in GBNF
_TIGHTER = {"max": min, "min": max, "exclusiveMax": min, "exclusiveMin": max}


def json_schema_grammar(
    schema: Mapping[str, Any], *, path: str, strict: bool = False, strings: Strings = "plain", counts: bool = True
) -> Grammar:
    """The grammar of the JSON documents that `schema` describes; `path` is where the request has it.

    `strings` are those of the outermost properties that have a `pattern`. With `strict` every object names all its
    properties as required and allows no others, as OpenAI's does. Lengths of strings above `MAX_CHEAP_LENGTH` take long
    to compile or to follow; without `counts` they are refused.
    Raises `InvalidRequest` with the path of what is malformed, too large or impossible to enforce as its `param`.
    """
    _check_size(schema, path)
    try:
        normalised = _Normaliser(schema, path, strict, strings, counts).run()
    except RecursionError:
        raise fault(path, "its references go round in a circle") from None
    except (ValueError, OverflowError):
        raise fault(path, "a number or a name in it is too long") from None
    return Grammar(kind="json_schema", text=json.dumps(normalised))


def any_json_object() -> Grammar:
    return Grammar(kind="json_schema", text='{"type": "object"}')


def choice_grammar(choices: Sequence[str], *, path: str = "guided_choice") -> Grammar:
    """The grammar of exactly these texts. Raises `InvalidRequest`."""
    if not choices or not all(choices):
        raise fault(path, "give at least one choice, and none that is empty")
    return Grammar(kind="ebnf", text="root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices))


def regex_grammar(pattern: str, *, path: str = "guided_regex") -> Grammar:
    """The grammar of the texts that `pattern` matches as a whole. Raises `InvalidRequest`."""
    if not pattern:
        raise fault(path, "an empty pattern allows no answer but an empty one; leave it out", "invalid_grammar")
    return text_grammar(pattern, path)


def ebnf_grammar(text: str, *, path: str = "guided_grammar") -> Grammar:
    """The grammar that `text` describes in GBNF, from the rule `root` on. Raises `InvalidRequest`."""
    if "root" not in text or "::=" not in text:
        raise fault(path, "a grammar in GBNF has rules `name ::= …`, one of them named root", "invalid_grammar")
    return Grammar(kind="ebnf", text=_PARTS.sub(_for_xgrammar, text))


def _for_xgrammar(part: re.Match[str]) -> str:
    r"""A part of a grammar as xgrammar has it: for it, `\x` has as many digits as follow, and `.` is a name."""
    if part[0] == ".":
        return r"[\u0000-\U0010ffff]"
    return re.sub(r"\\(x[0-9a-fA-F]{2}|.)", lambda one: rf"\u00{one[1][1:]}" if len(one[1]) == 3 else one[0], part[0])


class _Normaliser:
    """Rewrites one schema."""

    def __init__(self, root: Mapping[str, Any], path: str, strict: bool, strings: Strings, counts: bool) -> None:
        self._root = root
        self._path = path
        self._strict = strict
        self._counts = counts
        outermost = root.get("properties") if isinstance(root, Mapping) else None  # neither need be valid
        names = outermost if isinstance(outermost, Mapping) else ()
        self._strings: dict[str, Strings] = {f"{path}.properties.{name}": strings for name in names}
        self._names: dict[str, str] = {}  # of the result's definitions, by the pointers of the schema's `$ref`s
        self._definitions: dict[str, Any] = {}  # of the result, by name
        self._counted: dict[tuple[int, int | None], str] = {}  # such definitions, by the lengths of their strings
        self._exclusive: list[tuple[list[Any], str]] = []  # branches of each `oneOf`, and its path
        self._count = 0

    def run(self) -> dict[str, Any]:
        root, budget = self._node(self._root, self._path), [MAX_COMPARISONS]
        for branches, path in self._exclusive:
            if not all(disjoint(one, two, self._definitions, budget) for one, two in combinations(branches, 2)):
                raise fault(path, "the branches may overlap, so that one alone cannot be enforced; use anyOf")
        finite: set[str] = set()
        while grown := {name for name, node in self._definitions.items() if has_finite_value(node, finite)} - finite:
            finite |= grown
        if not has_finite_value(root, finite) or len(finite) < len(self._definitions):
            raise fault(self._path, "a reference to itself leaves it no finite value")
        return root | {"$defs": self._definitions} if self._definitions else root

    def _node(self, schema: Any, path: str) -> dict[str, Any]:
        self._count += 1
        if self._count > MAX_NODES:
            raise fault(self._path, f"has more than {MAX_NODES} nodes, references followed")
        if schema is True:
            return {}
        if schema is False:
            raise fault(path, "false allows no value")
        schema = self._checked(schema, path)
        rest = {name: value for name, value in schema.items() if not is_annotation(name)}
        if list(rest) == ["$ref"]:
            return {"$ref": f"#/$defs/{self._define(rest['$ref'], path)}"}
        if "$ref" in rest:
            pointer = rest.pop("$ref")
            return self._node(self._merge(rest, self._resolve(pointer, path), path), path)
        if "allOf" in rest:
            parts = rest.pop("allOf")
            if not rest and len(parts) == 1:
                return self._node(parts[0], f"{path}.allOf[0]")
            for index, part in enumerate(parts):
                rest = self._merge(rest, part, f"{path}.allOf[{index}]")
            return self._node(rest, path)
        for name in ("anyOf", "oneOf"):
            if name in rest:
                branches = rest.pop(name)
                where = [f"{path}.{name}[{index}]" for index in range(len(branches))]
                nodes = [
                    self._node(self._merge(rest, branch, at) if rest else branch, at)
                    for branch, at in zip(branches, where, strict=True)
                ]
                if name == "oneOf":
                    self._exclusive.append((nodes, f"{path}.oneOf"))
                return nodes[0] if len(nodes) == 1 else {"anyOf": nodes}
        if "enum" in rest or "const" in rest:
            return {"enum": self._values(rest, path)}
        asked = rest.get("type") or [*dict.fromkeys(TYPED[name][0] for name in rest)]
        types = [asked] if isinstance(asked, str) else asked
        typed = [self._typed(kind, rest, path) for kind in types if kind != "integer" or "number" not in types]
        return {} if not typed else typed[0] if len(typed) == 1 else {"anyOf": typed}

    def _checked(self, given: Any, path: str) -> Mapping[str, Any]:
        schema: Mapping[str, Any] = modern(given)
        check_node(schema, path, self._strict)
        if "$id" in schema and given is not self._root and not str(schema["$id"]).startswith("#") and refers(schema):
            raise fault(f"{path}.$id", "references within a part that has its own $id are not followed")
        return schema

    def _define(self, pointer: str, path: str) -> str:
        if pointer not in self._names:
            target = self._resolve(pointer, path)
            name = self._names[pointer] = f"d{len(self._names)}"
            self._definitions[name] = self._node(target, self._path + pointer[1:].replace("/", "."))
        return self._names[pointer]

    def _resolve(self, pointer: str, path: str) -> Any:
        target: Any = self._root
        if pointer != "#" and not pointer.startswith("#/"):
            raise fault(f"{path}.$ref", "only references within the schema are followed: #/…")
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                raise fault(f"{path}.$ref", f"{pointer} leads nowhere")
        return target

    def _merge(self, one: Mapping[str, Any], two: Any, path: str) -> dict[str, Any]:
        """A schema of the values that both allow."""
        if two is True:
            return dict(one)
        if two is False:
            raise fault(path, "false allows no value")
        two = {name: value for name, value in self._checked(two, path).items() if name != "$id"}
        if "$ref" in two and "$ref" in one:
            rest = {name: value for name, value in two.items() if name != "$ref"}
            two = self._merge(rest, self._resolve(two["$ref"], path), path)
        for side, other in ((one, two), (two, one)):
            known = other.get("properties", ())
            names = [name for name in side.get("properties", ()) if name not in known]
            more = other.get("additionalProperties", other.get("unevaluatedProperties", True))
            if names and (more is not True or "patternProperties" in other or "propertyNames" in other):
                raise fault(path, f"cannot be combined: one part does not know {min(names)!r} of another")
            for name, beyond in (("patternProperties", more), ("prefixItems", other.get("items", True))):
                if name in side and beyond is not True and not same(side[name], other.get(name)):
                    raise fault(path, f"cannot be combined: one part does not know {name} of another")
        merged = dict(one)
        for name, value in two.items():
            if is_annotation(name) or name not in merged or same(merged[name], value):
                merged.setdefault(name, value)
            elif name == "type":
                kinds, others = (set([kind] if isinstance(kind, str) else kind) for kind in (merged[name], value))
                common = (kinds & others) | ({"integer"} if {"integer", "number"} <= kinds | others else set())
                merged[name] = [kind for kind in TYPES if kind in common]
                if not common:
                    raise fault(path, "types exclude each other")
            elif name == "required":
                merged[name] = [*dict.fromkeys([*merged[name], *value])]
            elif name == "properties":
                both = {key: {"allOf": [merged[name][key], value[key]]} for key in value if key in merged[name]}
                merged[name] = {**merged[name], **value, **both}
            elif name == "pattern":
                merged[name] = both_patterns(merged[name], value)
            elif tighter := next((by for start, by in _TIGHTER.items() if name.startswith(start)), None):
                merged[name] = tighter(merged[name], value)
            else:
                raise fault(f"{path}.{name}", f"two of {name} cannot be combined", "unsupported_schema")
        return merged

    def _values(self, rest: dict[str, Any], path: str) -> list[Any]:
        """The values of `enum` and `const` that have one of the node's types."""
        if others := sorted(rest.keys() - {"enum", "const", "type"}):
            raise fault(f"{path}.{others[0]}", "cannot be enforced beside enum or const", "unsupported_schema")
        asked = rest.get("type", TYPES)
        kinds = {asked} if isinstance(asked, str) else set(asked)
        values = [
            value
            for value in rest.get("enum", [rest.get("const")])
            if (type_of(value) in kinds or (type_of(value) == "integer" and "number" in kinds))
            and ("const" not in rest or same(value, rest["const"]))
        ]
        if not values:
            raise fault(path, "allows no value: types, enum and const exclude each other")
        if any(type(value) is int and not -INT64 <= value < INT64 for value, _ in walk(values)):
            raise fault(path, "whole numbers have at most 64 bits")
        return values

    def _typed(self, kind: str, rest: dict[str, Any], path: str) -> dict[str, Any]:
        own = "number" if kind == "integer" else kind
        rest = {name: value for name, value in rest.items() if name != "type" and TYPED[name][0] == own}
        for least, most in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
            if rest.get(least, 0) > rest.get(most, inf):
                raise fault(f"{path}.{least}", f"is above {most}")
        match kind:
            case "string":
                return self._string(rest, path)
            case "number" | "integer":
                return {"type": kind} | number_node(kind, rest, path)
            case "array":
                return {"type": kind} | self._array(rest, path)
            case "object":
                return {"type": kind} | self._object(rest, path)
        return {"type": kind}

    def _string(self, rest: dict[str, Any], path: str) -> dict[str, Any]:
        strings = self._strings.get(path, "plain")
        node = string_node(rest, path, strings)
        lengths = least, most = node.get("minLength", 0), node.get("maxLength")
        if max(least, most or 0) <= MAX_CHEAP_LENGTH:
            return {"type": "string"} | node
        if not self._counts:
            name = f"{path}.{'maxLength' if most else 'minLength'}"
            raise fault(name, f"cannot be enforced above {MAX_CHEAP_LENGTH}", "unsupported_schema")
        if lengths not in self._counted:
            if strings == "raw" or sum(most or least for least, most in (*self._counted, lengths)) > MAX_PATTERNS:
                return {"type": "string"} | node  # which xgrammar counts; `GrammarCompiler` knows whether it may
            self._counted[lengths] = f"s{len(self._counted)}"
            self._definitions[self._counted[lengths]] = {"type": "string", "pattern": counted_pattern(least, most)}
        return {"$ref": f"#/$defs/{self._counted[lengths]}"}

    def _array(self, rest: dict[str, Any], path: str) -> dict[str, Any]:
        if rest.pop("uniqueItems", False):
            raise fault(f"{path}.uniqueItems", "uniqueItems is not supported", "unsupported_schema")
        prefix = rest.pop("prefixItems", [])[: rest.get("maxItems")]
        free = max(rest.get("minItems", 0) - len(prefix), 0)
        items = rest.pop("items", not prefix or free > 0)
        if items is False and free:
            raise fault(f"{path}.minItems", "is above what items allows")
        if prefix:
            rest["prefixItems"] = [self._node(one, f"{path}.prefixItems[{index}]") for index, one in enumerate(prefix)]
        rest["items"] = items if items is False else self._node(items, f"{path}.items")
        return rest

    def _object(self, rest: dict[str, Any], path: str) -> dict[str, Any]:
        properties = dict(rest.get("properties", {}))
        more = rest.get("additionalProperties", rest.get("unevaluatedProperties", "properties" not in rest))
        closed = bool(rest.keys() & {"additionalProperties", "unevaluatedProperties"})
        required = [*dict.fromkeys(rest.get("required", ()))]
        for name in required:
            if properties.setdefault(name, more if more is not False or closed else True) is False:
                raise fault(f"{path}.required", f"{name!r} is not among the properties, nor allowed besides them")
        if rest.get("minProperties", 0) > len(required) + 1 and more is not False:
            raise fault(f"{path}.minProperties", "cannot be enforced where names are free", "unsupported_schema")
        node = {name: value for name, value in rest.items() if name in ("minProperties", "maxProperties")}
        by_name = [f"{path}.{name}" for name in ("patternProperties", "propertyNames") if name in rest]
        if by_name and (properties or len(by_name) > 1):
            raise fault(by_name[0], "cannot be enforced beside other names", "unsupported_schema")
        if "propertyNames" in rest:
            names = self._node(self._merge({"type": "string"}, rest["propertyNames"], by_name[0]), by_name[0])
            names = self._definitions[target(names)] if "$ref" in names else names
            return node | {"propertyNames": names, "additionalProperties": self._additional(more, path)}
        if "patternProperties" in rest:
            if len(rest["patternProperties"]) != 1 or rest.get("additionalProperties"):
                raise fault(by_name[0], "only one pattern alone can be enforced", "unsupported_schema")
            ((pattern, value),) = rest["patternProperties"].items()
            where = f"{by_name[0]}.{pattern}"
            node["patternProperties"] = {schema_pattern(pattern, where, strings="plain"): self._node(value, where)}
            return node | {"additionalProperties": False}
        declared = {name: value for name, value in properties.items() if value is not False}
        if not properties:
            return node | {"additionalProperties": self._additional(more, path)}
        node["properties"] = {name: self._node(value, f"{path}.properties.{name}") for name, value in declared.items()}
        node["required"] = required
        if more is not False:
            # xgrammar's own exclusion of the names above misses those written with an escape.
            node["patternProperties"] = {key_pattern(properties): self._additional(more, path)}
        return node | {"additionalProperties": False}

    def _additional(self, more: Any, path: str) -> Any:
        return more if more is False else self._node(more, f"{path}.additionalProperties")


def _check_size(schema: Any, path: str) -> None:
    for count, (_, depth) in enumerate(walk(schema), 1):
        if count > MAX_NODES:
            raise fault(path, f"has more than {MAX_NODES} nodes")
        if depth > MAX_DEPTH:
            raise fault(path, f"is nested deeper than {MAX_DEPTH} levels")

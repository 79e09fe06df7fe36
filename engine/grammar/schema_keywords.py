"""The keywords of JSON Schema that can be enforced, and the values they may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from ...schemas.errors import InvalidRequest

_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$anchor", "$vocabulary", "$defs", "definitions", "title", "description"),
        *("default", "example", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding"),
        *("contentMediaType", "discriminator"),
    }
)
TYPES = ("string", "number", "integer", "object", "array", "boolean", "null")
# For each keyword that applies to one type: that type, and the value it needs.
TYPED = {
    **dict.fromkeys(("minLength", "maxLength"), ("string", "a whole number of at least 0")),
    **dict.fromkeys(("pattern", "format"), ("string", "a string")),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), ("number", "a number")),
    "multipleOf": ("number", "a number"),
    **dict.fromkeys(("minItems", "maxItems"), ("array", "a whole number of at least 0")),
    "items": ("array", "a schema"),
    "prefixItems": ("array", "a list with something in it"),
    "uniqueItems": ("array", "a boolean"),
    **dict.fromkeys(("minProperties", "maxProperties"), ("object", "a whole number of at least 0")),
    **dict.fromkeys(("properties", "patternProperties"), ("object", "an object")),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "propertyNames"), ("object", "a schema")),
    "required": ("object", "a list of strings"),
}
_KEYWORDS = {
    **{name: kind for name, (_, kind) in TYPED.items()},
    **{
        "$ref": "a string",
        "enum": "a list with something in it",
        "anyOf": "a list with something in it",
        "oneOf": "a list with something in it",
        "allOf": "a list with something in it",
    },
}
_KINDS = {
    "a whole number of at least 0": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "a number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value),
    "a string": lambda value: isinstance(value, str),
    "a boolean": lambda value: isinstance(value, bool),
    "a schema": lambda value: isinstance(value, Mapping | bool),
    "a list with something in it": lambda value: isinstance(value, list | tuple) and len(value) > 0,
    "an object": lambda value: isinstance(value, Mapping),
    "a list of strings": lambda value: isinstance(value, list | tuple) and all(isinstance(one, str) for one in value),
}


def check_node(schema: Any, path: str, strict: bool) -> None:
    """Raise `InvalidRequest` for a node with unknown or malformed keywords; children are not checked."""
    if not isinstance(schema, Mapping):
        raise fault(path, "a schema is an object or a boolean")
    for name, value in schema.items():
        if name == "type":
            kinds = [value] if isinstance(value, str) else value
            if not isinstance(kinds, list) or not kinds or any(kind not in TYPES for kind in kinds):
                raise fault(f"{path}.type", f"must be one or a list of {', '.join(TYPES)}")
        elif name != "const" and not is_annotation(name):
            kind = _KEYWORDS.get(name)
            if kind is None:
                raise fault(f"{path}.{name}", f"{name} is not supported", "unsupported_schema")
            if not _KINDS[kind](value):
                raise fault(f"{path}.{name}", f"must be {kind}")
    if strict and ("properties" in schema or schema.get("type") == "object"):
        if schema.get("additionalProperties") is not False:
            raise fault(
                f"{path}.additionalProperties",
                "'additionalProperties' is required to be supplied and to be false",
            )
        if missing := [name for name in schema.get("properties", ()) if name not in schema.get("required", ())]:
            raise fault(
                f"{path}.required",
                "'required' is required to be supplied and to be an array including every key in properties. "
                f"Missing {missing[0]!r}",
            )


def is_annotation(name: str) -> bool:
    return name in _ANNOTATIONS or name.startswith("x-")


def walk(value: Any) -> Iterable[tuple[Any, int]]:
    """All values in a JSON document, itself included, each with its depth."""
    stack = [(value, 0)]
    while stack:
        one, depth = stack.pop()
        yield one, depth
        inner = one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple) else ()
        stack += [(part, depth + 1) for part in inner]


def fault(path: str, message: str, code: str = "invalid_json_schema") -> InvalidRequest:
    return InvalidRequest(f"{path}: {message}.", code=code, param=path)

"""Schemas as older drafts and OpenAPI 3.0 write them, in the form of draft 2020-12."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BOUNDS = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))


def modern(schema: Any) -> Any:
    """One node, the same if it has no older form: tuples in `items` with `additionalItems`, bounds that a boolean makes
    exclusive, and `nullable`, which acts beside a type alone. Children are left as they are."""
    if not isinstance(schema, Mapping):
        return schema
    is_tuple = isinstance(schema.get("items"), list) and "prefixItems" not in schema
    is_bounded = any(isinstance(schema.get(name), bool) for name, _ in _BOUNDS)
    if not (is_tuple or is_bounded or "additionalItems" in schema or isinstance(schema.get("nullable"), bool)):
        return schema
    new = dict(schema)
    more = new.pop("additionalItems", None)
    if is_tuple:
        if items := new.pop("items"):
            new["prefixItems"] = items
        if more is not None:
            new["items"] = more
    for name, bound in _BOUNDS:
        if isinstance(new.get(name), bool) and new.pop(name) and bound in new:
            new[name] = new.pop(bound)
    if isinstance(new.get("nullable"), bool) and new.pop("nullable") and "type" in new:
        kinds = [new["type"]] if isinstance(new["type"], str) else new["type"]
        if isinstance(kinds, list) and "null" not in kinds:
            new["type"] = [*kinds, "null"]
    return new

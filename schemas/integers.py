"""Integers as JSON Schema has them: a number without a fraction is one, however it is written."""

from __future__ import annotations

from typing import Any

from pydantic_core import CoreSchema, core_schema

_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of")


def integral(schema: CoreSchema) -> CoreSchema:
    """The strict schema, changed to read 4.0 as the integer 4, and still to refuse 4.5, "4" and true."""

    def visit(node: Any) -> None:
        if isinstance(node, list | tuple):
            for each in node:
                visit(each)
        elif isinstance(node, dict) and not (node.get("metadata") or {}).get("integral"):
            if node.get("type") == "int":
                read = _read(dict(node))
                node.clear()
                node.update(read)
            else:
                for each in node.values():
                    visit(each)

    visit(schema)
    return schema


def _read(integer: dict[str, Any]) -> dict[str, Any]:
    # An integer stays on the first path, and is never a float on its way: those have 53 bits.
    metadata = {"integral": True, "pydantic_js_functions": [lambda _, handler: handler(integer)]}
    whole = core_schema.union_schema(
        [
            core_schema.int_schema(strict=True),
            core_schema.chain_schema([core_schema.float_schema(strict=True), core_schema.int_schema(strict=False)]),
        ],
        mode="left_to_right",
        custom_error_type="int_type",
        metadata=metadata,
    )
    bounded = any(name in integer for name in _BOUNDS)
    return dict(core_schema.chain_schema([whole, integer], metadata=metadata) if bounded else whole)


def as_integer(value: Any) -> Any:
    """An integer that an unvalidated body has as 4.0; anything else unchanged."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 1 << 63 else value

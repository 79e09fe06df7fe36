"""What the OpenAPI page says of bodies that the pipeline checks, and not FastAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def documented(body: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra`: the schema of a JSON body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(body)}}}}


def _schema(body: type[BaseModel]) -> dict[str, Any]:
    """A body's JSON Schema with its definitions written out in place, since the page has no other home for them."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if isinstance(node, dict):
            name = node.get("$ref", "").rpartition("/")[2]
            return inlined(definitions[name]) if name else {key: inlined(value) for key, value in node.items()}
        return node

    return {key: inlined(value) for key, value in schema.items()}

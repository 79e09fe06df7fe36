"""What the OpenAPI page says of bodies that the pipeline checks, and not FastAPI, and of every refusal."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from .keys import is_open

# A refusal by its status; whichever it is, its body is OpenAI's error object.
REFUSALS = {
    400: "What was asked can never be served; `param` names the fault.",
    401: "No API key, or none that is known.",
    403: "A foreign web page, or something that this key has no right to.",
    404: "No such model or request.",
    408: "The deadline passed, or the headers or the body did not arrive in time.",
    409: "The Idempotency-Key was used for another request.",
    413: "The body is too large.",
    415: "A browser sent a body that it does not call JSON.",
    429: "The tenant's own limit is reached.",
    431: "The request's line and headers are too large.",
    499: "The request was cancelled.",
    500: "Penstock failed.",
    503: "Overloaded, shutting down, or without what it needs; see Retry-After.",
    507: "The store is full: something must be deleted first.",
}
_SSE = {"text/event-stream": {"schema": {"type": "string"}}}
STREAMED: dict[int | str, dict[str, Any]] = {"200": {"description": "Events", "content": _SSE}}  # for `responses`


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For `responses`."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": REFUSALS[status], "content": content} for status in statuses}


def body_of(*bodies: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra`: a JSON body of one of these schemas."""
    schemas = [_schema(body) for body in bodies]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def documented(*bodies: type[BaseModel]) -> dict[str, Any]:
    """The same for what goes through the pipeline, with what may come of it."""
    responses = refusals(*sorted(REFUSALS.keys() - {401}))
    if any("stream" in body.model_fields for body in bodies):
        responses["200"] = {"content": _SSE}
    return body_of(*bodies) | {"responses": responses}


def complete(app: FastAPI, *, keys: bool) -> None:
    """Add to the page what FastAPI cannot know: the error object, and with `keys` that a key is needed."""
    described = app.openapi

    def page() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = described()
        components = schema.setdefault("components", {})
        text = {"type": "string"}
        fields = {
            "message": text,
            "type": text,
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        }
        components["schemas"] = {"Error": _object({"error": _object(fields)})} | {
            name: found for name, found in components.get("schemas", {}).items() if "ValidationError" not in name
        }
        operations = [(path, operation) for path, methods in schema["paths"].items() for operation in methods.values()]
        for path, operation in operations:
            operation["responses"].pop("422", None)  # FastAPI's own refusal, which nobody here gets
            if is_open(path):
                continue
            operation["responses"] |= refusals(403, 415) if "requestBody" in operation else refusals(403)
            if keys:
                operation["responses"] |= refusals(401)
                operation["security"] = [{"key": []}]
        if keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return schema

    app.openapi = page  # type: ignore[method-assign]  # as FastAPI's documentation has it


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


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "additionalProperties": False, "properties": properties}

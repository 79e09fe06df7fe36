"""The OpenAPI pages, the bodies that they show, which the pipeline checks instead of FastAPI, and the refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from .middleware.keys import is_open

# Refusals by their status. The body of each is OpenAI's error object.
REFUSALS = {
    400: "The request can never be served; `param` names the faulty field.",
    401: "The API key is missing or unknown.",
    403: "The web page or the API key has no right to this.",
    404: "No such model or request.",
    408: "The deadline passed, or the headers or the body took too long to arrive.",
    409: "The Idempotency-Key was used for another request.",
    413: "The body is too large.",
    415: "The body is compressed, or a browser sent it without the content type of JSON.",
    429: "The tenant's quota is exhausted.",
    431: "The request's line and headers are too large.",
    499: "The request was cancelled.",
    500: "Penstock failed; its log says why.",
    503: "The server is overloaded, shutting down or not ready; see Retry-After.",
    507: "The store is full: delete something first.",
}
_SSE = {"text/event-stream": {"schema": {"type": "string"}}}
STREAMED: dict[int | str, dict[str, Any]] = {"200": {"description": "Events", "content": _SSE}}  # for `responses`
_FILES = "static-offline-docs"  # where FastAPIOffline serves the files of both pages


def add_pages(app: FastAPI) -> None:
    """The pages `/docs` and `/redoc`. Their links are relative, as those of the page at `/` are: a proxy may serve
    Penstock below a path of its own."""
    schema, icon = "openapi.json", f"{_FILES}/favicon.png"

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url=schema,
            title="Penstock - Swagger UI",
            swagger_js_url=f"{_FILES}/swagger-ui-bundle.js",
            swagger_css_url=f"{_FILES}/swagger-ui.css",
            swagger_favicon_url=icon,
        )

    @app.get("/redoc", include_in_schema=False)
    async def redoc() -> HTMLResponse:
        return get_redoc_html(
            openapi_url=schema,
            title="Penstock - ReDoc",
            redoc_js_url=f"{_FILES}/redoc.standalone.js",
            redoc_favicon_url=icon,
            with_google_fonts=False,
        )


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that refuses with these statuses."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": REFUSALS[status], "content": content} for status in statuses}


class Bodies(dict[str, Any]):
    """The `openapi_extra` of a route with a JSON body of one of these schemas, which are made with the page: all of
    them together take a fifth of a second."""

    def __init__(self, bodies: Sequence[type[BaseModel]], **others: Any) -> None:
        super().__init__(others)
        self._bodies = bodies

    def make(self) -> None:
        schemas = [_schema(body) for body in self._bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        self["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}


def body_of(*bodies: type[BaseModel]) -> Bodies:
    return Bodies(bodies)


def documented(*bodies: type[BaseModel]) -> Bodies:
    """`body_of`, with the responses of a request that goes through the pipeline."""
    responses = refusals(*sorted(REFUSALS.keys() - {401}))
    if any("stream" in body.model_fields for body in bodies):
        responses["200"] = {"content": _SSE}
    return Bodies(bodies, responses=responses)


def complete(app: FastAPI, *, keys: bool) -> None:
    """Add to the page what FastAPI cannot know: the error object and, with `keys`, that paths need a key."""
    described = app.openapi

    def page() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        for route in app.routes:
            if isinstance(extra := getattr(route, "openapi_extra", None), Bodies):
                extra.make()
        schema = described()
        schema["servers"] = [{"url": "."}]  # where the schema is, also below a path of a proxy's
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
            operation["responses"].pop("422", None)  # FastAPI's own refusal, which no route sends
            if is_open(path):
                continue
            operation["responses"] |= refusals(403, 415) if "requestBody" in operation else refusals(403)
            if keys:
                operation["responses"] |= refusals(401)
                operation["security"] = [{"key": []}]
        if keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return schema

    app.openapi = page  # type: ignore[method-assign]  # as FastAPI's documentation recommends


def _schema(body: type[BaseModel]) -> dict[str, Any]:
    """A body's JSON Schema with its definitions inlined, as `openapi_extra` has no place for them."""
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

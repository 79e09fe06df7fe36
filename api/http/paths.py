"""Requests for paths that are not there: what was meant by them. Base URLs are often one part too long or too short."""

from __future__ import annotations

import re
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.routing import APIRoute
from starlette.routing import Match, Route

_LONGEST = 300  # characters of a path whose meaning is looked for
_AZURE = re.compile(r"(/openai|/v1)/deployments/.+")
_OLLAMA = re.compile(r"/api/(blobs/.+|copy|create|delete|push)")


def add_heads(app: FastAPI) -> None:
    """Let every path that has `GET` be asked with `HEAD`, as load balancers, monitors and Claude Code do, but for those
    that may answer with events, which have no end yet."""
    for route in [each for each in app.routes if isinstance(each, APIRoute) and "GET" in (each.methods or ())]:
        if "text/event-stream" not in route.responses.get("200", {}).get("content", {}):
            app.head(route.path, include_in_schema=False)(route.endpoint)


def methods(request: Request, path: str | None = None) -> list[str]:
    """The methods of a request's path, or another one, over all of its routes."""
    scope = request.scope if path is None else {**request.scope, "path": path}
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = (route.methods or () for route in routes if route.matches(scope)[0] != Match.NONE)
    return sorted(set().union(*found))


def without_slash(request: Request) -> Response | None:
    """Where the path is one but for a slash at its end, a redirection. It is relative, because behind a proxy the
    bridge knows neither the scheme nor the port, nor the path below which the proxy serves it."""
    path = request.url.path
    if not path.endswith("/") or request.method not in methods(request, path[:-1]):
        return None
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"../{quote(path[:-1].rpartition('/')[2])}{query}", 307)


def advice(request: Request) -> str:
    """What the client should do instead."""
    path = re.sub("/+", "/", request.url.path[:_LONGEST]).rstrip("/")
    if _OLLAMA.fullmatch(path):
        return "models are added, removed and swapped by an operator, with `penstock models`."
    if _AZURE.fullmatch(path):
        return "deployments have chat/completions, completions and embeddings, below /openai/deployments/MODEL/."
    if path == "/v1":
        return "it is a base URL, and /v1/models one of the paths below it; see /docs for the list."
    starts = [slash.start() for slash in re.finditer("/", path) if _is_base(request, path[: slash.start()])]
    for end in (path[start:] for start in starts):  # the longest first
        for intended in (end, f"/v1{end}"):
            if request.method in methods(request, intended):
                return f"{intended} is one, so correct the client's base URL."
    return "see /docs for the list."


def _is_base(request: Request, start: str) -> bool:
    """Whether a base URL can be meant by the start of a path: not what an API of OpenAI's or others has below /v1, as
    in /v1/vector_stores/x/files, but for the beginning of a path that is here."""
    below = re.match(r"(?:/v1)++/.+", start)
    paths = (route.path for route in request.app.routes if isinstance(route, Route))
    return below is None or any(f"{path}/".startswith(f"{start}/") for path in paths)

"""The page at `/`: plain files of the package, under a policy that lets nothing else run."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ....schemas.errors import StreamNotFound

FOLDER = Path(__file__).parent / "page"
PATH = "/console/"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # the browser asks again, and a new release is seen at once
}


def add_page(app: FastAPI) -> None:
    app.get("/", include_in_schema=False)(index)
    app.get(PATH + "{name}", include_in_schema=False)(file)


async def index(request: Request) -> Response:
    return _answer(request, "index.html")


async def file(name: str, request: Request) -> Response:
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    if (found := _files().get(name)) is None:
        raise StreamNotFound(f"The page has no file {name!r:.100}.", code="not_found")
    data, tag = found
    headers = _SECURITY | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=_TYPES[Path(name).suffix], headers=headers)


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """The files by name, each with its entity tag."""
    found = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _TYPES}
    return {name: (data, f'"{hashlib.sha256(data).hexdigest()[:16]}"') for name, data in found.items()}

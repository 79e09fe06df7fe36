"""Unknown fields of a request's body: ignored, and named in the response header `Penstock-Ignored` and in the log.

Clients add fields of their own, which other servers ignore silently. The setting `strict` refuses them instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....config.settings import Settings
from ....schemas.openai.body import Body

HEADER = "penstock-ignored"
MAX_NAMES = 20  # in the header and in the log
MAX_NAME = 64  # characters of each name

log = structlog.get_logger(__name__)


def known_fields(
    body: dict[str, Any], kind: type[Body], request: Request, settings: Settings, *, within: str = ""
) -> dict[str, Any]:
    """`body` without the fields that `kind` lacks; the response to `request` names those, by paths that begin with
    `within`.

    With the setting `strict`, `body` itself: the later check of all its fields refuses unknown ones.
    """
    if settings.strict:
        return body
    known = kind.field_names()
    name_ignored(request, [f"{within}{name}" for name in body if name not in known])
    return {name: value for name, value in body.items() if name in known}


def name_ignored(request: Request, names: Iterable[str]) -> None:
    """Name ignored fields, or parts of them by their path, in the response to `request`; each name once."""
    request.scope.setdefault("state", {}).setdefault(HEADER, {}).update(dict.fromkeys(names))


class Ignored:
    """ASGI middleware: names the ignored fields of each request in its response and in one line of the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and (names := state.get(HEADER)):
                headers = MutableHeaders(scope=message)
                shown = [_printable(name) for name in [*names][:MAX_NAMES]]
                headers[HEADER] = ", ".join(shown)
                request = headers.get("x-request-id")
                log.info("fields ignored", request=request, path=scope["path"], fields=shown, count=len(names))
            await send(message)

        await self.app(scope, receive, named)


def _printable(name: str) -> str:
    """`name` as a header may hold it, without the comma that separates names."""
    return re.sub(r"[^!-+\--~]", "?", name[:MAX_NAME]) or "?"

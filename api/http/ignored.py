"""Unknown fields of a request's body: ignored, and named in the answer's header `Penstock-Ignored` and in the log.

Clients add fields of their own, which other servers ignore in silence. The setting `strict` refuses them instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...config.settings import Settings
from ...schemas.openai.chat import Body

HEADER = "penstock-ignored"
MOST_NAMES = 20  # that are told
MOST_NAME = 64  # characters of each

log = structlog.get_logger(__name__)


def known_alone(body: dict[str, Any], *kinds: type[Body], request: Request, settings: Settings) -> dict[str, Any]:
    """`body` without the fields that none of `kinds` has, whose names the answer to `request` tells.

    With the setting `strict` it stays as it is, and whoever checks it refuses them.
    """
    known = frozenset[str]().union(*(kind.field_names() for kind in kinds))
    if settings.strict:
        return body
    name_ignored(request, [name for name in body if name not in known])
    return {name: value for name, value in body.items() if name in known}


def name_ignored(request: Request, names: Iterable[str]) -> None:
    """Have the answer to `request` say that these were ignored: fields, or parts of them by a path, once each."""
    told = request.scope.setdefault("state", {}).setdefault(HEADER, {})
    told.update(dict.fromkeys(names))


class Ignored:
    """ASGI middleware: every answer says what was ignored of its request, and so does one line of the log."""

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
                shown = [_printable(name) for name in [*names][:MOST_NAMES]]
                headers[HEADER] = ", ".join(shown)
                request = headers.get("x-request-id")
                log.info("fields ignored", request=request, path=scope["path"], fields=shown, count=len(names))
            await send(message)

        await self.app(scope, receive, named)


def _printable(name: str) -> str:
    """What a header may hold, without the comma that separates names."""
    return re.sub(r"[^!-+\--~]", "?", name[:MOST_NAME]) or "?"

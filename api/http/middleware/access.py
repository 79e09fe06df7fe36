"""What happened at the door: a line in the log and a count for every HTTP request, its text never."""

from __future__ import annotations

import time
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....config import metrics
from ....schemas.events import Cancelled, Done, Expired, Failed
from ...bridge.reading import Reading

log = structlog.get_logger(__name__)

_UNKNOWN = "unknown"  # route, where none matched: a client must not choose a label
_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})
_LONGEST = 200  # characters of a path that the log shows
_QUIET = ("/health", "/metrics", "/server/stats", "/server/events", "/console/")  # what is asked for all the time


def note(scope: Scope, **facts: object) -> None:
    """Have the line of a request say this, too."""
    scope.setdefault("state", {}).setdefault("access", {}).update(facts)


class AccessLog:
    """ASGI middleware, the outermost of all. With `lines`, the log has one for each request."""

    def __init__(self, app: ASGIApp, lines: bool) -> None:
        self.app = app
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        status, id = 0, ""

        async def seen(message: Message) -> None:
            nonlocal status, id
            if message["type"] == "http.response.start":
                status = message["status"]
                id = next(
                    (value.decode("latin-1") for name, value in message["headers"] if name == b"x-request-id"), ""
                )
            await send(message)

        metrics.HTTP_OPEN.inc()
        try:
            await self.app(scope, receive, seen)
        finally:
            metrics.HTTP_OPEN.dec()
            duration = time.monotonic() - began
            method = scope["method"] if scope["method"] in _METHODS else "other"
            route = getattr(scope.get("route"), "path", _UNKNOWN)
            metrics.HTTP_REQUESTS.labels(method, route, str(status or 499)).inc()
            metrics.HTTP_DURATION.labels(method, route).observe(duration)
            if self._lines and not scope["path"].startswith(_QUIET):
                log.info(
                    "request",
                    method=method,
                    path=scope["path"][:_LONGEST] if route == _UNKNOWN else route,
                    status=status or 499,  # the client left before there was an answer
                    id=id,
                    seconds=round(duration, 3),
                    **_facts(scope),
                )


def _facts(scope: Scope) -> dict[str, Any]:
    """What is known of the request: its tenant, its model, its tokens, and when the first one came."""
    state = scope.get("state", {})
    facts = {"tenant": state["tenant"]} if "tenant" in state else {}
    facts |= state.get("access", {})
    reading = facts.pop("reading", None)
    if isinstance(reading, Reading):
        facts |= {"model": reading.model} if reading.model else {}
        facts |= {"worker": reading.worker} if reading.worker else {}
        if reading.first_token is not None:
            facts["first_token"] = round(reading.first_token, 3)
        if isinstance(reading.final, Done | Cancelled):
            usage = reading.final.usage
            facts |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
            facts |= {"cached_tokens": usage.cached_tokens} if usage.cached_tokens else {}
        elif reading.final is None:
            facts["disconnected"] = True
        if isinstance(reading.final, Failed | Expired):
            facts["error"] = reading.final.error.code
    return facts

"""An ASGI application asked without a network: a client that can leave at an exact place."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from sse_rules import KINDS, check_stream
from starlette.types import ASGIApp, Message

HEADERS: Mapping[str, str] = {}


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object, in OpenAI's form and nothing else."""
        body = orjson.loads(self.body)
        assert body.keys() == {"error"}
        found: dict[str, Any] = body["error"]
        assert found.keys() == {"message", "type", "param", "code"}
        return found


class Sent(NamedTuple):
    """An SSE message: its fields, and its data where that is JSON."""

    id: str | None
    event: str | None
    data: Any


async def ask(
    app: ASGIApp,
    method: str,
    target: str,
    body: Any = None,
    headers: Mapping[str, str] = HEADERS,
    leave_after: int | None = None,
) -> Response:
    """One request; bytes are sent as they are, anything else as JSON.

    With `leave_after` the client is gone once it has so many pieces of the body.
    """
    path, _, query = target.partition("?")
    gone = asyncio.Event()
    raw = b"" if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
    incoming = [{"type": "http.request", "body": raw, "more_body": False}]
    status, answered, pieces = 0, {}, []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, answered
        if gone.is_set():
            return
        if message["type"] == "http.response.start":
            status = message["status"]
            answered = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            pieces.append(message.get("body", b""))
        if leave_after is not None and len(pieces) >= leave_after:
            gone.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("client", 1),
        "server": ("server", 80),
    }
    await app(scope, receive, send)
    if path in KINDS and status == 200 and answered["content-type"] == "text/event-stream" and not gone.is_set():
        resumable = {name.lower() for name in headers} & {"penstock-resumable", "last-event-id"}
        check_stream(b"".join(pieces), path, resumable=bool(resumable))
    return Response(status, answered, b"".join(pieces))


def messages(body: bytes) -> list[Sent]:
    """The complete SSE messages in a body, comments left out."""
    found = []
    for block in body.split(b"\n\n")[:-1]:
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if line and not line.startswith(b":"))
        if b"data" in fields:
            data = fields[b"data"].decode()
            id, event = (fields[name].decode() if name in fields else None for name in (b"id", b"event"))
            found.append(Sent(id, event, data if data == "[DONE]" else orjson.loads(data)))
    return found

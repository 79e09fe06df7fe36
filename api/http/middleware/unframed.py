"""Answers for HTTP/1.0, which `ab`, old proxies and nginx's defaults speak. It has no chunks, so an answer whose length
is not known when it begins ends with its connection."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unframed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application, for one request that uvicorn would answer in chunks; it closes the connection by itself."""

    cycle.waiting_for_100_continue = False  # an interim answer, which HTTP/1.0 does not know either

    async def without_chunks(scope: Scope, receive: Receive, send: Send) -> None:
        is_bare = False

        async def bare(message: Message) -> None:
            nonlocal is_bare
            if message["type"] == "http.response.start":
                is_bare = "content-length" not in Headers(raw=message["headers"]) and scope["method"] != "HEAD"
                if is_bare:
                    cycle.chunked_encoding = False
            elif is_bare and (body := message.get("body")):  # uvicorn takes it for more than was announced
                if cycle.flow.write_paused and not cycle.disconnected:
                    await cycle.flow.drain()
                if not cycle.disconnected:
                    cycle.transport.write(body)
                message = {**message, "body": b""}
            await send(message)

        await app(scope, receive, bare)

    return without_chunks

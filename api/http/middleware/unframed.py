"""Answers for HTTP/1.0, which `ab`, old proxies and nginx's defaults speak. It has no chunks, so an answer whose length
is not known when it begins ends with its connection.

An answer that is cut off, as by the death of this process, must not look like one that has ended: nginx would end it
properly towards its own client. So until it is complete, the connection is set to be reset when it is closed.
"""

from __future__ import annotations

import socket
import struct

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what closes the socket, be it the kernel, resets the connection
_CLOSE = struct.pack("ii", 0, 0)


def unframed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application, for one request that uvicorn would answer in chunks; it closes the connection by itself."""

    cycle.waiting_for_100_continue = False  # an interim answer, which HTTP/1.0 does not know either

    def at_close(linger: bytes) -> None:
        if not cycle.transport.is_closing():
            cycle.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async def without_chunks(scope: Scope, receive: Receive, send: Send) -> None:
        is_bare = False

        async def bare(message: Message) -> None:
            nonlocal is_bare
            if message["type"] == "http.response.start":
                is_bare = "content-length" not in Headers(raw=message["headers"]) and scope["method"] != "HEAD"
                if is_bare:
                    cycle.chunked_encoding = False
                    at_close(_RESET)
            elif is_bare and (body := message.get("body")):  # uvicorn takes it for more than was announced
                if cycle.flow.write_paused and not cycle.disconnected:
                    await cycle.flow.drain()
                if not cycle.disconnected:
                    cycle.transport.write(body)
                message = {**message, "body": b""}
            if is_bare and message["type"] == "http.response.body" and not message.get("more_body"):
                at_close(_CLOSE)
            await send(message)

        await app(scope, receive, bare)

    return without_chunks

"""Connections that became WebSockets: uvicorn's protocol, within the limits of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from .counting import LINGER, Connections

SLICE = 2048  # bytes that are read in one turn of the loop
FEW = 8  # frames in a slice that cost no time
FRAMES = 1000.0  # a second of one connection, beyond few
_OF_PROTOCOL = (b"host", b"origin", b"connection", b"upgrade")
_REFUSED = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_Headers = Sequence[tuple[bytes, bytes]]


class Socket(WebSocketsSansIOProtocol):
    """Counted as its connection was, under `address`, until it ends.

    Reads in slices, so that many tiny frames delay no other client.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        connections: Connections,
        address: str | None,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._counted = connections
        self._address = address
        self._headers: _Headers = ()  # all of the handshake; set by begin
        self._query = b""
        self._behind = bytearray()  # bytes to be read in a later turn of the loop
        self._next: asyncio.Handle | None = None  # that turn
        self._frames_seen = 0  # in this slice
        self._pong = b""  # for a client that reads nothing yet

    def begin(self, path: str, query: bytes, headers: _Headers, rest: bytes) -> None:
        """Take a handshake whose head is within the limits, and the bytes behind it. The parser of WebSockets has
        limits of its own and no words for them, so it gets to see only what it needs."""
        self._headers, self._query = headers, query
        needed = [pair for pair in headers if pair[0] in _OF_PROTOCOL or pair[0].startswith(b"sec-websocket-")]
        lines = [name + b": " + value + b"\r\n" for name, value in needed]
        super().data_received(b"".join([f"GET {path} HTTP/1.1\r\n".encode(), *lines, b"\r\n"]))
        if self.conn.handshake_exc is not None and not self.handshake_initiated:  # an overlong key, as an example
            self.transport.write(_REFUSED)
            self.transport.close()
        elif rest:
            self.data_received(rest)

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            self.scope["headers"] = self._headers
            self.scope["query_string"] = self._query

    def data_received(self, data: bytes) -> None:
        self._behind += data
        self._go_on()

    def _go_on(self) -> None:
        """Read a slice now, unless one is due, or the application has not taken what came before."""
        if self._next is None and self._behind and self.handshake_complete and not self.read_paused:
            self._read_slice()
        elif self._behind and not self.transport.is_closing():
            self.transport.pause_reading()

    def _read_slice(self) -> None:
        self._next = None
        if self.transport.is_closing() or self.read_paused:
            return
        part = bytes(self._behind[:SLICE])
        del self._behind[:SLICE]
        self._frames_seen = 0
        super().data_received(part)
        if self.transport.is_closing():
            self._behind.clear()
        elif self._behind or self._frames_seen > FEW:
            self.transport.pause_reading()
            delay = self._frames_seen / FRAMES if self._frames_seen > FEW else 0
            self._next = self.loop.call_later(delay, self._read_slice)
        elif not self.read_paused:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()
        super().connection_lost(exc)
        if self._address is not None:
            self._counted.leave(self._address)

    async def send(self, message: Any) -> None:
        """uvicorn's own logs an error behind each handshake that was refused in words."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True
        elif message["type"] == "websocket.accept":
            self._go_on()

    async def receive(self) -> Any:
        message = await super().receive()
        self._go_on()
        return message

    def handle_ping(self) -> None:
        """Of the pings of a client that reads nothing, the last alone is answered, once it reads."""
        self._frames_seen += 1
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send())

    def handle_pong(self, event: Any) -> None:
        self._frames_seen += 1
        super().handle_pong(event)

    def handle_cont(self, event: Any) -> None:
        self._frames_seen += 1
        if event.data or event.fin:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._frames_seen += 1
        super().send_receive_event_to_app()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._pong and not self.close_sent and not self.transport.is_closing():
            self.transport.write(self._pong)
        self._pong = b""

    def keepalive_timeout(self) -> None:
        """uvicorn's own waits for ever for a client that reads nothing."""
        super().keepalive_timeout()
        self.loop.call_later(LINGER, self.transport.abort)

"""Connections that became WebSockets: uvicorn's protocol, within the limits of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from .counting import LINGER, Connections


class Socket(WebSocketsSansIOProtocol):
    """Counted as its connection was, under `address`, until it ends."""

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

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._address is not None:
            self._counted.leave(self._address)

    async def send(self, message: Any) -> None:
        """uvicorn's own logs an error behind each handshake that was refused in words."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """uvicorn's own waits for ever for a client that reads nothing."""
        super().keepalive_timeout()
        self.loop.call_later(LINGER, self.transport.abort)


def head(method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of a request, for another parser."""
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([method, b" ", url, b" HTTP/1.1\r\n", *lines, b"\r\n"])

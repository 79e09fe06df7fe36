"""Clients that vanish without a word, as when their machine loses power or network: TCP alone would notice after some
fifteen minutes while it sends, and never while it waits, and their requests would take seats all that time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from math import ceil

_PROBES = 3
# macOS has another name for the first option, and not the second.
_IDLE: int | None = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
_UNANSWERED: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)


def end_with_client(transport: asyncio.BaseTransport, patience: float) -> None:
    """Have the system end the connection once the client's has answered nothing for `patience` seconds."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    half = max(1, ceil(patience / 2))
    options = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, _IDLE, half),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, half // _PROBES)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
        (socket.IPPROTO_TCP, _UNANSWERED, ceil(patience * 1000)),
    ]
    with contextlib.suppress(OSError):  # the client has left already
        for level, option, value in options:
            if option is not None:
                connection.setsockopt(level, option, value)

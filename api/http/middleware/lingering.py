"""What a client sends behind its answer, as of a body that nobody wanted to read, is read and dropped for a while.

A system resets a connection that is closed with bytes unread, upon which the client's drops the answer, too, if the
client has not read it yet; many clients and proxies read once they have sent everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

_PIECE = 1 << 16  # bytes


def handed_over(connection: socket.socket) -> socket.socket:
    """Another handle of a connection that its transport is about to close."""
    handle = connection.dup()
    handle.setblocking(False)
    return handle


async def read_out(connection: socket.socket, *, silence: float, longest: float, most: int) -> None:
    """Read until the client ends, is silent for `silence` seconds, or has sent `most` bytes or for `longest` seconds;
    then close. It sees at once that it gets nothing more."""
    loop = asyncio.get_running_loop()
    with connection, contextlib.suppress(OSError, TimeoutError):  # it has left, or is too slow
        connection.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(longest):
            while most > 0:
                async with asyncio.timeout(silence):
                    data = await loop.sock_recv(connection, _PIECE)
                if not data:
                    return
                most -= len(data)

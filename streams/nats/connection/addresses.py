"""Reaches a host that has several addresses, some of which may be dead: RFC 8305's "happy eyeballs".

uvloop's `create_connection` has no such thing.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

DELAY = 0.25  # seconds that an address has before the next one is tried beside it


class Transport(TcpTransport):
    """nats-py's, which would wait for the first address until its time is up, each time anew."""

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        async with asyncio.timeout(connect_timeout):
            reached = await reach(uri.hostname or "", uri.port or 0)
            reader, writer = await asyncio.open_connection(sock=reached, limit=buffer_size)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer


async def reach(host: str, port: int) -> socket.socket:
    """Connect to the first address that answers. Raises the `OSError` of the first one if none does."""
    found = iter(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))
    attempts: list[asyncio.Task[socket.socket]] = []
    reached: socket.socket | None = None
    try:
        while True:
            if (address := next(found, None)) is not None:
                attempts.append(asyncio.create_task(_connect(*address)))
            pending = [attempt for attempt in attempts if not attempt.done()]
            if pending:
                await asyncio.wait(
                    pending, timeout=None if address is None else DELAY, return_when=asyncio.FIRST_COMPLETED
                )
            ended = [attempt for attempt in attempts if attempt.done()]
            reached = next((attempt.result() for attempt in ended if attempt.exception() is None), None)
            if reached is not None:
                return reached
            if address is None and len(ended) == len(attempts):
                await attempts[0]
    finally:
        for attempt in attempts:
            attempt.cancel()
        for other in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(other, socket.socket) and other is not reached:
                other.close()


async def _connect(family: int, kind: int, protocol: int, _: str, address: Any) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    try:
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, address)
    except BaseException:
        one.close()
        raise
    return one

"""The HTTP bridge on a socket of its own, its pipeline the test; and clients that speak bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import orjson
from applications import Script
from asgi import Response

from penstock.api.http.server import serve_http
from penstock.config.settings import Settings


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def response(self) -> Response:
        """The next one, of a length that its headers say."""
        line, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()[:-1]
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Response(int(line.split()[1]), headers, body)

    async def ended(self) -> bytes:
        """What still comes until the server has closed, or reset, the connection."""
        rest = b""
        with contextlib.suppress(ConnectionError):
            while piece := await self.reader.read(1 << 16):
                rest += piece
        return rest


class Server:
    """A bridge at `port`; `script` hears its jobs."""

    def __init__(self, script: Script, port: int) -> None:
        self.script = script
        self.port = port
        self._clients = contextlib.ExitStack()

    @classmethod
    @contextlib.asynccontextmanager
    async def run(cls, **values: Any) -> AsyncIterator[Server]:
        script = await Script.start(**values)
        settings = Settings(backend="echo", **{"drain_timeout": 0.0} | values)
        listener = socket.create_server(("127.0.0.1", 0))
        stopping = asyncio.Event()
        parts = script.broker, script.subjects, script.registry, settings, listener, stopping
        serving = asyncio.create_task(serve_http(*parts))
        server = cls(script, listener.getsockname()[1])
        try:
            yield server
        finally:
            server._clients.close()
            stopping.set()
            await serving

    def socket(self, *, receive_buffer: int | None = None) -> socket.socket:
        """A new connection; a small `receive_buffer` makes the server notice sooner that nobody reads."""
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", self.port))
        client.setblocking(False)
        self._clients.callback(client.close)
        return client

    async def wire(self) -> Wire:
        reader, writer = await asyncio.open_connection(sock=self.socket())
        self._clients.callback(writer.transport.abort)
        return Wire(reader, writer)


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    raw = b"" if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if body is not None:
        lines += [f"Content-Length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + raw

"""A TCP proxy on loopback in front of one server, for faults that a network has and a kill does not.

It cuts connections by RST, holds back what is sent in either direction, or delivers it late. Nothing is dropped or
reordered inside a connection: TCP does neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from asyncio import Event, Queue, StreamReader, StreamWriter

_CHUNK = 1 << 16  # bytes
_HELD = 256  # chunks in each direction; then the sender's own buffers fill, as with a slow network
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Made by `start`. `delay` is in seconds, in each direction, of what arrives from now on."""

    def __init__(self, target: int) -> None:
        self.delay = 0.0  # set by the caller
        self.port = 0  # set by start
        self._target = target
        self._sent, self._received = Event(), Event()  # set while clients' bytes, or the server's, go through
        self._connections: dict[asyncio.Task[None], tuple[StreamWriter, ...]] = {}
        self._server: asyncio.Server  # set by start
        self.resume()

    @classmethod
    async def start(cls, target: int) -> Proxy:
        """Listen on a free port, for connections to the port `target`."""
        proxy = cls(target)
        proxy._server = await asyncio.start_server(proxy._accepted, "127.0.0.1", 0)
        proxy.port = proxy._server.sockets[0].getsockname()[1]
        return proxy

    @property
    def connections(self) -> int:
        """How many go through now."""
        return len(self._whole)

    def cut(self) -> int:
        """Reset all connections, on both sides; returns how many there were."""
        pairs = self._whole
        for writer in (writer for pair in pairs for writer in pair):
            with contextlib.suppress(OSError):  # closed by its other end already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            writer.transport.abort()
        return len(pairs)

    def stall(self, *, sent: bool = True, received: bool = True) -> None:
        """Hold back what clients send, or what the server does, or both, until `resume`."""
        if sent:
            self._sent.clear()
        if received:
            self._received.clear()

    def resume(self) -> None:
        self._sent.set()
        self._received.set()

    async def close(self) -> None:
        self._server.close()
        pairs, tasks = tuple(self._connections.values()), tuple(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in (writer for pair in pairs for writer in pair):
            writer.transport.abort()  # what is held back would keep it open
        await asyncio.sleep(0)

    @property
    def _whole(self) -> list[tuple[StreamWriter, ...]]:
        return [pair for pair in self._connections.values() if not pair[0].is_closing()]

    def _accepted(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._connections[task] = (writer,)
        task.add_done_callback(self._connections.pop)

    async def _relay(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Carry one connection until either side ends it."""
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is away
            writer.transport.abort()
            return
        self._connections[_this_task()] = (writer, to_server)
        pumps = [
            asyncio.create_task(self._pump(reader, to_server, self._sent)),
            asyncio.create_task(self._pump(from_server, writer, self._received)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in (writer, to_server):
                one.close()
        await asyncio.gather(writer.wait_closed(), to_server.wait_closed(), return_exceptions=True)  # or close aborts

    async def _pump(self, reader: StreamReader, writer: StreamWriter, is_open: Event) -> None:
        """Return when the reader's side has ended and all of it is written. Raises `OSError` where the other breaks."""
        held: Queue[tuple[float, bytes]] = Queue(_HELD)
        now = asyncio.get_running_loop().time

        async def read() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(_CHUNK)
                except OSError:  # reset, which ends it as well
                    data = b""
                await held.put((now() + self.delay, data))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, data = await held.get()
                await asyncio.sleep(due - now())
                await is_open.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()
        finally:
            reading.cancel()


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task

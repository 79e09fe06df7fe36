"""Reads a connection to NATS without a task: a message reaches its callback in the turn that receives it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Receive = Callable[[int, bytes, bytes, bytes, bytes], Awaitable[None] | None]

_END = b"\r\n"


class DirectReader(asyncio.Protocol):
    """The protocol of a connection in place of that of nats-py's `streams`, which get whatever is no message.

    `receive` takes a message: the id of its subscription, subject, reply subject, headers and data. What it returns is
    awaited before the next message. After each line for nats-py, messages wait for `go_on`.
    """

    def __init__(self, transport: asyncio.Transport, streams: asyncio.StreamReaderProtocol, receive: Receive) -> None:
        self.is_full = False  # the transport takes no more for now
        self._transport = transport
        self._streams = streams
        self._receive = receive
        self._parts: list[bytes] = []  # received, and not taken yet
        self._size = 0  # bytes of them
        self._needed = 1  # bytes of them that make the next message whole, or may
        self._is_ahead = False  # of nats-py, which has a line to read; reset by go_on
        self._left: asyncio.Task[None] | None = None  # what a callback has returned

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size >= self._needed:
            self._take()

    def go_on(self) -> None:
        """Take what follows a line for nats-py, which it has read."""
        self._is_ahead = False
        self._take()

    def eof_received(self) -> bool | None:
        return self._streams.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.connection_lost(exc)

    def pause_writing(self) -> None:
        self.is_full = True
        self._streams.pause_writing()

    def resume_writing(self) -> None:
        self.is_full = False
        self._streams.resume_writing()

    def _take(self) -> None:
        """Take whole messages until something has to be awaited."""
        if not self._parts:
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        begin, self._needed = 0, 1
        while begin < len(data) and not self._is_ahead and self._left is None:
            end = data.find(_END, begin)
            if end < 0:
                self._needed = len(data) - begin + 1
                break
            words = data[begin:end].split(b" ")
            start = end + len(_END)
            if (message := _message(words)) is None:
                self._is_ahead = True
                self._streams.data_received(data[begin:start])
                begin = start
                continue
            subscription, reply, head, size = message
            head, stop = start + head, start + size
            if len(data) < stop + len(_END):
                self._needed = stop + len(_END) - begin
                break
            left = self._receive(subscription, words[1], reply, data[start:head], data[head:stop])
            begin = stop + len(_END)
            if left is not None:
                self._await(left)
        self._parts = [data[begin:]] if begin < len(data) else []
        self._size = len(data) - begin

    def _await(self, left: Awaitable[None]) -> None:
        async def wait() -> None:
            try:
                await left
            finally:
                self._left = None
                self._transport.resume_reading()
                self._take()

        self._transport.pause_reading()
        self._left = asyncio.get_running_loop().create_task(wait())


def _message(words: list[bytes]) -> tuple[int, bytes, int, int] | None:
    """Of the line that begins a message: its subscription, its reply subject, and the bytes of its headers, and of
    these and its data. None for another line."""
    try:
        match words:
            case b"MSG", _, subscription, *reply, size if len(reply) < 2:
                return int(subscription), b"".join(reply), 0, int(size)
            case b"HMSG", _, subscription, *reply, head, size if len(reply) < 2:
                return int(subscription), b"".join(reply), int(head), int(size)
    except ValueError:  # nats-py refuses it
        pass
    return None

"""nats-py's client with a shorter path for each message: messages are most of what a front process does.

nats-py reads and writes in tasks, has a queue and a task for each subscription, parses header names character by
character, and checks and assembles a publish in four coroutines. Here a message reaches its callback in the turn of the
event loop that receives it, so callbacks run in the order of arrival; `post` builds the command at once, and all of a
turn are written together. What is out of the ordinary (a full buffer, an outage, an invalid header) takes nats-py's
own path.

This relies on private parts of nats-py; tests/streams/nats/connection/test_client.py fails if they change.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import wraps

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error, SecureConnWantedError
from nats.protocol.parser import Parser

from ....schemas.errors import PayloadTooLarge
from .access import Access
from .addresses import Transport
from .reading import DirectReader

# It does at once what it can; what it returns is awaited before the next message.
Callback = Callable[[Msg], Awaitable[None] | None]

LINGER = 0.002  # seconds that a message without haste waits for others, because each write costs a system call

_VERSION = "NATS/1.0"

_has_space = re.compile(r"\s").search
_is_header_name = re.compile(r"[A-Za-z0-9-]+").fullmatch


class ClosedAfterHandshake(Error):
    """So a server refuses a certificate: the handshake of TLS 1.3 ends before it has seen that."""


class DirectClient(Client):
    """Everything received waits for what the callbacks return, so that must never wait for an answer.

    It sends no password where TLS is wanted and there is none, and reconnects after every error by which a server ends
    a connection, where nats-py would stay closed.
    """

    def __init__(self, access: Access) -> None:
        super().__init__()
        self._access = access
        self._ps = _Lines(self)
        self._reader: DirectReader | None = None  # of the newest connection; set by _read_loop
        self._writes = False  # at the end of this turn; set by _flush_soon, reset by _write
        self._lingering: asyncio.TimerHandle | None = None  # set by post, reset by _end_lingering
        self._left: Srv | None = None  # set by leave, reset by _select_next_server

    async def post(
        self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None, *, linger: bool = False
    ) -> None:
        """Publish; with `linger` together with the next message or after `LINGER` seconds.

        Raises as `publish` does, but `PayloadTooLarge` for what the server that has us now does not take, and
        `CancelledError` where that would swallow it while it waits for space.
        """
        command = _command(subject, data, reply, headers)
        if len(data if command is None else command) > (most := self._max_payload):
            size = len(data) if command is None else len(command) - command.index(b"\n") - 3  # with headers
            if size > most:
                raise PayloadTooLarge(f"The message has {size:,} bytes, but the broker accepts {most:,} at most.")
        fits = command is not None and self._pending_data_size + len(command) <= self._max_pending_size
        if command is None or not fits or not self.is_connected:
            before = cancellations()
            await self.publish(subject, data, reply=reply, headers=headers)
            if cancellations() > before:
                raise asyncio.CancelledError
            return
        await self._send_command(command)
        if not linger:
            self._flush_soon()
        elif self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER, self._end_lingering)

    async def hear(self, subject: str, callback: Callback, group: str = "") -> Subscription:
        """Subscribe; `callback` gets each message in the turn in which it arrives."""

        @wraps(callback)
        async def wait(message: Msg) -> None:
            if (left := callback(message)) is not None:
                await left

        # No limits: nats-py would drop messages.
        return await self.subscribe(subject, queue=group, cb=wait, pending_msgs_limit=0, pending_bytes_limit=0)

    @property
    def has_others(self) -> bool:
        """Whether it knows more than one server."""
        return len(self._server_pool) > 1

    async def leave(self) -> None:
        """Connect to another server, or to this one again if no other accepts us."""
        self._left = self._current_server
        await self._process_op_err(Error("nats: left"))

    async def close(self) -> None:
        """Close; what a lost connection has not taken is dropped: asyncio of Python 3.12 and 3.13 fails to write it."""
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_io_writer", None)
        if writer is None or writer.is_closing():
            self._pending, self._pending_data_size = [], 0
        await super().close()

    async def _connect_to_server(self, s: Srv) -> None:
        if s.uri.scheme in ("ws", "wss"):
            await super()._connect_to_server(s)
            return
        s.last_attempt = time.monotonic()
        self._transport = self._transport or Transport()  # type: ignore[no-untyped-call]
        await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def _select_next_server(self) -> None:
        left, self._left = self._left, None
        self._server_pool.sort(key=lambda server: server is left)  # which is stable
        await super()._select_next_server()

    @property
    def ssl_context(self) -> ssl.SSLContext:
        return self._access.tls()

    def _connect_command(self) -> bytes:
        assert self._current_server is not None
        wanted = self._access.wants_tls or self._current_server.uri.scheme == "tls"
        if wanted and not self._is_secure():
            raise SecureConnWantedError
        if self._is_secure():
            # nats-py changes a connection to TLS behind the back of asyncio's reader, which would warn at its end.
            self._writer._protocol._over_ssl = True  # type: ignore[attr-defined]
        self._public_nkey = self._access.public_key()
        return super()._connect_command()

    @property
    def _writer(self) -> asyncio.StreamWriter:
        writer: asyncio.StreamWriter = self._transport._io_writer  # type: ignore[union-attr]
        return writer

    def _is_secure(self) -> bool:
        return self._writer.get_extra_info("ssl_object") is not None

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
            if not self.is_connected:  # the server closed the connection, and nats-py did not notice
                raise ConnectionResetError("the server closed the connection before it accepted us")
        except (OSError, Error, TimeoutError) as error:
            for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
                if task is not None:
                    task.cancel()
            is_secure = self._is_secure()
            self._transport.close()  # type: ignore[union-attr]  # nats-py would only forget it
            if is_secure and (isinstance(error, ConnectionError) or "empty response" in str(error)):
                raise ClosedAfterHandshake("it closed the connection after the TLS handshake") from error
            raise

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg or "invalid" in err_msg:  # after others the server closes the connection
            await self._error_cb(Error(f"nats: {err_msg.strip(chr(39))}"))
        else:
            await self._process_op_err(Error(f"nats: {err_msg.strip(chr(39))}"))

    def _end_lingering(self) -> None:
        self._lingering = None
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._writes:
            self._writes = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        """Write what this turn has posted; what there is no room for is left to nats-py's flusher, which waits."""
        self._writes = False
        if not (self._pending and self.is_connected):  # nats-py sends it over the next connection
            return
        transport = self._writer.transport
        if self._reader is not None and not self._reader.is_full and not transport.is_closing():
            transport.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0
        elif self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def _read_loop(self) -> None:
        # Nothing is subscribed to yet, so what has been read by now is no part of a message.
        transport, streams = self._writer.transport, self._writer._protocol  # type: ignore[attr-defined]
        self._reader = DirectReader(transport, streams, self._receive)  # type: ignore[arg-type]  # it reads as well
        transport.set_protocol(self._reader)
        await super()._read_loop()

    def _receive(self, sid: int, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> Awaitable[None] | None:
        if self.is_closed or self.is_reconnecting:  # nats-py reads no further either
            return None
        subscription = self._subs.get(sid)
        callback: Callback | None = getattr(subscription and subscription._cb, "__wrapped__", None)  # of `hear`
        parsed = _parsed(headers) if headers else None
        if callback is None or (headers and parsed is None):
            return self._process_msg(sid, subject, reply, data, headers)
        try:
            left = callback(Msg(self, subject.decode(), reply.decode(), data, parsed))
        except Exception as error:
            return self._error_cb(error)
        return None if left is None else self._reported(left)

    async def _reported(self, left: Awaitable[None]) -> None:
        try:
            await left
        except Exception as error:
            await self._error_cb(error)

    def read_on(self) -> None:
        """nats-py has read a line that it was left."""
        if self._reader is not None:
            self._reader.go_on()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        if subscription is None or subscription._cb is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        parsed = await self._process_headers(headers)
        try:
            await subscription._cb(Msg(self, subject.decode(), reply.decode(), data, parsed))
        except Exception as error:
            await self._error_cb(error)


class _Lines(Parser):
    """nats-py's parser, for what is no message."""

    async def parse(self, data: bytes = b"") -> None:
        await super().parse(data)
        self.nc.read_on()


def cancellations() -> int:
    """The number of pending cancellations of this task."""
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def _command(subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> bytes | None:
    """The protocol's command to publish; None if nats-py must refuse or repair some of it."""
    if not subject or _has_space(subject) or _has_space(reply):
        return None
    if not headers:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(data), data)
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if _is_header_name(name)]
    head = f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()
    breaks = len(headers) + 2
    if not len(lines) + 2 == head.count(b"\n") == head.count(b"\r") == breaks:
        return None
    sizes = len(head), len(head) + len(data)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply.encode(), *sizes, head, data)


def _parsed(headers: bytes) -> dict[str, str] | None:
    """The headers of a message, a status among them under nats-py's names; None if they have another form."""
    first, *lines = headers.decode("utf-8", "replace").split("\r\n")
    version, _, status = first.partition(" ")
    if version != _VERSION:
        return None
    parsed = {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
    if status:
        code, _, description = status.partition(" ")
        parsed |= {"Status": code, "Description": description} if description else {"Status": code}
    return parsed

"""HTTP connections with limits that uvicorn lacks: their number, the size and time of a request's head, and the time
that a client may leave a response unread.

`requests.read_body` limits the size and time of the body.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from ....config.settings import Settings
from ....schemas.events import ErrorBody
from ..answers import error_response
from .browsers import headers_unasked
from .counting import LINGER, Connections, network
from .unframed import unframed
from .upgrades import SOCKET_PATH, asks_for_socket, reading_on
from .vanished import end_with_client

MOST_IGNORED = 1 << 18  # bytes that a refused client may still send meanwhile
MAX_PIPELINED = 16  # requests that one connection may send ahead
LEAST_READ = 1 << 16  # bytes that a client reads in `write_timeout` at least, of an answer that waits for it
WATCH_INTERVAL = 0.25  # seconds between looks whether a client that sends nothing more has left
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with a timeout for everything that a client could delay."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
        exposed: Sequence[str],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections = connections
        self._exposed = exposed
        self._settings = connections.settings
        self._address: str | None = None  # under which it is counted; set by connection_made
        self._timer: asyncio.TimerHandle | None = None  # until the client must have sent something
        self._unread: asyncio.TimerHandle | None = None  # until the client must have read what was written
        self._watch: asyncio.TimerHandle | None = None  # set once the client has ended its side, while it is answered
        self._refused = False
        self._in_head = False  # between the first byte of a request and the end of its headers
        self._in_body = False  # between the end of the headers and the end of the body
        self._fields = 0  # bytes of the URL and headers of this request, trailers included
        self._waiting = 0  # received bytes that complete neither a head nor a part of a body yet
        self._advanced = False  # whether the current bytes completed something; set by the parser's callbacks
        self._ignored = 0  # bytes that came after a refusal
        self._offered = False  # whether this head offers another protocol, and the parser has not ended it yet
        self._is_rest = False  # whether the current bytes begin within a body
        self._switches = False  # to the protocol of WebSockets, behind this head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        address = network(get_remote_addr(transport))
        if not self._connections.admit(address):
            self.transport = transport
            self._refuse(503, "too_many_connections", "Too many connections; close some or try again later.")
            return
        self._address = address
        end_with_client(transport, 2 * self._settings.write_timeout)
        super().connection_made(transport)
        self._await_client(self._settings.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel(self._timer, self._unread, self._watch)
        is_answered = self.cycle is not None and self.cycle.response_complete
        if exc is None and self._address is not None and is_answered and self._in_body and not self._refused:
            self._connections.linger(self._address, self.transport.get_extra_info("socket"))
        elif self._address is not None:
            self._connections.leave(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._ignored += len(data)
            if self._ignored > MOST_IGNORED:
                self.transport.abort()
            return
        self._advanced, self._is_rest = False, self._in_body
        self._parse(data)
        if self._refused or self._switches or self.transport.is_closing():
            return
        self._waiting = 0 if self._advanced else self._waiting + len(data)
        self._check_head(self._waiting)
        if self._timer is None and not self._busy and not self._refused:  # the rest of a body, or line ends
            self._await_client(self._settings.header_timeout)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more: it has left, or waits for the answers to what it has asked, as `nc -N` does.

        TCP does not say which. The system of a client that has left resets the connection when it is sent something, so
        the client gets an interim answer, which it must ignore (RFC 9110, 15.2) unless it speaks HTTP/1.0: there a POST
        counts as abandoned, since nginx asks so by default, and closes the connection when its own client leaves.
        """
        if self._refused or not self._busy or self._in_head or self._in_body:
            return False
        is_old = self.scope["http_version"] == "1.0"
        if is_old and self.scope["method"] == "POST":
            return False
        self.cycle.keep_alive = False
        if not (is_old or self.pipeline or self.cycle.response_started):
            self.transport.write(CONTINUE)
        if self._watch is None:
            self._watch = self.loop.call_later(WATCH_INTERVAL, self._look)
        return True

    def _look(self) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(WATCH_INTERVAL, self._look)

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data and not self._refused:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as offered:
                    data = data[offered.args[0] :]
                    if self._switches:
                        self._switch(data)
                        break
                    self.parser = reading_on(self, self.headers, self.scope["http_version"])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _switch(self, rest: bytes) -> None:
        """Leave the connection, and the bytes behind this head, to the protocol of WebSockets."""
        from .sockets import Socket  # few clients need it

        self._cancel(self._timer, self._unread, self._watch)
        self.connections.discard(self)
        given: Any = self.config, self.server_state, self.app_state
        protocol = Socket(*given, connections=self._connections, address=self._address)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.begin(SOCKET_PATH, self.url.partition(b"?")[2], self.headers, rest)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._fields, self._waiting = True, 0, 0
        self._advanced |= self._is_rest
        if not self._busy:
            self._await_client(self._settings.header_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value) + 4
        if not self._refused:
            super().on_header(name, value)
            self._check_head(self._fields)

    def on_headers_complete(self) -> None:
        self._offered = self.parser.should_upgrade()
        self._check_head(self._fields + len(self.url))
        if self._refused:
            return
        self._advanced = True
        if len(self.pipeline) >= MAX_PIPELINED:
            self._end_behind_answers()
            return
        self._in_head, self._in_body = False, True
        self._cancel(self._timer)
        self._timer = None
        self._switches = self._offered and not self._busy and asks_for_socket(self.parser, self.url, self.headers)
        if not self._switches:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offered:  # the parser ends here, before the body, which `_parse` reads
            self._offered = False
            return
        self._in_body, self._advanced = False, True
        if self._refused:
            return
        super().on_message_complete()
        if not self._busy:  # the response was complete before the request
            self._await_client(self._settings.idle_timeout)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", "The request is not valid HTTP/1.1.")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._end()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._unread)

    def timeout_keep_alive_handler(self) -> None:
        self._end()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        own: Any = unframed(app, cycle) if cycle.scope["http_version"] == "1.0" else app
        super()._start_asgi_task(cycle, own)

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check_head(self, size: int) -> None:
        most = self._settings.max_header_size
        if size > most and not self._refused:
            message = f"The request's line and headers exceed {most} bytes, the limit of the setting max_header_size."
            self._refuse(431, "headers_too_large", message)

    def _await_client(self, seconds: float) -> None:
        self._cancel(self._timer)
        self._timer = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._in_head and not self._refused:
            seconds = self._settings.header_timeout
            self._refuse(408, "header_timeout", f"The headers did not arrive within {seconds:g} seconds.")
        else:
            self._end()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer with an error, and read nothing more from this client."""
        if self._busy and not self._in_body:
            self._end_behind_answers()
            return
        self._refused = True
        if self._busy:
            if self.pipeline or self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # the application, which waits for the rest of the body, hears of it
            self.cycle.message_event.set()
        kind = "overloaded_error" if status == 503 else "invalid_request_error"
        response = error_response(ErrorBody(status, message, kind, code, retry_after=1.0 if status == 503 else None))
        response.headers["connection"] = "close"
        origin = next((value.decode("latin-1") for name, value in self.headers or () if name == b"origin"), None)
        response.headers.update(headers_unasked(self._settings.cors_origins or (), self._exposed, origin))
        lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(response.body)]))
        # Closing at once, with bytes unread, would reset the connection before the client has read the error.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.flow is not None:
            self.flow.resume_reading()
        self._cancel(self._timer)
        self._timer = self.loop.call_later(LINGER, self.transport.abort)

    def _end_behind_answers(self) -> None:
        """Close once the requests before this one are answered; a client asks for the rest again (RFC 9112, 9.3.2)."""
        self._refused = True
        (self.pipeline[0][0] if self.pipeline else self.cycle).keep_alive = False

    def _end(self) -> None:
        """Close once the client has read what was written; abort after `write_timeout`."""
        self._cancel(self._timer)
        self.transport.close()
        self._await_reader()

    def _await_reader(self) -> None:
        self._cancel(self._unread)
        self._unread = self.loop.call_later(self._settings.write_timeout, self._check_reader, self._unsent())

    def _check_reader(self, before: int) -> None:
        """Abort if the client has hardly read anything since `before` bytes were unsent; a slow one may take longer."""
        left = self._unsent()
        if before - left < min(LEAST_READ, before) or not before:
            self.transport.abort()
        else:
            self._await_reader()

    def _unsent(self) -> int:
        """Bytes that wait for the client, here and in the system's buffer, where the system says how many."""
        waiting = self.transport.get_write_buffer_size()
        try:
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # macOS tells only of terminals
            return waiting
        return waiting + int.from_bytes(queued, sys.byteorder)

    @staticmethod
    def _cancel(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def protocol(settings: Settings, exposed: Sequence[str]) -> Callable[..., Connection]:
    """A factory of connections for uvicorn; all of them are counted together. Pages may read the headers `exposed`."""
    connections = Connections(settings)

    def connect(**given: Any) -> Connection:
        return Connection(**given, connections=connections, exposed=exposed)

    return connect

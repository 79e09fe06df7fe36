"""Requests that offer another protocol, as Java's client offers HTTP/2: Penstock stays with HTTP/1.1, which RFC 9110
(7.8) allows, but for WebSockets on the path that has them.

httptools takes what follows the head of such a request for the other protocol. So another parser reads on: it gets a
head without the offer, of which nobody hears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import httptools

SOCKET_PATH = "/v1/responses"
_FRAMING = (b"content-length", b"transfer-encoding")
_OF_HEADS = ("on_message_begin", "on_url", "on_header", "on_headers_complete")


def asks_for_socket(parser: httptools.HttpRequestParser, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a head that offers another protocol wants a WebSocket where there is one. HTTP/1.0 can offer nothing
    (RFC 9110, 7.8), and no handshake has a body."""
    if parser.get_http_version() == "1.0" or any(name in _FRAMING and value != b"0" for name, value in headers):
        return False
    is_there = parser.get_method() == b"GET" and url.partition(b"?")[0] == SOCKET_PATH.encode()
    return is_there and any(name == b"upgrade" and value.lower() == b"websocket" for name, value in headers)


class Listener(Protocol):
    """What httptools calls while it reads a body; `_OF_HEADS` are the others."""

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


def reading_on(listener: Listener, headers: Iterable[tuple[bytes, bytes]], version: str) -> httptools.HttpRequestParser:
    """A parser for the body that `headers` announce, and for later requests; if they announce none, it has ended the
    message already."""
    told = _Told(listener)
    parser = httptools.HttpRequestParser(told)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own parser
    framing = [name + b": " + value + b"\r\n" for name, value in headers if name in _FRAMING]
    parser.feed_data(b"".join([b"POST / HTTP/", version.encode(), b"\r\n", *framing, b"\r\n"]))
    told.in_head = False
    return parser


class _Told:
    """The callbacks of `listener`, but for those of the first head."""

    def __init__(self, listener: Listener) -> None:
        self.in_head = True
        self.on_body = listener.on_body
        self.on_message_complete = listener.on_message_complete
        for name in _OF_HEADS:
            setattr(self, name, self._after_the_head(getattr(listener, name)))

    def _after_the_head(self, callback: Callable[..., None]) -> Callable[..., None]:
        def call(*given: bytes) -> None:
            if not self.in_head:
                callback(*given)

        return call

"""How much a message takes of what the broker accepts."""

from __future__ import annotations

from ..schemas.errors import PayloadTooLarge
from .port import Headers

_HEADER_LINES = len(b"NATS/1.0\r\n\r\n")
_PER_HEADER = len(b": \r\n")


def message_size(data: bytes, headers: Headers) -> int:
    """Bytes of `data` and `headers` as NATS frames them."""
    size = len(data) + _HEADER_LINES
    for name, value in headers.items():
        size += len(name) + len(value.encode()) + _PER_HEADER
    return size


def check_size(data: bytes, headers: Headers, most: int) -> None:
    """Raises `PayloadTooLarge` above `most` bytes."""
    size = message_size(data, headers)
    if size > most:
        raise PayloadTooLarge(f"The message has {size:,} bytes; the broker takes {most:,}.")

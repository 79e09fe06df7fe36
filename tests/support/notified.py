"""A service manager's socket, as systemd gives one to what it starts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

TIMEOUT = 120.0  # seconds for a message, longer than any start takes


class Notified:
    def __init__(self, address: str) -> None:
        self.address = address
        self.messages: list[list[str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(TIMEOUT)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def next(self) -> list[str]:
        """The lines of the next message."""
        self.messages.append(self._socket.recv(4096).decode().split("\n"))
        return self.messages[-1]

    def until(self, line: str) -> list[list[str]]:
        """The messages up to one with a line that begins so."""
        found = [self.next()]
        while not any(each.startswith(line) for each in found[-1]):
            found.append(self.next())
        return found

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def notified(address: str) -> Iterator[Notified]:
    listening = Notified(address)
    try:
        yield listening
    finally:
        listening.close()

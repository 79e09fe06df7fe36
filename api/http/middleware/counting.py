"""How many connections are open, in total and from each address."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import Counter

import structlog

from ....config.settings import Settings
from .lingering import handed_over, read_out

log = structlog.get_logger(__name__)

LINGER = 2.0  # seconds that a refused client has to read the error, or may be silent while its body is dropped
MOST_DROPPED = 16  # bodies of the largest size
WARNING_INTERVAL = 10.0  # seconds


class Connections:
    """Counts the connections, in total and by address; an IPv6 network of 64 bits counts as one address."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.total = 0
        self._by_address: Counter[str] = Counter()
        self._warned = -WARNING_INTERVAL
        self._lingering: dict[asyncio.Task[None], str] = {}  # by the address of each

    def admit(self, address: str) -> bool:
        """Count one more connection, unless that exceeds a limit."""
        settings = self.settings
        if self.total < settings.max_connections and self._by_address[address] < settings.max_connections_per_address:
            self.total += 1
            self._by_address[address] += 1
            return True
        if time.monotonic() - self._warned >= WARNING_INTERVAL:
            self._warned = time.monotonic()
            count = self._by_address[address]
            log.warning("connections refused", address=address, from_address=count, total=self.total)
        return False

    def leave(self, address: str) -> None:
        self.total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def linger(self, address: str, connection: socket.socket) -> None:
        """Read what the client still sends, although the connection's transport closes; it leaves then."""
        try:
            handle = handed_over(connection)
        except OSError:  # no room for one more file
            self.leave(address)
            return
        longest, most = self.settings.header_timeout, MOST_DROPPED * self.settings.max_body_size
        task = asyncio.create_task(read_out(handle, silence=LINGER, longest=longest, most=most))
        self._lingering[task] = address
        task.add_done_callback(lambda task: self.leave(self._lingering.pop(task)))


def network(client: tuple[str, int] | None) -> str:
    """The address under which a client is counted."""
    if client is None:
        return ""  # a Unix socket
    address = client[0].partition("%")[0]
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))

"""The broker's clock. Deadlines are absolute, and machines' clocks may differ: a virtual machine's by hours, after its
host has slept. And they are set: between two looks at the broker's, a part would refuse all requests for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self
from urllib.parse import urlsplit

import structlog

from ...schemas.errors import BrokerUnavailable
from ...schemas.urls import is_loopback
from .connection.link import Link
from .direct import unix_seconds
from .management import ApiError, Json, call

log = structlog.get_logger(__name__)

_LOOK = 10.0  # seconds between two comparisons
_NOTEWORTHY = 1.0  # seconds
# Both go on while the machine sleeps: the first on Linux, the second on macOS.
_COUNTED: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def own_clock(address: str, machines: Callable[[], float] = time.time) -> Callable[[], float]:
    """What to compare with the clock of the broker at `address`: Unix seconds that go on where the machine's are set.

    For a broker on this machine it is the machine's clock, which is the broker's as well, also at once when it is set.
    """
    if all(is_loopback(urlsplit(server).hostname or "") for server in address.split(",")):
        return machines
    since = machines() - time.clock_gettime(_COUNTED)
    return lambda: since + time.clock_gettime(_COUNTED)


class BrokerClock:
    """Our own clock, changed by no more than makes it agree with the answers of `ask`, which have the server's time."""

    def __init__(self, ask: Callable[[], Awaitable[Json]], own: Callable[[], float]) -> None:
        self._ask = ask
        self._own = own
        self._ahead = 0.0  # seconds by which the server's clock is; set by look
        self._told = 0.0  # the same, as the log has it; set by look

    @classmethod
    def of(cls, link: Link, stream: str) -> Self:
        """Learns the time from what the servers say of `stream`."""
        return cls(partial(call, link, f"STREAM.INFO.{stream}", at_once=True), own_clock(link.address))

    def now(self) -> float:
        """Unix seconds."""
        return self._own() + self._ahead

    async def look(self) -> None:
        """Compare the clocks, if the server answers."""
        asked = self._own()
        try:
            said = unix_seconds((await self._ask())["ts"])
        except (BrokerUnavailable, ApiError):
            return
        self._ahead = min(max(self._ahead, said - self._own()), said - asked)
        if abs(self._ahead - self._told) > _NOTEWORTHY:
            self._told = self._ahead
            way = "behind" if self._ahead > 0 else "ahead of"
            log.warning(f"this clock is {way} the broker's, which counts", seconds=round(abs(self._ahead), 1))

    async def follow(self) -> None:
        """Look again and again, until cancelled: either clock may be set."""
        while True:
            await asyncio.sleep(_LOOK)
            await self.look()

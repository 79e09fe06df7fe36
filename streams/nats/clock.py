"""The broker's clock. Deadlines are absolute, and machines' clocks may differ: a virtual machine's by hours, after its
host has slept. And they are set: between two looks at the broker's, a part would refuse all requests for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self

import structlog

from ...schemas.errors import BrokerUnavailable
from .connection.link import Link
from .direct import unix_seconds
from .management import ApiError, Json, call

log = structlog.get_logger(__name__)

_LOOK = 10.0  # seconds between two comparisons
_NOTEWORTHY = 1.0  # seconds
# Both go on while the machine sleeps: the first on Linux, the second on macOS.
_counted = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class BrokerClock:
    """Our own clock, changed by no more than makes it agree with the answers of `ask`, which have the server's time.

    It goes on where the machine's is set, also for a broker at a loopback address: that may be a proxy, to a broker
    elsewhere. `follow` then asks at once, since it may be the broker's machine as well.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Json]],
        machines: Callable[[], float] = time.time,
        counted: Callable[[], float] = _counted,
    ) -> None:
        self._ask = ask
        self._machines = machines
        self._counted = counted
        self._since = machines() - counted()
        self._machines_since = self._since  # as the machine's clock was when we last looked at it
        self._ahead = 0.0  # seconds by which the server's clock is; set by look
        self._told = 0.0  # the same of the machine's, as the log has it; set by look
        self._wake: Callable[[], object] | None = None  # has `follow` ask; set by it

    @classmethod
    def of(cls, link: Link, stream: str) -> Self:
        """Learns the time from what the servers say of `stream`."""
        return cls(partial(call, link, f"STREAM.INFO.{stream}", at_once=True))

    def now(self) -> float:
        """Unix seconds."""
        counted = self._counted()
        machines_since = self._machines() - counted
        if abs(machines_since - self._machines_since) > _NOTEWORTHY:
            self._machines_since = machines_since
            if self._wake is not None:
                self._wake()
        return self._since + counted + self._ahead

    async def look(self) -> None:
        """Compare the clocks, if the server answers."""
        asked = self._own()
        try:
            said = unix_seconds((await self._ask())["ts"])
        except (BrokerUnavailable, ApiError):
            return
        self._ahead = min(max(self._ahead, said - self._own()), said - asked)
        self._machines_since = self._machines() - self._counted()
        ahead = self._ahead + self._since - self._machines_since
        if abs(ahead - self._told) > _NOTEWORTHY:
            self._told = ahead
            way = "behind" if ahead > 0 else "ahead of"
            log.warning(f"this clock is {way} the broker's, which counts", seconds=round(abs(ahead), 1))

    async def follow(self) -> None:
        """Look again and again, until cancelled: either clock may be set."""
        is_set = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, is_set.set)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK):
                        await is_set.wait()
                is_set.clear()
                await self.look()
        finally:
            self._wake = None

    def _own(self) -> float:
        return self._since + self._counted()

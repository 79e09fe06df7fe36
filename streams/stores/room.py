"""What is free in a bucket, as far as a process knows: measured now and then, less what it has stored since."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic

from ..port import Broker

FRESH = 0.2  # seconds for which a measurement is used


class Room:
    """Of one bucket; `clock` returns seconds."""

    def __init__(self, broker: Broker, bucket: str, clock: Callable[[], float] = monotonic) -> None:
        self.bucket = bucket
        self.most = 0  # bytes; 0 for no limit; set by look
        self.free = 0  # bytes; set by look and take
        self._broker = broker
        self._clock = clock
        self._measured_at = -inf  # set by look and forget

    async def look(self) -> None:
        """Measure, unless that was done just now."""
        if self._clock() - self._measured_at > FRESH:
            filled, self.most = await (await self._broker.bucket(self.bucket)).filled()
            self.free = self.most - filled
            self._measured_at = self._clock()

    def take(self, size: int) -> None:
        """So many bytes are stored."""
        self.free -= size

    def forget(self) -> None:
        """Much has changed: measure again."""
        self._measured_at = -inf

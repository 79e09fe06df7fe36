"""How the children of one `penstock serve` or `penstock agent` bring what they have counted together.

Each child publishes it under the name of its family, which its parent gave it; whoever answers `/metrics` for the
family listens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from ..config import metrics
from ..config.process import family
from .beats import until_beat
from .outages import outage_logged
from .port import Broker, Message
from .topology import Subjects

INTERVAL = 1.0  # seconds between two words of a child
STALE = 5.0  # seconds after which a child that is silent counts as gone
_TURN = 0.25  # seconds between two looks at the event loop's clock


async def share_metrics(broker: Broker, subjects: Subjects, process: str) -> None:
    """Publish what this process has counted, until cancelled; nothing without a family."""
    own = family()
    while own is not None:
        with outage_logged("metrics cannot be published"):
            await broker.notify(subjects.metrics(own, process), metrics.exposed())
        await asyncio.sleep(until_beat(INTERVAL))


async def watch_loop(process: str) -> None:
    """Measure how late the event loop is, until cancelled."""
    loop, lag = asyncio.get_running_loop(), metrics.LOOP_LAG.labels(process)
    while True:
        due = loop.time() + _TURN
        await asyncio.sleep(_TURN)
        lag.observe(max(0.0, loop.time() - due))


class FamilyMetrics:
    """What the other children of the family have counted; `clock`, in seconds, tells who is gone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[bytes, float]] = {}  # by process, with when it came

    async def listen(self, broker: Broker, subjects: Subjects, own: str | None = None) -> None:
        """Hear the family that this process belongs to, or its `own` children."""
        if (own := own or family()) is not None:
            await broker.listen(subjects.metrics_of(own), self.hear)

    def hear(self, message: Message) -> None:
        with self._lock:
            self._heard[message.subject] = message.data, self._clock()

    def texts(self) -> list[bytes]:
        """What each living one has exposed last; other threads may ask, too."""
        now = self._clock()
        with self._lock:  # the event loop may hear another meanwhile
            self._heard = {name: (text, came) for name, (text, came) in self._heard.items() if now - came <= STALE}
            return [text for text, _ in self._heard.values()]

"""Which jobs of a long lane this copy has in hand, where one tenant's might hide another's.

A lane is first in, first out, and a copy has only its first jobs in hand. While several tenants wait in a lane that is
longer than that, a copy keeps only so many jobs of each in hand and gives further ones back to the broker for a while:
they stay where they are, and the lane goes on to the next. How long depends on how far from their turn they are, and is
always too short rather than too long. What is in hand stays the oldest of its tenant.

"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from ...schemas.errors import NotYet
from ...streams.outages import outage_logged
from ...streams.port import DEADLINE, Message
from ...streams.topology import batch_stream
from ..contract import Pipe
from .lanes import Waiting

LOOK = 0.25  # seconds between two looks at who waits in long lanes

CROWDED = 60.0  # seconds for which a lane is treated so after several tenants were seen in it
SHORTEST, LONGEST = 0.25, 15.0  # seconds for which a job is given back
FASTEST = 0.002  # seconds; a tenant's jobs are taken to leave no faster one after another
EARLY = 4  # times sooner than its turn would be, a job comes again


class LaneWindows:
    """Those of all lanes, `size` jobs in hand of each."""

    def __init__(self, pipe: Pipe, size: int) -> None:
        self._pipe = pipe
        self._size = size
        self._windows: dict[tuple[str, str], LaneWindow] = {}  # by the token of the lanes, and priority

    def of(self, subject: str) -> LaneWindow:
        """The window of the lane with this subject of a tenant."""
        *_, lanes, priority, _ = subject.split(".")
        window = self._windows.get((lanes, priority))
        if window is None:
            window = self._windows[lanes, priority] = LaneWindow(self._size)
        return window

    def is_shared(self, subject: str) -> bool:
        """Whether jobs of this lane are given back so that other tenants go first."""
        return self.of(subject).share is not None

    async def run(self) -> None:
        """See who waits in lanes that are longer than their window; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            for (lanes, priority), window in list(self._windows.items()):
                if window.is_watched:
                    with outage_logged("lanes cannot be read"):
                        held = await self._pipe.broker.held(batch_stream(lanes, priority))
                        window.look(len(held.by_subject), self._pipe.now())
                elif window.is_empty:
                    del self._windows[lanes, priority]


class LaneWindow:
    """Of one lane, `size` jobs in hand at most. Knows no broker."""

    def __init__(self, size: int) -> None:
        self.share: int | None = None  # jobs of one tenant in hand; None: as many as there are; set by look
        self._size = size
        self._held: dict[str, dict[int, Waiting]] = {}  # by tenant and sequence
        self._count = 0
        self._until = 0.0  # when the lane is no longer crowded; set by look
        self._left: dict[str, tuple[float, float]] = {}  # by tenant: when one left last, and seconds between two

    @property
    def is_watched(self) -> bool:
        """Whether it has to be known who waits in the lane: something may be hidden."""
        return self.share is not None or self._count >= self._size

    @property
    def is_empty(self) -> bool:
        return not self._held and self.share is None

    @contextmanager
    def holding(self, waiting: Waiting) -> Iterator[None]:
        """Hold a job until it has been sent, or has ended here."""
        tenant = waiting.job.tenant
        sequence = waiting.sequence
        self._held.setdefault(tenant, {})[sequence] = waiting
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            own = self._held.get(tenant, {})
            if own.get(sequence) is waiting:  # else it came again meanwhile, after its lease had expired
                del own[sequence]
                if not own:
                    del self._held[tenant]

    def left(self, tenant: str, now: float) -> None:
        """A job of the tenant has been sent."""
        if self.share is not None:
            last, pause = self._left.get(tenant, (now, 0.0))
            self._left[tenant] = now, 0.8 * pause + 0.2 * (now - last)

    def admit(self, message: Message, now: float) -> None:
        """Raises `NotYet` for a job that others are to pass; may give back a later one of its tenant instead.

        Looks at the subject and headers alone: in a long lane that happens often.
        """
        if self.share is None:
            return
        tenant = message.subject.rpartition(".")[2]
        own = self._waiting(tenant)
        if len(own) < self.share:
            return
        newest = max(own)
        if message.sequence > newest:
            raise NotYet(self._pause(tenant, message.sequence - newest, _deadline(message), now))
        self._give_back(own[newest], 1, now)

    def look(self, tenants: int, now: float) -> None:
        """So many tenants wait in the lane."""
        if tenants > 1:
            self.share = max(1, self._size // (tenants + 1))
            self._until = now + CROWDED
        elif now >= self._until:
            self.share = None
            self._left.clear()
        if self.share is None:
            return
        for tenant in self._held:
            own = self._waiting(tenant)
            for rank, sequence in enumerate(sorted(own)[self.share :], 1):
                self._give_back(own[sequence], rank, now)

    def _waiting(self, tenant: str) -> dict[int, Waiting]:
        """Those that may still be given back: none that is on its way to a worker."""
        own = self._held.get(tenant, {})
        return {sequence: one for sequence, one in own.items() if not one.number and not one.sent.done()}

    def _give_back(self, waiting: Waiting, rank: int, now: float) -> None:
        job = waiting.job
        waiting.sent.set_exception(NotYet(self._pause(job.tenant, rank, job.deadline, now)))

    def _pause(self, tenant: str, rank: int, deadline: float, now: float) -> float:
        _, pause = self._left.get(tenant, (0.0, 0.0))
        turn = rank * max(pause, FASTEST)
        return max(0.0, min(max(SHORTEST, min(LONGEST, turn / EARLY)), deadline - now))


def _deadline(message: Message) -> float:
    """In Unix seconds; custom stages need not send it along."""
    try:
        return float(message.headers[DEADLINE])
    except (KeyError, ValueError):
        return inf

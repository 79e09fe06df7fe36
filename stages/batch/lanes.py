"""The jobs that wait for one model, in the order in which they will go: high before normal before low. In each lane
the tenant goes next that has had the least, and a tenant's own jobs go first in, first out. A lane whose first job has
waited long counts as the next higher one, so that none waits for ever; but that puts no tenant before another one of
higher priority that has had less, or whoever keeps a long queue would be the most urgent.

Knows no broker and no clock of its own.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ...schemas.canaries import CANARY
from ...schemas.events import Queued
from ...schemas.jobs import Priority, ValidatedJob
from ...streams.topology import PRIORITIES
from ..visits import Visit
from .shares import SeatShares
from .usage import MOST_TENANTS, TenantUsage


@dataclass(slots=True, eq=False)
class Waiting:
    """A waiting job, and the future that ends its delivery. `sequence` is its message's in the lane."""

    job: ValidatedJob
    sequence: int
    epoch: int = 0  # the newest that a worker may have given it
    sent: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    number: int = 0  # of the message to its worker; set by the batch stage
    told: Queued | None = None  # what its client heard last; set by WaitingNews
    visit: Visit | None = None  # None outside of a runner
    is_in_line: bool = False  # set by Lanes

    def headers(self, now: float, worker: str, size: int) -> dict[str, str]:
        """The headers of hops and trace for the message to the worker, which gets so many jobs together."""
        return {} if self.visit is None else self.visit.headers(now, worker=worker, size=size)

    @property
    def may_wait(self) -> bool:
        """Whether it may wait however long its model takes: its client reads a stream, or it has run already."""
        return self.sequence < 0 or self.job.body.get("stream") is True

    @property
    def rank(self) -> int:
        return PRIORITIES.index(self.job.priority)

    def __lt__(self, other: Waiting) -> bool:
        return self.sequence < other.sequence


class Lanes:
    """`ageing` is how many seconds of waiting are worth a priority; None: no waiting is. `usage` and `shares` are of
    their model."""

    def __init__(
        self, ageing: float | None, usage: TenantUsage | None = None, shares: SeatShares | None = None
    ) -> None:
        self.shares = shares or SeatShares()
        self._ageing = ageing
        self._usage = usage or TenantUsage()
        self._lanes: tuple[dict[str, list[Waiting]], ...] = tuple({} for _ in PRIORITIES)  # heaps, by tenant
        self.taken = 0  # jobs that have been popped; set by pop
        self._turns: dict[str, int] = {}  # the newest of each tenant; set by pop

    def push(self, waiting: Waiting) -> None:
        tenant = waiting.job.tenant
        if not any(tenant in lane for lane in self._lanes):
            self._usage.enter(tenant)
        heapq.heappush(self._lanes[waiting.rank].setdefault(tenant, []), waiting)
        waiting.is_in_line = True

    def remove(self, waiting: Waiting) -> None:
        """Forget a job, if it is still there."""
        if waiting.is_in_line:
            line = self._lanes[waiting.rank][waiting.job.tenant]
            line.remove(waiting)
            heapq.heapify(line)
            waiting.is_in_line = False

    def pop(self, waiting: Waiting) -> None:
        """Take away the first job of its tenant, whose turn this was."""
        tenant = waiting.job.tenant
        assert heapq.heappop(self._lanes[waiting.rank][tenant]) is waiting
        waiting.is_in_line = False
        self.taken += 1
        self._turns.pop(tenant, None)
        self._turns[tenant] = self.taken
        if len(self._turns) > MOST_TENANTS:
            del self._turns[next(iter(self._turns))]  # who had none for the longest goes first anyway

    def heads(self, now: float, passed_over: Collection[str] = ()) -> list[Waiting]:
        """The first job of each lane, whose turn it is first; those that have been settled are forgotten.

        None of the tenants in `passed_over` has a turn.
        """
        found: list[tuple[int, int, Waiting]] = []
        counters: list[tuple[float, int]] = []  # of the lanes before, with their urgency
        for rank, lane in enumerate(self._lanes):
            firsts = [line[0] for line in self._lines(lane) if line[0].job.tenant not in passed_over]
            if firsts:
                first = min(firsts, key=self._order) if len(firsts) > 1 else firsts[0]
                counter = self._usage.counter(first.job.tenant)
                urgency = min(self._urgency(waiting, now) for waiting in firsts)
                urgency = max([urgency, *(other for less, other in counters if less < counter)])
                counters.append((counter, urgency))
                found.append((urgency, rank, first))
        return [waiting for _, _, waiting in sorted(found, key=lambda each: each[:2])]

    def needed(self) -> Counter[str]:
        """The seats that tenants hold, as workers have reported them, and the jobs that wait."""
        needed = Counter(self._usage.running)
        for lane in self._lanes:
            needed.update({tenant: len(line) for tenant, line in lane.items()})
        del needed[CANARY]  # which nobody makes room for
        return needed

    def __iter__(self) -> Iterator[Waiting]:
        """All jobs, in order of priority and arrival: what positions are counted by."""
        for lane in self._lanes:
            numbered = [(number, waiting) for line in self._lines(lane) for number, waiting in enumerate(sorted(line))]
            yield from (
                waiting for number, waiting in sorted(numbered, key=lambda each: (each[0], self._order(each[1])))
            )

    def oldest(self) -> Iterator[tuple[Priority, float]]:
        """Of each priority of which something waits, when the job was created that has waited longest."""
        for priority, lane in zip(PRIORITIES, self._lanes, strict=True):
            if lines := self._lines(lane):
                yield priority, min(line[0].job.created for line in lines)

    def __bool__(self) -> bool:
        return any(line for lane in self._lanes for line in lane.values())

    def _lines(self, lane: dict[str, list[Waiting]]) -> list[list[Waiting]]:
        """Those of the tenants of whom something waits."""
        for tenant, line in list(lane.items()):
            while line and line[0].sent.done():
                heapq.heappop(line).is_in_line = False
            if not line:
                del lane[tenant]
        return list(lane.values())

    def _order(self, waiting: Waiting) -> tuple[bool, float, int, int]:
        """What ran already goes first, then who has had the least, then whose turn was the longest ago."""
        tenant = waiting.job.tenant
        if waiting.sequence < 0:
            return False, 0.0, 0, waiting.sequence
        return True, self._usage.counter(tenant), self._turns.get(tenant, 0), waiting.sequence

    def _urgency(self, waiting: Waiting, now: float) -> int:
        return waiting.rank - int(max(0.0, now - waiting.job.created) / self._ageing) if self._ageing else waiting.rank

"""The jobs that wait for one model, in the order in which they will go: high before normal before low, each lane first
in first out. A lane whose first job has waited long counts as the next higher one, so that none waits for ever.

Knows no broker and no clock of its own.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..schemas.jobs import ValidatedJob
from ..streams.topology import PRIORITIES


@dataclass(slots=True, eq=False)
class Waiting:
    """A job and the promise to its delivery. `sequence` is its place in its lane."""

    job: ValidatedJob
    sequence: int
    epoch: int = 0  # the newest that a worker may have given it
    sent: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    number: int = 0  # of the message to its worker; set by the batch stage
    told: int | None = None  # the position that its client heard last; set by the batch stage

    @property
    def rank(self) -> int:
        return PRIORITIES.index(self.job.priority)

    def __lt__(self, other: Waiting) -> bool:
        return self.sequence < other.sequence


class Lanes:
    """`ageing` is how many seconds of waiting are worth a priority; None: no waiting is."""

    def __init__(self, ageing: float | None) -> None:
        self._ageing = ageing
        self._lanes: tuple[list[Waiting], ...] = tuple([] for _ in PRIORITIES)  # heaps

    def push(self, place: Waiting) -> None:
        heapq.heappush(self._lanes[place.rank], place)

    def remove(self, place: Waiting) -> None:
        """Forget a job, if it is still there."""
        lane = self._lanes[place.rank]
        if place in lane:
            lane.remove(place)
            heapq.heapify(lane)

    def pop(self, place: Waiting) -> None:
        """Take away the first job of its lane."""
        assert heapq.heappop(self._lanes[place.rank]) is place

    def heads(self, now: float) -> list[Waiting]:
        """The first job of each lane, whose turn it is first; those that have been settled are forgotten."""
        for lane in self._lanes:
            while lane and lane[0].sent.done():
                heapq.heappop(lane)
        return sorted(
            (lane[0] for lane in self._lanes if lane), key=lambda place: (self._urgency(place, now), place.rank)
        )

    def __iter__(self) -> Iterator[Waiting]:
        """All jobs, in order of priority and place: what positions are counted by."""
        for lane in self._lanes:
            yield from sorted(lane)

    def __bool__(self) -> bool:
        return any(self._lanes)

    def _urgency(self, place: Waiting, now: float) -> int:
        return place.rank - int(max(0.0, now - place.job.created) / self._ageing) if self._ageing else place.rank

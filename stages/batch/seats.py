"""The seats of one worker, as a copy of the batch stage counts them.

Messages are numbered: one that arrives twice, late or at another worker changes no count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from ...schemas.jobs import ValidatedJob
from ...schemas.registry import Room, WorkerCard
from .scheduling import Candidate
from .usage import TenantUsage


@dataclass(slots=True)
class Sent:
    """A message that a worker has not reported as received. `sequence` is its number in INFER, once it is stored."""

    seats: int
    tenant: str = ""
    cost: int = 0  # as usage.cost_of
    sequence: int = 0
    since: float = 0.0  # loop time
    is_missed: bool = False  # it is in INFER no more; set by Workers.heal


class Seats:
    """What one worker's process has room for, and which of it is taken by messages on their way there.

    Conservation: `sent` = `arrived` + `lost` + those in flight, counted in messages.
    """

    def __init__(self, room: Room, numbers: Iterator[int] | None = None) -> None:
        """`numbers` are those of the sender: of no two messages the same, whatever became of the worker between."""
        self.room = room  # set by hear
        self.usage: TenantUsage | None = None  # of its model; set by Workers.living
        self.in_flight: dict[int, Sent] = {}  # by number
        self.sent = self.arrived = self.lost = 0  # messages
        self.on_the_way = 0  # seats of those in flight; set by send and _remove
        self.changed: Callable[[bool], None] = lambda resized: None  # called after each change; set by Fleet
        self._numbers = numbers or count(1)
        self._newest = 0

    def send(self, seats: int, now: float, tenant: str = "", cost: int = 0) -> int:
        """Take seats for a message; returns its number."""
        if self.usage is not None:
            self.usage.send(tenant, cost)
        self._newest = next(self._numbers)
        self.sent += 1
        self.in_flight[self._newest] = Sent(seats, tenant, cost, since=now)
        self.on_the_way += seats
        self.changed(False)
        return self._newest

    def lose(self, number: int) -> None:
        """A message will never arrive: its seats are free again."""
        if number in self.in_flight:
            self._remove(number)
            self.lost += 1
            self.changed(False)

    def hear(self, room: Room, sender: str) -> None:
        resized = room.total_tokens != self.room.total_tokens
        self.room = room
        if self.usage is not None:
            self.usage.hear(room)
        for number in self.in_flight.keys() & set(room.received.get(sender, ())):
            self._remove(number)
            self.arrived += 1
        self.changed(resized)

    def close(self) -> None:
        """The process is gone, and with it all that was on its way there."""
        if self.usage is not None:
            self.usage.forget(self.room.worker)
        for number in list(self.in_flight):
            self.lose(number)

    def _remove(self, number: int) -> None:
        sent = self.in_flight.pop(number)
        self.on_the_way -= sent.seats
        if self.usage is not None:
            self.usage.arrive(sent.tenant, sent.cost)

    @property
    def oldest(self) -> int:
        """The lowest number that the worker has not acknowledged."""
        return min(self.in_flight, default=self._newest + 1)

    @property
    def has_any(self) -> bool:
        """Whether a seat is free, for whomever."""
        return max(self.room.free, self.room.free_high) > self.on_the_way

    def free_for(self, job: ValidatedJob) -> int:
        """Seats for jobs of this priority that are still free."""
        free = self.room.free_high if job.priority == "high" else self.room.free
        return free - self.on_the_way

    def candidate(self, card: WorkerCard) -> Candidate:
        room = self.room
        return Candidate(card.id, room.active + self.on_the_way, room.free_tokens, room.total_tokens, room.incarnation)

    def by_tenant(self) -> Counter[str]:
        """The seats of each tenant, those on their way among them."""
        taken = Counter(self.room.tenants)
        for one in self.in_flight.values():
            taken[one.tenant] += one.seats
        return taken

    def check_integrity(self) -> None:
        assert self.sent == self.arrived + self.lost + len(self.in_flight), "messages to a worker are not conserved"
        assert self.on_the_way == sum(one.seats for one in self.in_flight.values()), "seats in flight are miscounted"
        assert all(one.seats > 0 for one in self.in_flight.values()), "a message in flight has no seats"

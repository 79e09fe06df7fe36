"""The batch stage's picture of the workers: which live, and how many more requests each takes from this copy.

A worker reports its free seats and which messages it has received. Messages that it has not reported as received count
as in flight, so a copy never sends more than fits. Messages are numbered: one that arrives twice, late or at another
worker changes no count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import structlog
from pydantic import ValidationError

from ...schemas.jobs import ValidatedJob
from ...schemas.registry import InFlight, Room, WorkerCard
from ...streams.port import Message
from ...streams.stores.registry import Registry
from .scheduling import Candidate
from .usage import TenantUsage

log = structlog.get_logger(__name__)


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
        self._numbers = numbers or count(1)
        self._newest = 0

    def send(self, seats: int, now: float, tenant: str = "", cost: int = 0) -> int:
        """Take seats for a message; returns its number."""
        if self.usage is not None:
            self.usage.send(tenant, cost)
        self._newest = next(self._numbers)
        self.sent += 1
        self.in_flight[self._newest] = Sent(seats, tenant, cost, since=now)
        return self._newest

    def lose(self, number: int) -> None:
        """A message will never arrive: its seats are free again."""
        if number in self.in_flight:
            self._remove(number)
            self.lost += 1

    def hear(self, room: Room, sender: str) -> None:
        self.room = room
        if self.usage is not None:
            self.usage.hear(room)
        for number in self.in_flight.keys() & set(room.received.get(sender, ())):
            self._remove(number)
            self.arrived += 1

    def close(self) -> None:
        """The process is gone, and with it all that was on its way there."""
        if self.usage is not None:
            self.usage.forget(self.room.worker)
        for number in list(self.in_flight):
            self.lose(number)

    def _remove(self, number: int) -> None:
        sent = self.in_flight.pop(number)
        if self.usage is not None:
            self.usage.arrive(sent.tenant, sent.cost)

    @property
    def oldest(self) -> int:
        """The lowest number that the worker has not acknowledged."""
        return min(self.in_flight, default=self._newest + 1)

    @property
    def on_the_way(self) -> int:
        return sum(one.seats for one in self.in_flight.values())

    def taken_by(self, tenant: str) -> int:
        """The seats of a tenant, those on their way among them."""
        on_the_way = sum(one.seats for one in self.in_flight.values() if one.tenant == tenant)
        return self.room.tenants.get(tenant, 0) + on_the_way

    def check_integrity(self) -> None:
        assert self.sent == self.arrived + self.lost + len(self.in_flight), "messages to a worker are not conserved"
        assert all(one.seats > 0 for one in self.in_flight.values()), "a message in flight has no seats"


class Workers:
    """`copy` names this copy of the batch stage in what workers count."""

    def __init__(self, registry: Registry, copy: str, weights: Mapping[str, float] | None = None) -> None:
        """`weights` are those of tenants."""
        self.copy = copy
        self._weights = weights
        self._usage: dict[tuple[str, int], TenantUsage] = {}  # by model and revision
        self._registry = registry
        self._seats: dict[str, Seats] = {}
        self._numbers = count(1)

    def hear(self, message: Message) -> bool:
        """Take a report of free seats; returns whether the registry knows its worker."""
        try:
            room = Room.model_validate_json(message.data)
        except ValidationError:
            log.warning("a worker's message cannot be read", subject=message.subject)
            return True
        seats = self._seats.get(room.worker)
        if seats is None or seats.room.incarnation != room.incarnation:
            if seats is not None:
                seats.close()
            seats = self._seats[room.worker] = Seats(room, self._numbers)
        seats.hear(room, self.copy)
        return any(card.incarnation == room.incarnation for card in self._registry.workers)

    def living(self, model: str, revision: int) -> list[tuple[WorkerCard, Seats]]:
        """Live workers of this revision of `model` that have reported their free seats."""
        cards = self._registry.workers_for(model, revision)
        for name in self._seats.keys() - {card.id for card in self._registry.workers}:
            self._seats.pop(name).close()
        pairs = [(card, self._seats.get(card.id)) for card in cards]
        found = [(card, seats) for card, seats in pairs if seats and seats.room.incarnation == card.incarnation]
        for _, seats in found:
            if seats.usage is None:
                seats.usage = self.usage_of(model, revision)
                seats.usage.hear(seats.room)
        return found

    def usage_of(self, model: str, revision: int) -> TenantUsage:
        """What tenants have had of a model."""
        usage = self._usage.get((model, revision))
        if usage is None:
            usage = self._usage[model, revision] = TenantUsage(self._weights)
        return usage

    def forget(self, model: str, revision: int) -> None:
        """The model, or this revision, has been removed."""
        self._usage.pop((model, revision), None)

    def room(self, seats: Seats, job: ValidatedJob) -> int:
        """Seats for jobs of this priority that are still free there."""
        free = seats.room.free_high if job.priority == "high" else seats.room.free
        return free - seats.on_the_way

    def candidate(self, card: WorkerCard, seats: Seats) -> Candidate:
        return Candidate(card.id, seats.room.active + seats.on_the_way, seats.room.free_tokens)

    @property
    def in_flight(self) -> InFlight:
        return InFlight(sender=self.copy, seats={name: seats.on_the_way for name, seats in self._seats.items()})

    async def heal(self, patience: float, stored: Callable[[str], Awaitable[set[int]]]) -> None:
        """Free the seats of messages that were sent more than `patience` seconds ago and will never arrive.

        `stored` gives the sequences that INFER holds for a worker. A message that is no longer there was settled, by
        the worker or by the one that took over; if the worker has not reported it by the next call, it never will.
        """
        now = asyncio.get_running_loop().time()
        for name, seats in list(self._seats.items()):
            stays = [(number, one) for number, one in seats.in_flight.items() if now - one.since > patience]
            overdue = [(number, one) for number, one in stays if one.sequence]
            there = await stored(name) if overdue else set()
            for number, one in overdue:
                if one.is_missed:
                    log.warning("message settled by another process; its seats are free again", worker=name)
                    seats.lose(number)
                one.is_missed = one.sequence not in there

    def check_integrity(self) -> None:
        """The laws of conservation; raises `AssertionError`."""
        for seats in self._seats.values():
            seats.check_integrity()

"""The batch stage's picture of the workers: which live, and how many more requests each takes from this copy.

A worker reports its free seats and which messages it has received. Messages that it has not reported as received count
as in flight, so a copy never sends more than fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

import structlog
from pydantic import ValidationError

from ...schemas.registry import InFlight, Room, WorkerCard
from ...streams.port import Message
from ...streams.stores.registry import Registry
from .fleet import Fleet
from .seats import Seats
from .usage import TenantUsage

log = structlog.get_logger(__name__)


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
        self._cards: tuple[WorkerCard, ...] | None = None  # that the three below are of; set by _follow
        self._incarnations: frozenset[str] = frozenset()
        self._fleets: dict[tuple[str, int], Fleet] = {}  # by model and revision
        self._strangers: set[str] = set()  # who reported before the registry knew them, since it was last read

    def hear(self, message: Message) -> bool:
        """Take a report of free seats; returns whether the registry knows its worker."""
        try:
            room = Room.model_validate_json(message.data)
        except ValidationError:
            log.warning("a worker's message cannot be read", subject=message.subject)
            return True
        self._follow()
        seats = self._seats.get(room.worker)
        if seats is None or seats.room.incarnation != room.incarnation:
            if seats is not None:
                seats.close()
            seats = self._seats[room.worker] = Seats(room, self._numbers)
            self._fleets.clear()
        seats.hear(room, self.copy)
        is_known = room.incarnation in self._incarnations
        if not is_known:
            self._strangers.add(room.worker)
        return is_known

    def living(self, model: str, revision: int) -> Fleet:
        """Live workers of this revision of `model` that have reported their free seats."""
        self._follow()
        fleet = self._fleets.get((model, revision))
        if fleet is None:
            cards = self._registry.workers_for(model, revision)
            pairs = [(card, self._seats.get(card.id)) for card in cards]
            found = [(card, seats) for card, seats in pairs if seats and seats.room.incarnation == card.incarnation]
            fleet = self._fleets[model, revision] = Fleet(found)
            for _, seats in found:
                if seats.usage is None:
                    seats.usage = self.usage_of(model, revision)
                    seats.usage.hear(seats.room)
        return fleet

    def _follow(self) -> None:
        """Look at who lives, if the registry has read that since.

        A worker that begins may report its seats before a reading has its card: what it said holds until the next one.
        """
        if self._cards is not self._registry.workers:
            self._cards = self._registry.workers
            self._incarnations = frozenset(card.incarnation for card in self._cards)
            self._fleets.clear()
            for name in self._seats.keys() - {card.id for card in self._cards} - self._strangers:
                self._seats.pop(name).close()
            self._strangers.clear()

    def usage_of(self, model: str, revision: int) -> TenantUsage:
        """What tenants have had of a model."""
        usage = self._usage.get((model, revision))
        if usage is None:
            usage = self._usage[model, revision] = TenantUsage(self._weights)
        return usage

    def forget(self, model: str, revision: int) -> None:
        """The model, or this revision, has been removed."""
        self._usage.pop((model, revision), None)

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

"""The batch stage's picture of the workers: who lives, and how many more requests each takes from this copy.

A worker says how much room it has and what it has received; what a copy has sent and the worker has not yet counted is
on its way. So no copy sends more than there is room for, however late a message comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from pydantic import ValidationError

from ..schemas.jobs import ValidatedJob
from ..schemas.registry import Room, WorkerCard
from ..streams.port import Message
from ..streams.registry import Registry
from .scheduling import Candidate

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Seats:
    """What one worker's process has room for."""

    room: Room  # set by Workers.hear
    sent: int = 0  # taken by what went there from this copy; set by the batch stage


class Workers:
    """`copy` names this copy of the batch stage in what workers count."""

    def __init__(self, registry: Registry, copy: str) -> None:
        self.copy = copy
        self._registry = registry
        self._seats: dict[str, Seats] = {}

    def hear(self, message: Message) -> None:
        try:
            room = Room.model_validate_json(message.data)
        except ValidationError:
            log.warning("a worker's message cannot be read", subject=message.subject)
            return
        seats = self._seats.get(room.worker)
        if seats is None or seats.room.incarnation != room.incarnation:
            self._seats[room.worker] = Seats(room, sent=room.received.get(self.copy, 0))
        else:
            seats.room = room

    def living(self, model: str) -> list[tuple[WorkerCard, Seats]]:
        """Those that serve `model`, beat, and have told their room."""
        cards = self._registry.workers_for(model)
        for name in self._seats.keys() - {card.id for card in self._registry.workers}:
            del self._seats[name]
        pairs = [(card, self._seats.get(card.id)) for card in cards]
        return [(card, seats) for card, seats in pairs if seats and seats.room.incarnation == card.incarnation]

    def room(self, seats: Seats, job: ValidatedJob) -> int:
        """Seats for jobs of this priority that are still free there."""
        free = seats.room.free_high if job.priority == "high" else seats.room.free
        return free - self._on_the_way(seats)

    def candidate(self, card: WorkerCard, seats: Seats) -> Candidate:
        return Candidate(card.id, seats.room.active + self._on_the_way(seats), seats.room.free_tokens)

    def _on_the_way(self, seats: Seats) -> int:
        return seats.sent - seats.room.received.get(self.copy, 0)

"""Reads what the broker holds after the load of `penstock bench chaos`, for the judge: streams, dead letters, seats."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping

from ....config.settings import Settings
from ....schemas.canaries import CANARY
from ....schemas.errors import Transient
from ....schemas.loops import root_of
from ....schemas.registry import InFlight, Room
from ....streams.lanes import present_lanes
from ....streams.port import DEAD_REASON, DEAD_SUBJECT, Broker, Message
from ....streams.stores.registry import Registry
from ....streams.topology import DEAD, EVENTS, PRIORITIES, STREAM, Subjects, batch_stream, topology
from ..load import clock
from .judge import Broken, events_of, judge, outputs_of

IDLE_LIMIT = 60.0  # seconds after which messages left in a queue count as stuck
POLL = 0.2
FRESH = 5.0  # seconds after which a copy that publishes nothing counts as dead

Verdict = dict[str, list[Broken]]  # by request, or by whatever else is at fault


class Evidence:
    """`texts` given to `verdict` are what clients got, by the name of the request and choice; None where unknown."""

    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._streams = topology(settings.namespace, settings.job_stages).streams

    async def verdict(self, texts: Mapping[str, Mapping[int, str] | None]) -> Verdict:
        """Every law that what is stored breaks. Call it when all requests have ended."""
        found: Verdict = {}
        await self._idle(found)
        events, outputs = await self._by_request(EVENTS), await self._by_request(STREAM)
        for request in events.keys() | texts.keys():
            broken = judge(
                events_of(request, events[request]), outputs_of(request, outputs[request]), texts.get(request)
            )
            if root_of(request) not in texts:
                broken.append(
                    Broken("every request has a client", "no client asked for it, or one got it under another name")
                )
            if broken:
                found[request] = broken
        for message in await self._all(DEAD):
            why = {name: message.headers.get(name, "") for name in (DEAD_SUBJECT, DEAD_REASON)}
            found.setdefault("dead letters", []).append(Broken("no dead letters", f"{message.subject}: {why}"))
        return found

    async def _idle(self, found: Verdict) -> None:
        """Wait until the work queues are empty, and note which do not become so."""
        queues = [spec.name for spec in self._streams if spec.retention == "work_queue"]
        for lanes in await present_lanes(self._broker):
            queues += [batch_stream(lanes, priority) for priority in PRIORITIES]
        left: dict[str, Mapping[str, int]] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_LIMIT):
                while left := {name: held for name in queues if (held := await self._held(name))}:  # noqa: ASYNC110
                    await asyncio.sleep(POLL)
        for name, held in left.items():
            found[f"stream {name}"] = [Broken("queues are empty when idle", f"{held}")]

    async def _held(self, name: str) -> Mapping[str, int]:
        return (await self._broker.held(name)).by_subject

    async def _all(self, name: str) -> list[Message]:
        (spec,) = [spec for spec in self._streams if spec.name == name]
        return [message for subject in spec.subjects for message in await self._broker.replay(name, subject)]

    async def _by_request(self, name: str) -> defaultdict[str, list[Message]]:
        """The messages of a stream, by the last token of their subject, without those of canaries."""
        found: defaultdict[str, list[Message]] = defaultdict(list)
        for message in await self._all(name):
            if f".{CANARY}." not in message.subject:
                found[message.subject.rpartition(".")[2]].append(message)
        return found


class Rooms:
    """What workers publish of their free seats, and copies of the batch stage of requests sent. Made by `heard`."""

    def __init__(self, registry: Registry) -> None:
        self.peaks: dict[str, int] = {}  # most seats taken at once, by worker, since the caller cleared it
        self._registry = registry
        self._newest: dict[str, Room] = {}  # by worker; set by _hear
        self._in_flight: dict[str, tuple[float, InFlight]] = {}  # by sender, with when; set by _hear_sender

    @classmethod
    @contextlib.asynccontextmanager
    async def heard(cls, broker: Broker, subjects: Subjects, registry: Registry) -> AsyncIterator[Rooms]:
        """Listen until the end of the block."""
        rooms = cls(registry)
        listening = [
            await broker.listen(subjects.room_all(), rooms._hear),
            await broker.listen(subjects.in_flight_all(), rooms._hear_sender),
        ]
        try:
            yield rooms
        finally:
            for one in listening:
                await one.close()

    @property
    def seats(self) -> int:
        """Of all living workers, for requests that are not of high priority."""
        return sum(card.capacity for card in self._registry.workers)

    @property
    def never_taken(self) -> int:
        """Seats of living workers above what was taken at once."""
        return sum(max(0, card.capacity - self.peaks.get(card.id, 0)) for card in self._registry.workers)

    async def at_rest(self) -> list[Broken]:
        """Wait until all idle workers have all their seats free; returns what is wrong after `IDLE_LIMIT`."""
        broken: list[Broken] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_LIMIT):
                while broken := await self._taken():  # noqa: ASYNC110
                    await asyncio.sleep(POLL)
        return broken

    async def _taken(self) -> list[Broken]:
        with contextlib.suppress(Transient):
            await self._registry.refresh()
        found = []
        for card in self._registry.workers:
            room = self._newest.get(card.id)
            if room is None or room.incarnation != card.incarnation:
                found.append(Broken("workers publish their free seats", f"{card.id} has not"))
            elif room.active or room.free != card.capacity:
                detail = f"{card.id}: {room.active} active, {room.free} free of {card.capacity}"
                found.append(Broken("an idle worker has all its seats free", detail))
        for when, word in self._in_flight.values():
            if clock() - when < FRESH and (seats := {name: count for name, count in word.seats.items() if count}):
                found.append(Broken("what was sent has arrived", f"batch stage {word.sender}: {seats}"))
        return found or ([] if self._registry.workers else [Broken("workers are alive", "none is")])

    def _hear(self, message: Message) -> None:
        room = Room.model_validate_json(message.data)
        self._newest[room.worker] = room
        self.peaks[room.worker] = max(self.peaks.get(room.worker, 0), room.active)

    def _hear_sender(self, message: Message) -> None:
        word = InFlight.model_validate_json(message.data)
        self._in_flight[word.sender] = clock(), word

"""How much more a worker takes: counted as requests come and go, and told to the batch stage."""

from __future__ import annotations

import asyncio
from collections import Counter

from ...engine import InferenceEngine
from ...schemas.jobs import ValidatedJob
from ...schemas.registry import Room, WorkerCard, reserve_of
from ..contract import Pipe
from ..degradation import Slots, slots
from .arrivals import Arrivals
from .request_metrics import WorkerMetrics

_PAUSE = 0.0005  # least seconds between two reports


class FreeRoom:
    def __init__(self, pipe: Pipe, engine: InferenceEngine, card: WorkerCard, metrics: WorkerMetrics) -> None:
        self.arrivals = Arrivals()  # set by Infer
        self.active = Counter[str]()  # seats that are taken, by tenant; set by arrive and depart
        self.is_leaving = False  # set by Infer
        self._pipe = pipe
        self._engine = engine
        self._card = card
        self._metrics = metrics
        self._free_reported = 0  # seats last reported free that no job has taken yet; set by report
        self._has_news = asyncio.Event()

    def arrive(self, job: ValidatedJob) -> None:
        seats = self._card.seats_of(job)
        self._metrics.seats_received.inc(seats)
        self._metrics.served.add(job.tenant, job.prompt_tokens)
        self._metrics.active.inc()
        self.active[job.tenant] += seats
        self._free_reported -= seats

    def depart(self, job: ValidatedJob, _: asyncio.Task[None] | None = None) -> None:
        self._metrics.active.dec()
        self.active[job.tenant] -= self._card.seats_of(job)
        if not self.active[job.tenant]:
            del self.active[job.tenant]
        if self._free_reported <= self._card.capacity // 2 or not self.active:
            self._has_news.set()

    def tell(self) -> None:
        """Report it soon."""
        self._has_news.set()

    async def report(self) -> None:
        """Report it when few seats are left, when idle, and with each heartbeat, since a report can be lost."""
        subject = self._pipe.subjects.room(self._card.id)
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            room = self.now()
            self._free_reported = room.free
            await self._pipe.broker.notify(subject, room.model_dump_json().encode())
            await asyncio.sleep(_PAUSE)

    def now(self) -> Room:
        cache = self._engine.stats().cache
        pressure = cache.usage if cache else 0.0
        free = self.free(pressure)
        return Room(
            worker=self._card.id,
            incarnation=self._card.incarnation,
            free=free.others,
            free_high=free.high,
            received=self.arrivals.numbers,
            active=self.active.total(),
            free_tokens=round(cache.num_tokens * (1 - pressure)) if cache else 1 << 30,
            total_tokens=cache.num_tokens if cache else 0,
            tenants=dict(self.active),
            served=self._metrics.served.recent(),
        )

    def free(self, pressure: float) -> Slots:
        """What is left for more requests, with so much of the cache in use."""
        size = self._card.capacity
        return Slots(0, 0) if self.is_leaving else slots(pressure, size, reserve_of(size)).less(self.active.total())

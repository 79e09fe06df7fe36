"""Reclaims the batches of workers that have died, so that other workers take them over.

A worker that ends withdraws its card and finishes what it has begun; one whose card has expired is dead. From then on
the consumer of either is shared: messages that it had not started are delivered at once, started ones when their leases
expire. If it is alive after all, readers ignore its outputs, because its epochs are older. For a worker on this host
the operating system tells at once that it has died, and its leases end.
"""

from __future__ import annotations

import asyncio

import structlog

from ...config.process import host
from ...config.watched import until_one_ends
from ...schemas.errors import NotYet
from ...schemas.jobs import InferenceBatch
from ...schemas.registry import RETURNED, WorkerCard
from ...streams.beats import until_beat
from ...streams.outages import outage_logged
from ...streams.port import Consumer
from ...streams.stores.registry import Registry
from ...streams.topology import CONSUMER_IDLE, INFER, LEASES
from ..contract import Intake, Pipe
from ..visits import CURRENT, Visit

log = structlog.get_logger(__name__)

POLL = 0.1  # seconds between two looks at who is back


class Reclaimer:
    """Runs in every copy of the batch stage; the broker decides which copy gets a message."""

    def __init__(self, pipe: Pipe, intake: Intake) -> None:
        self._pipe = pipe
        self._intake = intake
        self._held: dict[str, Consumer] = {}  # by dead worker
        self._outages = pipe.broker.outages
        self._trusted = 0.0  # loop time from which a missing card means a death; set by _look

    async def run(self) -> None:
        while True:
            await self._pause()
            with outage_logged("batches of dead workers cannot be reclaimed"):
                await self._look()

    async def _pause(self) -> None:
        """Return after a heartbeat, or as soon as one more worker is known to have died, or one is back."""
        registry, clock = self._pipe.registry, asyncio.get_running_loop().time
        until = clock() + until_beat(self._pipe.settings.heartbeat_interval)
        known = {card.incarnation for card in registry.ended.values()}
        while (left := until - clock()) > 0 and not {card.incarnation for card in registry.ended.values()} - known:
            ours = [card.pid for card in registry.workers if card.host == host()]
            await until_one_ends(ours, min(left, POLL) if self._held else left)
            registry.drop_ended()
            if self._held.keys() & {card.id for card in registry.workers}:
                return

    async def _look(self) -> None:
        now, outages = asyncio.get_running_loop().time(), self._pipe.broker.outages
        if outages != self._outages:
            # No worker could renew its card: each gets a card's life to do so.
            self._outages, self._trusted = outages, now + self._pipe.settings.worker_ttl
        held = await self._pipe.broker.held(INFER)
        if not self._pipe.broker.connected:
            return
        ended = dict(self._pipe.registry.ended)
        living = {card.id for card in self._pipe.registry.workers}
        left = {subject.rpartition(".")[2] for subject in held.by_subject} - living
        gone = left if now >= self._trusted else left & ended.keys()
        registry, found = self._pipe.registry, gone - self._held.keys()
        if found:  # one may have said that it ends since the registry was read
            await registry.refresh()
        for worker in found:
            if worker in registry.leaving and worker not in registry.ended:
                log.info("a worker is ending, others take what it has not begun", worker=worker)
            elif worker != RETURNED:
                log.warning("a worker is gone, others take over its requests", worker=worker)
            name, subject = f"infer-{worker}", self._pipe.subjects.infer(worker)
            if worker in ended and await self._is_ours(ended[worker]):
                await self._pipe.broker.forget(INFER, name)  # and its leases with it
            self._held[worker] = await self._intake.consume(INFER, name, subject, idle_limit=CONSUMER_IDLE)
        for worker in self._held.keys() - left:
            await self._held.pop(worker).close()  # the next process of this name may have opened the same consumer

    async def _is_ours(self, card: WorkerCard) -> bool:
        """Whether this copy ends the worker's leases: a second copy doing so would end the first one's."""
        bucket = await self._pipe.broker.bucket(LEASES)
        return await bucket.create(f"ended.{card.incarnation}", b"") is not None


def check_lost(batch: InferenceBatch, registry: Registry) -> None:
    """Raises `NotYet` for a batch that was sent to a process which lives, and is to have it, although messages of its
    name are still taken back."""
    if any((card.id, card.incarnation) == (batch.worker, batch.incarnation) for card in registry.workers):
        raise NotYet(POLL)


def visit_after(worker: str, registry: Registry) -> Visit | None:
    """The current visit, which tells that the worker has given the batch back to stop, or was lost with it."""
    visit = CURRENT.get()
    has_left = worker in registry.leaving and worker not in registry.ended
    return visit and visit.noting(**{"returned" if has_left else "lost": worker})

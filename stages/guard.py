"""Takes back the batches of workers that have died, so that others go on with them.

A worker whose card has run out is dead. Its consumer is shared from then on: what it had not begun comes at once, what
it had in hand when its leases run out. Should it live after all, it is fenced off by the epochs of its successors.
"""

from __future__ import annotations

import asyncio

import structlog

from ..schemas.errors import Transient
from ..streams.port import Consumer
from ..streams.topology import CONSUMER_IDLE, INFER
from .contract import Intake, Pipe

log = structlog.get_logger(__name__)


class Guard:
    def __init__(self, pipe: Pipe, intake: Intake) -> None:
        self._pipe = pipe
        self._intake = intake
        self._held: dict[str, Consumer] = {}  # by dead worker
        self._outages = pipe.broker.outages
        self._trusted = 0.0  # loop time from which a card that is missing tells something; set by _look

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._pipe.settings.heartbeat_interval)
            try:
                await self._look()
            except Transient as error:
                log.warning("cannot look after dead workers", reason=str(error))

    async def _look(self) -> None:
        now, outages = asyncio.get_running_loop().time(), self._pipe.broker.outages
        if outages != self._outages:
            # Nobody could say that he lives: all get as long as a card does.
            self._outages, self._trusted = outages, now + self._pipe.settings.worker_ttl
        held = await self._pipe.broker.held(INFER)
        if now < self._trusted or not self._pipe.broker.connected:
            return
        living = {card.id for card in self._pipe.registry.workers}
        left = {subject.rpartition(".")[2] for subject in held.by_subject} - living
        for worker in left - self._held.keys():
            log.warning("a worker is gone; its batches go to others", worker=worker)
            name, subject = f"infer-{worker}", self._pipe.subjects.infer(worker)
            self._held[worker] = await self._intake.consume(INFER, name, subject, idle_limit=CONSUMER_IDLE)
        for worker in self._held.keys() - left:
            await self._held.pop(worker).close()
            if worker not in living:
                await self._pipe.broker.forget(INFER, f"infer-{worker}")

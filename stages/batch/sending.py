"""Publishes the jobs of a batch to their worker, each in a message of its own."""

from __future__ import annotations

import asyncio
import math
import uuid

import structlog

from ...config import metrics
from ...schemas.errors import StreamFull
from ...schemas.jobs import InferenceBatch
from ...schemas.registry import WorkerCard
from ...schemas.wire import codec
from ...streams.port import SCHEMA
from ..contract import Pipe
from ..visits import Dispatch
from .lanes import Waiting
from .seats import Seats

_SILENCE = 60.0  # seconds, at least, between two warnings that too many requests run

log = structlog.get_logger(__name__)


class Sender:
    def __init__(self, pipe: Pipe, copy: str) -> None:
        """`copy` names this copy of the stage to workers."""
        self._pipe = pipe
        self._copy = copy
        self._told = -math.inf  # loop time of the last warning that INFER is full

    async def send(self, worker: WorkerCard, seats: Seats, chosen: list[Waiting]) -> list[Waiting]:
        """Publish the jobs and settle their deliveries, for good or bad; returns those for which INFER has no room."""
        id, oldest, size = uuid.uuid4().hex, seats.oldest, len(chosen)
        dispatch = Dispatch(self._pipe.tracer, worker.id)
        sending = [self._send_one(id, worker, seats, waiting, oldest, size, dispatch) for waiting in chosen]
        if size == 1:  # a task takes a turn of the event loop
            left = [await sending[0]]
        else:
            left = await asyncio.gather(*sending)
        sent = [waiting for waiting, remains in zip(chosen, left, strict=True) if not remains]
        if sent:
            metrics.BATCH_SIZE.observe(len(sent))
            metrics.SEATS_SENT.inc(sum(worker.seats_of(waiting.job) for waiting in sent))
            dispatch.end()
        return [waiting for waiting, remains in zip(chosen, left, strict=True) if remains]

    async def _send_one(
        self,
        id: str,
        worker: WorkerCard,
        seats: Seats,
        waiting: Waiting,
        oldest: int,
        size: int,
        dispatch: Dispatch,
    ) -> bool:
        """Whether the job still waits, because INFER is full."""
        batch = InferenceBatch(
            id=id,
            worker=worker.id,
            jobs=(waiting.job,),
            incarnation=worker.incarnation,
            epochs=(waiting.epoch,),
            sender=self._copy,
            number=waiting.number,
            oldest=oldest,
        )
        subject, name = self._pipe.subjects.infer(worker.id), f"{waiting.job.tenant}.{waiting.job.id}.{id}"
        headers = {SCHEMA: codec.BATCH, **waiting.headers(self._pipe.now(), worker.id, size)}
        try:
            stored = await self._pipe.broker.publish(subject, codec.encode(batch), message_id=name, headers=headers)
        except Exception as error:
            seats.lose(waiting.number)
            if isinstance(error, StreamFull) and not error.storage:
                self._note(error)
                return not waiting.sent.done()
            if not waiting.sent.done():
                waiting.sent.set_exception(error)
            return False
        if (sent := seats.in_flight.get(waiting.number)) is not None:  # else the worker was faster
            sent.sequence = stored.sequence
        if not waiting.sent.done():
            dispatch.sent(waiting.visit)
            waiting.sent.set_result(True)
        return False

    def _note(self, error: StreamFull) -> None:
        """Now and then: it may be full most of the time."""
        now = asyncio.get_running_loop().time()
        if now - self._told >= _SILENCE:
            self._told = now
            hint = "workers have room, but infer_limit lets no more requests run; raise it"
            log.warning("too many requests run", reason=str(error), hint=hint)

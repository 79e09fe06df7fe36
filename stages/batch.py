"""batch: takes jobs high before normal before low, first in first out inside each, and gives them to workers together.

A job waits here until a worker serves its model; its delivery stays open meanwhile, so a copy that dies loses nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import uuid
from collections import defaultdict
from dataclasses import dataclass

from ..schemas import codec
from ..schemas.errors import DeadlineExceeded
from ..schemas.jobs import InferenceBatch, ValidatedJob
from ..schemas.registry import WorkerCard
from ..streams.port import SCHEMA, Delivery
from ..streams.topology import PRIORITIES
from .contract import Intake, JobStage, Pipe
from .scheduling import RoundRobin, Strategy

POLL = 0.1  # seconds between looks at the registry while jobs wait for a worker
ENVELOPE = 4096  # bytes of a message that are not jobs


@dataclass(slots=True, eq=False)
class Waiting:
    """A job and the promise to its delivery; ordered by lane, then by place in it."""

    rank: int
    sequence: int
    job: ValidatedJob
    size: int  # bytes on the wire
    sent: asyncio.Future[bool]  # False: cancelled before it was

    def __lt__(self, other: Waiting) -> bool:
        return (self.rank, self.sequence) < (other.rank, other.sequence)


class Batch(JobStage):
    """Validated jobs in, `InferenceBatch`es out to `infer.<worker>`.

    Jobs that arrive within `batch_window` of the first go together, at most `max_batch_size` to a batch.
    """

    name = "batch"
    concurrency = 4096

    def __init__(self, pipe: Pipe, strategy: Strategy | None = None) -> None:
        super().__init__(pipe)
        self._strategy = strategy or RoundRobin()
        self._waiting: dict[str, list[Waiting]] = defaultdict(list)  # model → heap
        self._arrived = asyncio.Event()

    async def run(self, intake: Intake) -> None:
        for priority in PRIORITIES:
            stream = f"BATCH_{priority.upper()}"
            await intake.consume(stream, f"batch-{priority}", self.pipe.subjects.batch_all(priority))
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await asyncio.sleep(self.pipe.settings.batch_window)
            for model in [model for model, heap in self._waiting.items() if heap]:
                await self._dispatch(model)
            if any(self._waiting.values()):
                asyncio.get_running_loop().call_later(POLL, self._arrived.set)

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        job = codec.decode_model(ValidatedJob, message.data, message.headers.get(SCHEMA))
        if await self.is_over(job):
            return
        sent = asyncio.get_running_loop().create_future()
        place = Waiting(PRIORITIES.index(job.priority), message.sequence, job, len(message.data), sent)
        heapq.heappush(self._waiting[job.model], place)
        self._arrived.set()
        try:
            with self.pipe.cancellations.calling(job.id, lambda: None if sent.done() else sent.set_result(False)):
                if not await sent:
                    await self.is_over(job)
        finally:
            if place in self._waiting[job.model]:  # it ended here: cancelled, expired or drained
                self._waiting[job.model].remove(place)
                heapq.heapify(self._waiting[job.model])

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        return job

    async def _dispatch(self, model: str) -> None:
        heap = self._waiting[model]
        while heap and (workers := self.pipe.registry.workers_for(model)):
            worker = self._strategy.pick(workers)
            if chosen := self._take(heap, worker):
                await self._send(worker, chosen)
        for place in heap:
            if place.job.deadline <= self.pipe.now() and not place.sent.done():
                place.sent.set_exception(DeadlineExceeded("No worker took the request before its deadline."))

    def _take(self, heap: list[Waiting], worker: WorkerCard) -> list[Waiting]:
        """The first jobs in line, as many as the batch and one message can hold, but at least one."""
        most = min(self.pipe.settings.max_batch_size, worker.capacity)
        room = self.pipe.broker.max_payload - ENVELOPE
        chosen: list[Waiting] = []
        while heap and len(chosen) < most and (not chosen or heap[0].size <= room):
            place = heapq.heappop(heap)
            if not place.sent.done():
                room -= place.size
                chosen.append(place)
        return chosen

    async def _send(self, worker: WorkerCard, chosen: list[Waiting]) -> None:
        """Publish the batch and settle its jobs' deliveries, for good or bad."""
        batch = InferenceBatch(id=uuid.uuid4().hex, worker=worker.id, jobs=tuple(place.job for place in chosen))
        try:
            await self.pipe.broker.publish(
                self.pipe.subjects.infer(worker.id),
                codec.encode(batch),
                message_id=batch.id,
                headers={SCHEMA: codec.BATCH},
            )
        except Exception as error:
            for place in chosen:
                if not place.sent.done():
                    place.sent.set_exception(error)
            return
        for place in chosen:
            if not place.sent.done():
                place.sent.set_result(True)

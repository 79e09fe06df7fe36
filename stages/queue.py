"""queue: admission. A job that gets past here has its place in the lane of its priority, and its client is told so.

Every copy watches the lanes and says what they take; bridges hear it and refuse the rest before any work is spent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from ..schemas import codec
from ..schemas.errors import STORE_FULL, Overloaded, QuotaExceeded, StorageFull, StreamFull
from ..schemas.events import Accepted, Cancelled, Queued, Usage
from ..schemas.jobs import Priority, ValidatedJob
from ..schemas.loops import root_of
from ..schemas.registry import Admission
from ..streams.outages import outage_logged
from ..streams.port import Delivery
from ..streams.topology import EVENTS, PRIORITIES, batch_stream
from .admission import Warden
from .contract import Intake, JobStage, Pipe

log = structlog.get_logger(__name__)

_LEAST_WAIT = 1.0  # seconds; an estimate below is no reason to refuse
MOST_PLACES = 30_000  # of jobs in a lane that are remembered, to be deleted when they are cancelled


class _Place(NamedTuple):
    """Where a job waits, and what its client hears if it is taken out there."""

    priority: Priority
    sequence: int
    cancelled: Cancelled
    tenant: str
    bridge: str


class Queue(JobStage):
    """Validated jobs in, the priority lanes out."""

    name = "queue"
    interval = 0.25  # seconds between two looks at the lanes, unless one fills up before

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        settings = pipe.settings
        low = settings.low_watermark * settings.high_watermark
        self._warden = Warden(settings.queue_limit, low, settings.high_watermark, settings.default_timeout)
        self._gone: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)  # had left each lane; set by _look
        self._is_due = asyncio.Event()  # a look
        # By lane, and by tenant and request, the oldest first.
        self._places: dict[Priority, OrderedDict[tuple[str, str], _Place]] = {
            priority: OrderedDict() for priority in PRIORITIES
        }

    async def run(self, intake: Intake) -> None:
        await super().run(intake)
        async with asyncio.TaskGroup() as group:

            def cancelled(tenant: str, request: str) -> None:
                for lane in self._places.values():
                    if place := lane.pop((tenant, request), None):
                        group.create_task(self._take_out(place))

            self.pipe.cancellations.watch(cancelled)
            while True:
                self._is_due.clear()
                with outage_logged("lanes cannot be read"):
                    await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.interval):
                        await self._is_due.wait()

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        return job

    async def pass_on(self, job: ValidatedJob, route: Sequence[str], delivery: Delivery) -> None:
        now = self._warden.last
        retry_after = now.retry_after[job.priority]
        if delivery.attempt == 1:  # else it may have its place already, and only the acknowledgement was lost
            if not now.accepting[job.priority]:
                raise Overloaded(f"The {job.priority} queue is full.", code="queue_full", retry_after=retry_after)
            if (wait := self._warden.wait(job.priority)) > max(_LEAST_WAIT, job.deadline - self.pipe.now()):
                raise Overloaded(
                    f"The request would wait about {math.ceil(wait)} s, past its deadline.",
                    code="queue_full",
                    retry_after=retry_after,
                )
        try:
            stored = await self.pipe.forward(job, route, delivery)
        except StreamFull as error:
            if error.storage:
                raise StorageFull(STORE_FULL) from None
            if error.per_subject:
                raise QuotaExceeded(
                    f"Too many requests of {job.tenant} wait already.", retry_after=retry_after
                ) from None
            raise Overloaded(f"The {job.priority} queue is full.", code="queue_full", retry_after=retry_after) from None
        if stored.sequence - self._gone[job.priority] >= self._warden.full[job.priority]:
            self._is_due.set()  # what comes until the next regular look would be validated in vain
        cancelled = Cancelled(job.id, Usage(job.prompt_tokens, 0, job.prompt_tokens))
        lane = self._places[job.priority]
        lane[job.tenant, root_of(job.id)] = _Place(job.priority, stored.sequence, cancelled, job.tenant, job.bridge)
        if len(lane) > MOST_PLACES:
            lane.popitem(last=False)
        prompts = job.prompts if job.body.get("return_token_ids") is True else ()
        accepted = Accepted(job.id, job.model, int(job.created), job.prompt_tokens, prompts)
        await self.pipe.emit(accepted, tenant=job.tenant, bridge=job.bridge, place="accepted")

    async def _look(self) -> None:
        """Measure the lanes and tell what they take."""
        depth: dict[Priority, int] = {}
        for priority in PRIORITIES:
            held = await self.pipe.broker.held(batch_stream(priority))
            depth[priority] = held.messages
            gone = self._gone[priority] = held.last - held.messages
            lane = self._places[priority]
            while lane and next(iter(lane.values())).sequence <= gone:  # lanes are left at the front
                lane.popitem(last=False)
        # The gates are in the broker: a copy goes on from where all of them were left, and only one changes them.
        state = await self.pipe.broker.bucket("state")
        entry = await state.get("admission")
        before = Admission.model_validate_json(entry.value).accepting if entry else dict.fromkeys(PRIORITIES, True)
        self._warden.adopt(before)
        admission = self._warden.update(asyncio.get_running_loop().time(), depth, self._gone)
        data = admission.model_dump_json().encode()
        if admission.accepting != before:
            revision = entry.revision if entry else None
            if (
                await (state.update("admission", data, revision) if revision else state.create("admission", data))
                is None
            ):
                self._warden.adopt(before)  # another copy was faster: the next look begins with what it decided
                self._is_due.set()
                return
            log.info("what the queue takes has changed", accepting=admission.accepting, depth=depth)
        await self.pipe.broker.notify(self.pipe.subjects.admission(), data)

    async def _take_out(self, place: _Place) -> None:
        """End a cancelled job and delete it from its lane, unless a worker has begun with it."""
        subject = self.pipe.subjects.events(place.tenant, place.bridge, place.cancelled.request)
        with outage_logged("cancelled job stays until its turn"):
            newest = await self.pipe.broker.last(EVENTS, subject)
            if newest is None or isinstance(codec.decode_event(newest.data), Accepted | Queued):
                # Its end is stored first: whoever dies in between leaves nobody waiting.
                await self.pipe.emit(
                    place.cancelled, tenant=place.tenant, bridge=place.bridge, place="end", priority=place.priority
                )
                await self.pipe.broker.delete(batch_stream(place.priority), place.sequence)

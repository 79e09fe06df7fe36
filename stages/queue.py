"""queue: admission. A job that it accepts waits in the lane of its priority, and its client gets `accepted`.

Every copy measures the lanes and publishes which priorities are accepted; bridges refuse the rest before any work.
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
from .admission import AdmissionControl
from .contract import Intake, JobStage, Pipe

log = structlog.get_logger(__name__)

_LEAST_WAIT = 1.0  # seconds; an estimate below is no reason to refuse
MOST_REMEMBERED = 30_000  # of jobs in a lane that are remembered, to be deleted when they are cancelled


class _LanePosition(NamedTuple):
    """Where a job waits, and the event that its client gets if it is cancelled there."""

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
        self._control = AdmissionControl(settings.queue_limit, low, settings.high_watermark, settings.default_timeout)
        self._gone: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)  # had left each lane; set by _update_admission
        self._is_due = asyncio.Event()  # a look
        # By lane, and by tenant and request, the oldest first.
        self._positions: dict[Priority, OrderedDict[tuple[str, str], _LanePosition]] = {
            priority: OrderedDict() for priority in PRIORITIES
        }

    async def run(self, intake: Intake) -> None:
        await super().run(intake)
        async with asyncio.TaskGroup() as group:

            def cancelled(tenant: str, request: str) -> None:
                for lane in self._positions.values():
                    if position := lane.pop((tenant, request), None):
                        group.create_task(self._take_out(position))

            self.pipe.cancellations.watch(cancelled)
            while True:
                self._is_due.clear()
                with outage_logged("lanes cannot be read"):
                    await self._update_admission()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.interval):
                        await self._is_due.wait()

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        return job

    async def pass_on(self, job: ValidatedJob, route: Sequence[str], delivery: Delivery) -> None:
        now = self._control.last
        retry_after = now.retry_after[job.priority]
        if delivery.attempt == 1:  # otherwise it may be queued already, and only the acknowledgement was lost
            if not now.accepting[job.priority]:
                raise Overloaded(f"The {job.priority} queue is full.", code="queue_full", retry_after=retry_after)
            if (wait := self._control.wait(job.priority)) > max(_LEAST_WAIT, job.deadline - self.pipe.now()):
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
        if stored.sequence - self._gone[job.priority] >= self._control.full[job.priority]:
            self._is_due.set()  # jobs until the next regular update would be validated in vain
        cancelled = Cancelled(job.id, Usage(job.prompt_tokens, 0, job.prompt_tokens))
        lane = self._positions[job.priority]
        lane[job.tenant, root_of(job.id)] = _LanePosition(
            job.priority, stored.sequence, cancelled, job.tenant, job.bridge
        )
        if len(lane) > MOST_REMEMBERED:
            lane.popitem(last=False)
        prompts = job.prompts if job.body.get("return_token_ids") is True else ()
        accepted = Accepted(job.id, job.model, int(job.created), job.prompt_tokens, prompts)
        await self.pipe.emit(accepted, tenant=job.tenant, bridge=job.bridge, key="accepted")

    async def _update_admission(self) -> None:
        """Measure the lanes and publish which priorities are accepted."""
        depth: dict[Priority, int] = {}
        for priority in PRIORITIES:
            held = await self.pipe.broker.held(batch_stream(priority))
            depth[priority] = held.messages
            gone = self._gone[priority] = held.last - held.messages
            lane = self._positions[priority]
            while lane and next(iter(lane.values())).sequence <= gone:  # lanes are left at the front
                lane.popitem(last=False)
        # The gates' state is in the broker: copies start from it, and one of them changes it.
        state = await self.pipe.broker.bucket("state")
        entry = await state.get("admission")
        before = Admission.model_validate_json(entry.value).accepting if entry else dict.fromkeys(PRIORITIES, True)
        self._control.adopt(before)
        admission = self._control.update(asyncio.get_running_loop().time(), depth, self._gone)
        data = admission.model_dump_json().encode()
        if admission.accepting != before:
            revision = entry.revision if entry else None
            if (
                await (state.update("admission", data, revision) if revision else state.create("admission", data))
                is None
            ):
                self._control.adopt(before)  # another copy was faster: the next update starts from its decision
                self._is_due.set()
                return
            log.info("admission changed", accepting=admission.accepting, depth=depth)
        await self.pipe.broker.notify(self.pipe.subjects.admission(), data)

    async def _take_out(self, position: _LanePosition) -> None:
        """End a cancelled job and delete it from its lane, unless a worker has begun with it."""
        subject = self.pipe.subjects.events(position.tenant, position.bridge, position.cancelled.request)
        with outage_logged("cancelled job stays until its turn"):
            newest = await self.pipe.broker.last(EVENTS, subject)
            if newest is None or isinstance(codec.decode_event(newest.data), Accepted | Queued):
                # The final event is stored first: a crash in between leaves no client waiting.
                await self.pipe.emit(
                    position.cancelled,
                    tenant=position.tenant,
                    bridge=position.bridge,
                    key="end",
                    priority=position.priority,
                )
                await self.pipe.broker.delete(batch_stream(position.priority), position.sequence)

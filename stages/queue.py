"""queue: admission. A job that gets past here has its place in the lane of its priority, and its client is told so."""

from __future__ import annotations

from collections.abc import Sequence

from ..schemas.errors import Overloaded, StreamFull
from ..schemas.events import Accepted
from ..schemas.jobs import ValidatedJob
from ..streams.port import Delivery
from .contract import JobStage


class Queue(JobStage):
    """Validated jobs in, the priority lanes out. The lanes' limits are the backpressure: full means 503."""

    name = "queue"

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        return job

    async def pass_on(self, job: ValidatedJob, route: Sequence[str], delivery: Delivery) -> None:
        try:
            await self.pipe.forward(job, route, delivery)
        except StreamFull:
            raise Overloaded(f"The {job.priority} queue is full.", code="queue_full", retry_after=1.0) from None
        accepted = Accepted(job.id, job.model, int(job.created), job.prompt_tokens)
        await self.pipe.emit(accepted, tenant=job.tenant, bridge=job.bridge, place="accepted")

"""One shape for every stage: `run` opens what it consumes, `handle` settles one delivery.

`handle` returns when everything the message caused is stored; then, and only then, the runner acknowledges it. To end
a request it raises a `Refusal`, to try again later a `Transient`; anything else is retried and at last becomes a dead
letter. A stage knows neither acknowledgements, leases nor retries: those are the runner's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import structlog

from ..config.settings import Settings
from ..schemas import codec
from ..schemas.errors import BrokerUnavailable, DeadlineExceeded, Transient
from ..schemas.events import FINAL, Cancelled, Event, Usage
from ..schemas.jobs import ValidatedJob
from ..schemas.loops import Step, TurnId
from ..streams.port import DEADLINE, NEXT, SCHEMA, TRACE_PARENT, Broker, Consumer, Delivery, Headers, Published
from ..streams.registry import Registry
from ..streams.topology import Subjects, partition
from .cancellations import Cancellations
from .transcript import Transcript

log = structlog.get_logger(__name__)

OUTAGE_PAUSE = 0.2  # seconds between tries while the broker refuses


class Intake(Protocol):
    """The runner, as a stage sees it."""

    async def consume(self, stream: str, name: str, subject: str, *, takeover: bool = False) -> Consumer:
        """Feed deliveries of this consumer to the stage's `handle` until the consumer is closed."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """What every stage works with: the broker, and the pipeline's ways of publishing."""

    broker: Broker
    subjects: Subjects
    settings: Settings
    registry: Registry
    cancellations: Cancellations
    now: Callable[[], float] = time.time  # Unix seconds: deadlines are absolute

    async def forward(self, job: ValidatedJob, route: Sequence[str], delivery: Delivery) -> Published:
        """Send a job to the first subject of `route` and the rest of the route with it; returns where it is stored.

        The request's id is the message id, once in every stream, so that a redelivery changes nothing.
        """
        headers = {SCHEMA: codec.VALIDATED_JOB, DEADLINE: f"{job.deadline:.3f}", NEXT: " ".join(route[1:])}
        if trace := delivery.message.headers.get(TRACE_PARENT):
            headers[TRACE_PARENT] = trace
        return await self.broker.publish(route[0], codec.encode(job), message_id=job.id, headers=headers)

    def outputs_of(self, request: str) -> str:
        """The subject of a request's outputs."""
        return self.subjects.stream(partition(request, self.settings.stream_partitions), request)

    async def transcript(self, request: str) -> Transcript:
        """What workers have said of a request so far; an outage of the broker is waited out."""
        while True:
            try:
                return Transcript.of(await self.broker.replay("STREAM", self.outputs_of(request)))
            except BrokerUnavailable as error:
                log.warning("the broker is away; a request waits for what was said of it", reason=str(error))
                await asyncio.sleep(OUTAGE_PAUSE)

    async def emit(self, event: Event, *, tenant: str, bridge: str, place: str) -> None:
        """Store a client event, however long the broker is away; returns when it is stored.

        `place` names the event within its request, and makes a repetition harmless. The end of a response's turn is
        told to the stage tools as well.
        """
        request = event.request
        subject = self.subjects.events(tenant, bridge, request)
        await self.store(subject, codec.encode(event), f"{request}.{place}", codec.EVENT)
        if isinstance(event, FINAL) and (turn := TurnId.of(request)):
            step = Step(id=turn.response, turn=request, tenant=tenant, bridge=bridge)
            await self.store(self.subjects.tools(tenant), codec.encode(step), f"{request}.{place}", codec.STEP)

    async def store(
        self, subject: str, data: bytes, message_id: str, schema: str, headers: Headers | None = None
    ) -> Published:
        """Publish what must not be skipped: an outage of the broker, or of its disk, is waited out."""
        while True:
            try:
                return await self.broker.publish(
                    subject, data, message_id=message_id, headers={**(headers or {}), SCHEMA: schema}
                )
            except Transient as error:
                log.warning("the broker does not take it; a message waits", subject=subject, reason=str(error))
                await asyncio.sleep(OUTAGE_PAUSE)


class Stage(ABC):
    """Base of every stage.

    A consumer takes no more while `concurrency` of its deliveries are in `handle`; it holds up to `prefetch` more in
    reserve, whose lease nobody renews, so that is small where deliveries stay long.
    """

    name: ClassVar[str]
    concurrency: int = 64
    prefetch: int = 64

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.copy = uuid.uuid4().hex[:8]  # by which this one is known among its like

    @property
    def ready(self) -> bool:
        """Whether a delivery would be handled without a long preparation first."""
        return True

    @property
    def lease(self) -> float:
        """Seconds without a sign of life after which another copy gets what this one has in hand."""
        return self.pipe.settings.lease

    @abstractmethod
    async def run(self, intake: Intake) -> None:
        """Open consumers and do what must go on beside the deliveries. Returns, or runs until cancelled."""

    @abstractmethod
    async def handle(self, delivery: Delivery) -> None:
        """Do this message's work, and return when its effects are stored."""

    async def leave(self) -> None:  # noqa: B027  # most stages have nobody to tell
        """The drain begins: tell whoever sends work to send it elsewhere."""

    def alive(self) -> bool:
        """Whether work in hand gets on; while it does not, leases are not renewed. Asked a few times a lease."""
        return True


class JobStage(Stage):
    """A stage that takes one validated job and passes one on: the base for custom stages.

    Override `process`. Return the job, changed or not; raise `InvalidRequest` (or another `Refusal`) to refuse it.
    """

    async def run(self, intake: Intake) -> None:
        await intake.consume(f"STAGE_{self.name}", self.name, self.pipe.subjects.stage_all(self.name))

    async def handle(self, delivery: Delivery) -> None:
        headers = delivery.message.headers
        job = codec.decode_model(ValidatedJob, delivery.message.data, headers.get(SCHEMA))
        if await self.is_over(job):
            return
        route = headers[NEXT].split()
        await self.pass_on(await self.process(job), route, delivery)

    async def is_over(self, job: ValidatedJob) -> bool:
        """True if the client cancelled. Raises `DeadlineExceeded` past the deadline."""
        if job.id in self.pipe.cancellations:
            cancelled = Cancelled(job.id, Usage(job.prompt_tokens, 0, job.prompt_tokens))
            await self.pipe.emit(cancelled, tenant=job.tenant, bridge=job.bridge, place="end")
            return True
        if job.deadline <= self.pipe.now():
            raise DeadlineExceeded(f"The request waited past its deadline, in the stage {self.name}.")
        return False

    @abstractmethod
    async def process(self, job: ValidatedJob) -> ValidatedJob:
        """Do the stage's work on one job."""

    async def pass_on(self, job: ValidatedJob, route: Sequence[str], delivery: Delivery) -> None:
        await self.pipe.forward(job, route, delivery)

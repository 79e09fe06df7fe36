"""One shape for every stage: `run` opens what it consumes, `handle` settles one delivery.

`handle` returns when everything the message caused is stored; then, and only then, the runner acknowledges it. To end
a request it raises a `Refusal`, to try again later a `Transient`; anything else is retried and at last becomes a dead
letter. A stage knows neither acknowledgements, leases nor retries: those are the runner's.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

from opentelemetry.trace import Tracer

from ..config.settings import Settings
from ..schemas.canaries import CANARY
from ..schemas.errors import DeadlineExceeded, GenerationFailed, StageFailed, Superseded
from ..schemas.events import FINAL, Accepted, Cancelled, Event, Queued, Token, Usage
from ..schemas.jobs import Job, Priority, ValidatedJob
from ..schemas.loops import Step, TurnId
from ..schemas.wire import codec
from ..streams.lanes import check_fits
from ..streams.outages import through_outages
from ..streams.port import (
    DEADLINE,
    NEXT,
    SCHEMA,
    TRACE_PARENT,
    Broker,
    Consumer,
    Delivery,
    Headers,
    Message,
    Published,
)
from ..streams.stores.rates import RateLedger
from ..streams.stores.registry import Registry
from ..streams.topology import Subjects, partition, stage_stream
from .cancellations import Cancellations
from .custom.job_changes import body_marks, check_changes
from .failures import is_cancelled
from .outcomes import count_outcome
from .trail import Trail
from .transcript import Transcript
from .visits import headers_until

SETTLED = 5.0  # seconds after which a start is over, and what only some requests need is loaded ahead of them
LEAST_TRAILS = 30_000  # that are kept; one that is forgotten and needed again is read


class Intake(Protocol):
    """The runner, as a stage sees it."""

    async def consume(
        self, stream: str, name: str, subject: str, *, takeover: bool = False, idle_limit: float = 0.0
    ) -> Consumer:
        """Feed deliveries of this consumer to the stage's `handle` until the consumer is closed."""

    async def consume_lanes(self, stream: str, name: str, subjects: Callable[[Priority], str]) -> None:
        """Feed those of the three lanes of `stream`, which share the stage: high before normal before low."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """What every stage works with: the broker, and the pipeline's ways of publishing."""

    broker: Broker
    subjects: Subjects
    settings: Settings
    registry: Registry
    cancellations: Cancellations
    now: Callable[[], float] = time.time  # Unix seconds: deadlines are absolute
    tracer: Tracer | None = None  # None while tracing is off
    rates: RateLedger | None = field(init=False)  # None while no tenant has a limit
    trails: OrderedDict[str, Trail] = field(default_factory=OrderedDict)  # by subject, the least recently used first

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", RateLedger.of(self.broker, self.subjects, self.settings))

    async def forward(
        self, job: ValidatedJob, route: Sequence[str], delivery: Delivery, *, as_it_came: bool = False
    ) -> Published:
        """Send a job to the first subject of `route` and the rest of the route with it; returns where it is stored. One
        that goes on `as_it_came` with the delivery needs no other encoding, if it came from this release.

        The request's id is the message id in every stream, so that a redelivery mostly costs nothing; what must not
        happen twice is fenced further on. Raises as `encoded` does.
        """
        headers = {SCHEMA: codec.VALIDATED_JOB, DEADLINE: f"{job.deadline:.3f}", NEXT: " ".join(route[1:])}
        if trace := delivery.message.headers.get(TRACE_PARENT):
            headers[TRACE_PARENT] = trace
        headers |= headers_until(self.now())
        message = delivery.message
        is_encoded = as_it_came and message.headers.get(SCHEMA) == codec.VALIDATED_JOB
        data = message.data if is_encoded else codec.encode(job)
        check_fits(len(data), self.settings)
        return await self.broker.publish(route[0], data, message_id=f"{job.tenant}.{job.id}", headers=headers)

    def encoded(self, job: Job | ValidatedJob) -> bytes:
        """Raises `PayloadTooLarge` for a job that no queue could hold."""
        data = codec.encode(job)
        check_fits(len(data), self.settings)
        return data

    def outputs_of(self, tenant: str, request: str) -> str:
        """The subject of a request's outputs."""
        return self.subjects.stream(partition(tenant, request, self.settings.stream_partitions), tenant, request)

    async def transcript(self, tenant: str, request: str) -> Transcript:
        """A request's outputs so far; waits through an outage of the broker."""
        subject = self.outputs_of(tenant, request)
        return Transcript.of(await through_outages(lambda: self.broker.replay("STREAM", subject), subject))

    async def open(self, accepted: Accepted, *, tenant: str, bridge: str) -> None:
        """Store what comes first, unless something of the request is stored.

        The stage queue passes a job on before it says so: another stage may be faster.
        """
        subject = self.subjects.events(tenant, bridge, accepted.request)
        if (trail := self.trails.get(subject)) is None:
            trail = self.trails[subject] = await self._trail(subject)
        if not trail.last:
            await self.emit(accepted, tenant=tenant, bridge=bridge, key="accepted")

    async def emit(
        self,
        event: Event,
        *,
        tenant: str,
        bridge: str,
        key: str,
        priority: Priority = "normal",
        notes: Mapping[str, object] | None = None,
    ) -> bool:
        """Store a client event, unless it is stored already, however long the broker is away.

        Returns whether the request is over. `key` names the event within its request. Nothing is stored behind a
        final event, and the end of a response's turn is told to the stage tools as well, in the lane of its `priority`:
        also by whoever finds that it is over, as the process that stored the end may have died before it told.
        Events other than tokens and positions have a header of hops, whose last one has the `notes`.
        """
        request = event.request
        subject, name = self.subjects.events(tenant, bridge, request), f"{tenant}.{request}.{key}"
        headers = {} if isinstance(event, Token | Queued) else headers_until(self.now(), **(notes or {}))
        is_over = await self._add(event, subject, name, headers, counts=tenant != CANARY)
        if is_over and (turn := TurnId.of(request)):
            step = Step(id=turn.response, turn=request, tenant=tenant, bridge=bridge)
            own = {TRACE_PARENT: headers[TRACE_PARENT]} if TRACE_PARENT in headers else None
            told = f"{tenant}.{request}.end"
            await self.store(self.subjects.tools(priority, tenant), codec.encode(step), told, codec.STEP, own)
        return is_over

    async def _add(self, event: Event, subject: str, name: str, headers: Headers, *, counts: bool) -> bool:
        """Store an event behind the last one of its request, unless it is stored already; `counts` for the metrics.

        Returns whether the request has ended.
        """
        trail = self.trails.get(subject)
        if trail is None:
            trail = Trail() if isinstance(event, Accepted) else await self._trail(subject)  # the first, most likely
        while trail.lacks(event):
            try:
                stored = await self.store(subject, codec.encode(event), name, codec.EVENT, headers, trail.last)
            except Superseded:
                known, trail = trail, await self._trail(subject)
                trail.merge(known)
            else:
                if stored.duplicate:  # and pushed out since, perhaps: there is nothing at its sequence to be behind
                    trail.add(event, 0)
                    known, trail = trail, await self._trail(subject)
                    trail.merge(known)
                else:
                    trail.add(event, stored.sequence)
                    if counts and isinstance(event, FINAL):
                        count_outcome(event)
                break
        else:
            if trail.overlaps(event):
                raise GenerationFailed("Part of the answer is no longer stored; send the request again.")
        self.trails[subject] = trail
        self.trails.move_to_end(subject)
        if len(self.trails) > max(LEAST_TRAILS, 3 * self.settings.infer_limit):
            self.trails.popitem(last=False)
        return trail.over

    async def _trail(self, subject: str) -> Trail:
        newest = await through_outages(lambda: self.broker.last("EVENTS", subject), subject)
        if newest is None:
            return Trail()
        if isinstance(codec.decode_event(newest.data), Accepted):  # nothing was said before
            return Trail.of([newest])
        return Trail.of(await through_outages(lambda: self.broker.replay("EVENTS", subject), subject))

    async def store(
        self,
        subject: str,
        data: bytes,
        message_id: str,
        schema: str,
        headers: Headers | None = None,
        expect: int | None = None,
    ) -> Published:
        """Publish what must not be skipped: an outage of the broker, or of its disk, is waited out.

        Raises `Superseded` where the last message on the subject is not the one of sequence `expect`.
        """
        headers = {**(headers or {}), SCHEMA: schema}
        publish = partial(self.broker.publish, subject, data, message_id=message_id, headers=headers, expect=expect)
        return await through_outages(publish, subject)


class Stage(ABC):
    """Base of every stage.

    A consumer takes no more while `concurrency` of its deliveries are in `handle` (of three lanes, those of all
    together); it holds up to `prefetch` more in reserve, whose lease nobody renews, so that is small where deliveries
    stay long.
    """

    name: ClassVar[str]
    is_brief: ClassVar[bool] = True  # `handle` waits for nobody but the broker
    is_traced: ClassVar[bool] = True  # each delivery has a span
    outwaits_elections: ClassVar[bool] = True  # a lease does; not where it costs little to do the work twice
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
        settings = self.pipe.settings
        return max(settings.lease, settings.failover) if self.outwaits_elections else settings.lease

    @property
    def most_unsettled(self) -> int:
        """Deliveries of one consumer that may be unsettled in all copies together; at least twice `concurrency`."""
        return 0

    @abstractmethod
    async def run(self, intake: Intake) -> None:
        """Open consumers and do what must go on beside the deliveries. Returns, or runs until cancelled."""

    @abstractmethod
    async def handle(self, delivery: Delivery) -> None:
        """Do this message's work, and return when its effects are stored."""

    async def leave(self) -> None:  # noqa: B027  # most stages have nobody to tell
        """The drain begins: tell whoever sends work to send it elsewhere."""

    def sets_aside(self, delivery: Delivery) -> bool:
        """Whether the stage keeps a delivery unseen, because others go first: it renews and gives it back itself."""
        return False

    def gives_turns(self, message: Message) -> bool:
        """Whether messages of its lane come again because others go first, and not because something failed."""
        return False

    def alive(self) -> bool:
        """Whether work in hand gets on; while it does not, leases are not renewed. Asked a few times a lease."""
        return True


class JobStage(Stage):
    """A stage that takes one validated job and passes one on: the base for custom stages.

    Override `process`. Return the job, changed or not; raise `InvalidRequest` (or another `Refusal`) to refuse it.
    """

    outwaits_elections = False

    async def run(self, intake: Intake) -> None:
        subjects = partial(self.pipe.subjects.stage_of, self.name)
        await intake.consume_lanes(stage_stream(self.name), self.name, subjects)

    async def handle(self, delivery: Delivery) -> None:
        headers = delivery.message.headers
        job = codec.decode_model(ValidatedJob, delivery.message.data, headers.get(SCHEMA))
        if await self.is_over(job):
            return
        route = headers[NEXT].split()
        try:
            async with asyncio.timeout(job.deadline - self.pipe.now()) as timer:
                processed = await self._processed(job)
        except TimeoutError:
            if timer.expired():
                raise DeadlineExceeded(f"The deadline passed while the stage {self.name} had the request.") from None
            raise
        await self.pass_on(processed, route, delivery)

    async def _processed(self, job: ValidatedJob) -> ValidatedJob:
        """What `process` makes of a job. Raises `StageFailed` for what no other stage could take for that job."""
        marks = body_marks(job.body)
        try:
            made: object = self.process(job)
            if not inspect.isawaitable(made):
                raise StageFailed("process is no coroutine function: define it with async def")
            found: object = await made
        except Exception:
            raise
        except BaseException as error:  # sys.exit(), for example, or somebody cancelled what it awaits
            if is_cancelled(error):
                raise
            raise StageFailed(f"process raised {type(error).__name__}").with_traceback(error.__traceback__) from None
        return await check_changes(job, marks, found, self.pipe.registry)

    async def is_over(self, job: ValidatedJob) -> bool:
        """True if the client cancelled. Raises `DeadlineExceeded` past the deadline."""
        if self.pipe.cancellations.include(job.tenant, job.id):
            said = await self._said(job)
            cancelled = Cancelled(job.id, Usage(job.prompt_tokens, said, job.prompt_tokens + said))
            await self.pipe.emit(cancelled, tenant=job.tenant, bridge=job.bridge, key="end", priority=job.priority)
            return True
        if job.deadline <= self.pipe.now():
            raise DeadlineExceeded(f"The request waited past its deadline, in the stage {self.name}.")
        return False

    async def _said(self, job: ValidatedJob) -> int:
        """How many tokens of the answer there are: none, before a worker has the job."""
        return 0

    @abstractmethod
    async def process(self, job: ValidatedJob) -> ValidatedJob:
        """Do the stage's work on one job."""

    async def pass_on(self, job: ValidatedJob, route: Sequence[str], delivery: Delivery) -> None:
        await self.pipe.forward(job, route, delivery)

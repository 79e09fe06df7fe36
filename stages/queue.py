"""queue: admission. A job that it accepts waits in the lane of its model and priority, and its client gets `accepted`.

Every copy measures the lanes and publishes what is accepted for each model; bridges refuse the rest before any work.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from ..config import metrics
from ..config.settings import Settings
from ..schemas.errors import STORE_FULL, Overloaded, QuotaExceeded, StorageFull, StreamFull
from ..schemas.events import Accepted, Cancelled, Queued, Usage
from ..schemas.jobs import Priority, ValidatedJob
from ..schemas.loops import root_of
from ..schemas.registry import Admission, ModelLanes
from ..schemas.wire import codec
from ..streams.lanes import are_open
from ..streams.outages import outage_logged
from ..streams.port import Delivery, Held
from ..streams.topology import EVENTS, PRIORITIES, batch_stream, lanes_of
from .admission import AdmissionControl
from .contract import Intake, JobStage, Pipe

log = structlog.get_logger(__name__)

_LEAST_WAIT = 1.0  # seconds; an estimate below is no reason to refuse
EVERYWHERE = 16  # looks at the busy lanes for each one at all of them
_TOO_MANY = "Too many requests of {} wait already."
MOST_REMEMBERED = 30_000  # of jobs in a lane that are remembered, to be deleted when they are cancelled


class _LanePosition(NamedTuple):
    """Where a job waits, and the event that its client gets if it is cancelled there."""

    stream: str
    priority: Priority
    sequence: int
    cancelled: Cancelled
    tenant: str
    bridge: str


class _ModelGate:
    """The lanes of one model, as this copy sees them."""

    def __init__(self, lanes: ModelLanes, settings: Settings) -> None:
        self.lanes = lanes
        self.key = lanes_of(lanes.model, lanes.revision)
        low = settings.low_watermark * settings.high_watermark
        self.control = AdmissionControl(settings.queue_limit, low, settings.high_watermark, settings.default_timeout)
        self.gone: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)  # had left each lane; set by measured
        self.is_quiet = False  # nothing waits, and nothing has come since the last look
        # By lane, and by tenant and request, the oldest first.
        self.positions: dict[Priority, OrderedDict[tuple[str, str], _LanePosition]] = {
            priority: OrderedDict() for priority in PRIORITIES
        }

    def stream(self, priority: Priority) -> str:
        return batch_stream(self.key, priority)

    def add(self, job: ValidatedJob, sequence: int) -> None:
        """Remember where a job waits."""
        cancelled = Cancelled(job.id, Usage(job.prompt_tokens, 0, job.prompt_tokens))
        lane = self.positions[job.priority]
        lane[job.tenant, root_of(job.id)] = _LanePosition(
            self.stream(job.priority), job.priority, sequence, cancelled, job.tenant, job.bridge
        )
        if len(lane) > MOST_REMEMBERED:
            lane.popitem(last=False)

    def measured(self, priority: Priority, held: Held) -> None:
        """Forget the jobs that have left a lane: they leave at the front."""
        gone = self.gone[priority] = held.last - held.messages
        lane = self.positions[priority]
        while lane and next(iter(lane.values())).sequence <= gone:
            lane.popitem(last=False)


class Queue(JobStage):
    """Validated jobs in, the lanes of their models out."""

    name = "queue"
    interval = 0.25  # seconds between two looks at the lanes, unless one fills up before

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self._gates: dict[str, _ModelGate] = {}  # by the token of the lanes
        self._looks = 0
        self._is_due = asyncio.Event()  # a look

    async def run(self, intake: Intake) -> None:
        await super().run(intake)
        async with asyncio.TaskGroup() as group:

            def cancelled(tenant: str, request: str) -> None:
                for gate in self._gates.values():
                    for lane in gate.positions.values():
                        if position := lane.pop((tenant, request), None):
                            group.create_task(self._take_out(position))

            self.pipe.cancellations.watch(cancelled)
            while True:
                self._is_due.clear()
                await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.interval):
                        await self._is_due.wait()

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        return job

    async def _processed(self, job: ValidatedJob) -> ValidatedJob:
        return job  # without the comparison that other people's stages need

    async def pass_on(self, job: ValidatedJob, route: Sequence[str], delivery: Delivery) -> None:
        gate = self._gate(ModelLanes(model=job.model, revision=job.revision))
        if delivery.attempt == 1:
            self._check_model(job, gate)
        now = gate.control.last
        retry_after = now.retry_after[job.priority]
        if delivery.attempt == 1:  # otherwise it may be queued already, and only the acknowledgement was lost
            # The stream of the lane has room for more where the limit was lowered while they waited.
            if gate.control.waiting(job.priority, job.tenant) > (self.pipe.settings.tenant_limit or math.inf):
                raise QuotaExceeded(_TOO_MANY.format(job.tenant), retry_after=retry_after)
            if not now.accepts(job.priority, job.tenant):
                raise Overloaded(f"The {job.priority} queue is full.", code="queue_full", retry_after=retry_after)
            if (wait := gate.control.wait(job.priority, job.tenant)) > max(_LEAST_WAIT, job.deadline - self.pipe.now()):
                raise Overloaded(
                    f"The request would wait about {math.ceil(wait)} s, past its deadline.",
                    code="queue_full",
                    retry_after=retry_after,
                )
        try:
            stored = await self.pipe.forward(job, route, delivery, as_it_came=True)
        except StreamFull as error:
            if error.storage:
                raise StorageFull(STORE_FULL) from None
            if error.per_subject:
                raise QuotaExceeded(_TOO_MANY.format(job.tenant), retry_after=retry_after) from None
            raise Overloaded(f"The {job.priority} queue is full.", code="queue_full", retry_after=retry_after) from None
        if gate.is_quiet:
            gate.is_quiet = False
            gate.control.resume(asyncio.get_running_loop().time())
        if stored.sequence - gate.gone[job.priority] >= gate.control.full[job.priority]:
            self._is_due.set()  # jobs until the next regular update would be validated in vain
        gate.add(job, stored.sequence)
        await self.pipe.emit(Accepted.of(job), tenant=job.tenant, bridge=job.bridge, key="accepted")

    def _check_model(self, job: ValidatedJob, gate: _ModelGate) -> None:
        """Raises `Overloaded` where the model cannot be loaded, or has enough waiting for it to be loaded."""
        registry = self.pipe.registry
        refusal = registry.refusals.get(gate.key)
        if refusal is not None and refusal.left(self.pipe.now()) > 0:
            raise refusal.error(self.pipe.now())
        card = registry.models.get(job.model)
        if card is None or card.queue_limit is None or registry.workers_for(job.model, job.revision):
            return
        waiting = max(sum(gate.control.last.depth.values()), sum(map(len, gate.positions.values())))
        if waiting >= card.queue_limit:
            raise Overloaded(
                f"{waiting} requests wait for the model {job.model!r} to be loaded; try again later.", retry_after=5.0
            )

    def _is_away(self, gate: _ModelGate) -> bool:
        """Whether the model has no worker until its turn comes: how it drains until then tells nothing of its speed."""
        registry, lanes = self.pipe.registry, gate.lanes
        card = registry.models.get(lanes.model)
        comes_on_demand = card is not None and (card.catalogued or card.name in registry.declared)
        return comes_on_demand and not registry.workers_for(lanes.model, lanes.revision)

    def _gate(self, lanes: ModelLanes) -> _ModelGate:
        key = lanes_of(lanes.model, lanes.revision)
        if (gate := self._gates.get(key)) is None:
            gate = self._gates[key] = _ModelGate(lanes, self.pipe.settings)
        return gate

    async def _look(self) -> None:
        """Measure the lanes and publish what is accepted: of all models now and then, else where something waits."""
        known = self.pipe.registry.lanes
        for key in self._gates.keys() - known.keys():
            if self._gates[key].is_quiet:
                del self._gates[key]
        for lanes in known.values():
            self._gate(lanes)
        everywhere = self._looks % EVERYWHERE == 0
        self._looks += 1
        looked_at = [gate for gate in self._gates.values() if everywhere or not gate.is_quiet]
        for gate in looked_at:
            with outage_logged("lanes cannot be read", model=gate.lanes.model):
                if await are_open(self.pipe.broker, gate.key):
                    await self._update_admission(gate)
                else:  # they were removed since the registry has looked
                    gate.is_quiet = True
        if looked_at:
            self._measure()

    def _measure(self) -> None:
        depth, accepting = Counter[tuple[str, Priority]](), dict[tuple[str, Priority], bool]()
        for gate in self._gates.values():
            model, last = gate.lanes.model, gate.control.last
            for priority in PRIORITIES:
                depth[model, priority] += last.depth.get(priority, 0)
                accepting[model, priority] = accepting.get((model, priority), True) and last.accepting[priority]
        metrics.QUEUE_DEPTH.clear()
        metrics.ACCEPTING.clear()
        for labels, number in depth.items():
            metrics.QUEUE_DEPTH.labels(*labels).set(number)
            metrics.ACCEPTING.labels(*labels).set(accepting[labels])

    async def _update_admission(self, gate: _ModelGate) -> None:
        depth: dict[Priority, int] = {}
        tenants: dict[Priority, Counter[str]] = {}
        before, gate.is_quiet = dict(gate.gone), True
        for priority in PRIORITIES:
            held = await self.pipe.broker.held(gate.stream(priority))
            depth[priority] = held.messages
            tenants[priority] = Counter()
            for subject, number in held.by_subject.items():
                tenants[priority][subject.rpartition(".")[2]] += number
            gate.measured(priority, held)
        # The gates' state is in the broker: copies start from it, and one of them changes it.
        state, key = await self.pipe.broker.bucket("state"), f"admission.{gate.key}"
        entry = await state.get(key)
        agreed = Admission.model_validate_json(entry.value).accepting if entry else dict.fromkeys(PRIORITIES, True)
        gate.control.adopt(agreed)
        now = asyncio.get_running_loop().time()
        if self._is_away(gate):
            gate.control.resume(now)
        admission = gate.control.update(now, depth, gate.gone, tenants).model_copy(
            update={"model": gate.lanes.model, "revision": gate.lanes.revision}
        )
        if any(depth.values()) or gate.gone != before or not all(admission.accepting.values()):
            gate.is_quiet = False
        data = admission.model_dump_json().encode()
        if admission.accepting != agreed:
            revision = entry.revision if entry else None
            if await (state.update(key, data, revision) if revision else state.create(key, data)) is None:
                gate.control.adopt(agreed)  # another copy was faster: the next update starts from its decision
                self._is_due.set()
                return
            log.info("admission changed", model=gate.lanes.model, accepting=admission.accepting, depth=depth)
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
                await self.pipe.broker.delete(position.stream, position.sequence)

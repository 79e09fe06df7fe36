"""batch: takes the jobs of each model high before normal before low, first in first out of each tenant, and gives them
to workers together.

A job waits here until a worker of its model has room; its delivery stays open meanwhile, so a copy that dies loses
nothing. Of each lane only the first few are in hand: the queue itself is the lane's stream.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from ...config import metrics
from ...schemas.canaries import CANARY
from ...schemas.errors import DeadlineExceeded, Overloaded, Refusal, Transient
from ...schemas.jobs import InferenceBatch, ValidatedJob
from ...schemas.registry import WorkerCard
from ...schemas.wire import codec
from ...streams.beats import until_beat
from ...streams.outages import outage_logged
from ...streams.port import SCHEMA, Delivery, Message
from ...streams.topology import lanes_of
from .. import endings
from ..contract import Intake, JobStage, Pipe
from ..visits import CURRENT
from .consuming import consume_lanes
from .dead_workers import Reclaimer, check_lost, visit_after
from .fleet import Fleet
from .lanes import Lanes, Waiting
from .news import WaitingNews
from .refusals import refuse_unloaded
from .scheduling import Strategy
from .seats import Seats
from .sending import Sender
from .shares import SeatShares
from .strategies import STRATEGIES
from .usage import cost_of
from .windows import LaneWindows
from .workers import Workers

log = structlog.get_logger(__name__)

TICK = 1.0  # seconds between two reports of positions to clients, and checks of silent workers
FULL_PAUSE = 0.1  # seconds until another try while too many requests run
LOOK_PAUSE = 0.1  # seconds; the least between two looks for workers that are not known
RESUMED = -(1 << 60)  # added to the sequences of jobs that ran already: they go before those that wait


class Batch(JobStage):
    """Validated jobs in, `InferenceBatch`es out to `infer.<worker>`.

    Jobs that arrive within `batch_window` of the first go together, at most `max_batch_size` to a batch.
    """

    name = "batch"
    is_brief = False
    outwaits_elections = True
    concurrency = 512  # of each lane

    def __init__(self, pipe: Pipe, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """`pause` waits for the end of a batching window, in seconds."""
        super().__init__(pipe)
        self._pause = pause
        self._strategy: Strategy = STRATEGIES[pipe.settings.scheduling]()
        self._lanes: dict[tuple[str, int], Lanes] = {}  # by model and revision
        self._windows = LaneWindows(pipe, self.concurrency, self.lease)
        self._news = WaitingNews(pipe)
        self._workers = Workers(pipe.registry, uuid.uuid4().hex[:12], pipe.settings.weights)
        self._sender = Sender(pipe, self._workers.copy)
        self._changed = asyncio.Event()  # a job has come, or room
        self._unknown = asyncio.Event()  # a worker that the registry does not know has reported its room
        self._leaving = False  # set by leave

    @property
    def most_unsettled(self) -> int:
        return self.pipe.settings.queue_limit + 2 * self.concurrency  # jobs that were given back count as well

    async def run(self, intake: Intake) -> None:
        subjects = self.pipe.subjects

        def hear(message: Message) -> None:
            if not self._workers.hear(message):
                self._unknown.set()
            self._changed.set()

        await self.pipe.broker.listen(subjects.room_all(), hear)
        await self.pipe.broker.listen(subjects.loading(), self._news.hear)
        async with asyncio.TaskGroup() as group:
            group.create_task(consume_lanes(self.pipe, intake))
            group.create_task(self._meet())
            group.create_task(Reclaimer(self.pipe, intake).run())
            group.create_task(self._tick())
            group.create_task(self._windows.run())
            while True:
                await self._changed.wait()
                self._changed.clear()
                if (window := self.pipe.settings.batch_window) > 0:
                    await self._pause(window)
                for key, lanes in list(self._lanes.items()):  # more may come meanwhile
                    while found := self._gather(key, lanes):
                        await self._send(lanes, *found)

    async def _meet(self) -> None:
        """Look for the card of a worker as soon as it reports its room: requests may be waiting for it."""
        while True:
            await self._unknown.wait()
            self._unknown.clear()
            with outage_logged("registry is stale"):
                await self.pipe.registry.look(LOOK_PAUSE)
            self._changed.set()

    async def leave(self) -> None:
        """What waits is another copy's from now on."""
        self._leaving = True
        for waiting in [waiting for lanes in self._lanes.values() for waiting in lanes if not waiting.sent.done()]:
            waiting.sent.set_exception(_leaving())
        await self._windows.leave()

    def sets_aside(self, delivery: Delivery) -> bool:
        message = delivery.message
        if self._leaving or codec.is_schema(message.headers.get(SCHEMA), codec.BATCH):
            return False
        return not self._windows.of(message.subject).admit(delivery, self.pipe.now())

    def gives_turns(self, message: Message) -> bool:
        return message.headers.get(SCHEMA) != codec.BATCH and self._windows.is_shared(message.subject)

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        if codec.is_schema(message.headers.get(SCHEMA), codec.BATCH):
            await self._take_back(delivery)
            return
        window = self._windows.of(message.subject)
        with window.holding(message) as place:
            job = codec.decode_model(ValidatedJob, message.data, message.headers.get(SCHEMA))
            waiting = Waiting(job, message.sequence, visit=CURRENT.get())
            if not await self.is_over(job):
                place.waiting = waiting
                await self._wait(waiting)

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        return job

    async def _take_back(self, delivery: Delivery) -> None:
        """Give the jobs of a dead worker to others, one by one, unless they had come to an end."""
        batch = codec.decode_model(InferenceBatch, delivery.message.data, codec.BATCH)
        check_lost(batch, self.pipe.registry)
        epochs = batch.epochs or (0,) * len(batch.jobs)
        sequence = RESUMED + delivery.message.sequence
        visit = visit_after(batch.worker, self.pipe.registry)
        try:
            async with asyncio.TaskGroup() as group:
                for job, epoch in zip(batch.jobs, epochs, strict=True):
                    group.create_task(self._resume(Waiting(job, sequence, epoch + delivery.attempt, visit=visit)))
        except* Transient as errors:
            raise Transient(str(errors.exceptions[0]), delay=0.1) from None

    async def _resume(self, waiting: Waiting) -> None:
        job = waiting.job
        try:
            if not (await self.pipe.transcript(job.tenant, job.id)).finished and not await self.is_over(job):
                with metrics.RETURNED.labels(job.model).track_inprogress():
                    await self._wait(waiting)
        except Refusal as refusal:
            event = endings.ending(job.id, refusal)
            await self.pipe.emit(event, tenant=job.tenant, bridge=job.bridge, key="end", priority=job.priority)

    async def _said(self, job: ValidatedJob) -> int:
        return (await self.pipe.transcript(job.tenant, job.id)).usage.completion_tokens

    async def _wait(self, waiting: Waiting) -> None:
        """Return when the job has been sent to a worker, or its client has cancelled and was told so."""
        job, sent = waiting.job, waiting.sent
        if self._leaving:
            raise _leaving()
        self._check_size(job, self._workers.living(job.model, job.revision))
        key = job.model, job.revision
        lanes = self._lanes.get(key)
        if lanes is None:
            settings = self.pipe.settings
            shares = SeatShares(settings.tenant_seats, settings.weights)
            lanes = self._lanes[key] = Lanes(settings.priority_ageing, self._workers.usage_of(*key), shares)
        if job.tenant != CANARY:  # which nobody makes room for
            lanes.shares.came(job.tenant, self.pipe.now())
        lanes.push(waiting)
        self._changed.set()
        timer = asyncio.get_running_loop().call_later(job.deadline - self.pipe.now(), _expire, sent)
        try:
            with self.pipe.cancellations.calling(
                job.tenant, job.id, lambda: None if sent.done() else sent.set_result(False)
            ):
                if not await sent:
                    await self.is_over(job)
        finally:
            timer.cancel()
            lanes.remove(waiting)  # where it ended here: cancelled, expired or drained

    def _gather(self, key: tuple[str, int], lanes: Lanes) -> tuple[WorkerCard, Seats, list[Waiting]] | None:
        """The next batch and its worker: jobs from the head of the line, while they fit there."""
        living = self._workers.living(*key)
        crowding: set[str] = set()  # tenants that have their share of every worker with room
        is_blocked = False
        lanes.shares.run_by(max(1, len(living.members)))
        heads = deque(lanes.heads(self.pipe.now()))
        while heads:
            head = heads.popleft()
            try:
                self._check_size(head.job, living)  # those that had more room may have gone
            except Overloaded as refusal:
                head.sent.set_exception(refusal)
                continue
            if is_blocked and head.job.priority != "high":  # for whom alone there may be room where others have none
                continue
            asked = head.job.priority == "high", head.job.seats
            fitting = living.fitting(partial(self._fits, lanes, head), (*asked, head.job.tenant, lanes.shares.version))
            if not fitting and living.fitting(partial(self._has_room, head), asked):
                crowding.add(head.job.tenant)
                heads = deque(lanes.heads(self.pipe.now(), crowding))
                continue
            chosen = self._strategy.pick(fitting, head.job) if fitting else None
            if chosen is not None:
                card, seats = living.members[chosen.worker]
                return card, seats, self._take(lanes, head, card, seats)
            is_blocked = True
        return None

    def _check_size(self, job: ValidatedJob, living: Fleet) -> None:
        """Raises `Overloaded` for a job that fits into no living worker's cache, however long it waits."""
        tokens = self._strategy.needs(job)
        if 0 < living.largest < tokens:
            raise Overloaded(
                f"No worker can hold the request: it may need {tokens} tokens, and the largest KV cache holds "
                f"{living.largest}. Ask for fewer tokens or choices.",
                code="no_worker_fits",
            )

    def _take(self, lanes: Lanes, head: Waiting, card: WorkerCard, seats: Seats) -> list[Waiting]:
        """`head` and those behind it, as many as the worker and the batch can hold."""
        now = asyncio.get_running_loop().time()
        taken: list[Waiting] = []
        waiting: Waiting | None = head
        while waiting is not None:
            lanes.pop(waiting)
            job, needed = waiting.job, card.seats_of(waiting.job)
            waiting.number = seats.send(needed, now, job.tenant, cost_of(job, needed))
            taken.append(waiting)
            waiting = next(iter(lanes.heads(self.pipe.now())), None)
            full = self._strategy.picks_each or len(taken) == self.pipe.settings.max_batch_size
            if waiting is not None and (full or not self._fits(lanes, waiting, card, seats)):
                waiting = None
        return taken

    def _fits(self, lanes: Lanes, waiting: Waiting, card: WorkerCard, seats: Seats) -> bool:
        """Whether there is room, and the job's tenant leaves enough of it to others."""
        job, wanted, free = waiting.job, card.seats_of(waiting.job), seats.free_for(waiting.job)
        if free < wanted:
            return False
        return lanes.shares.allow(job.tenant, wanted, seats.by_tenant, card.capacity, free, self.pipe.now())

    def _has_room(self, waiting: Waiting, card: WorkerCard, seats: Seats) -> bool:
        return seats.free_for(waiting.job) >= card.seats_of(waiting.job)

    async def _send(self, lanes: Lanes, worker: WorkerCard, seats: Seats, chosen: list[Waiting]) -> None:
        """What INFER has no room for waits at its place, and all others behind it."""
        if left := await self._sender.send(worker, seats, chosen):
            for waiting in left:
                if self._leaving:
                    waiting.sent.set_exception(_leaving())
                else:
                    lanes.push(waiting)
            await asyncio.sleep(FULL_PAUSE)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(until_beat(TICK))
            self._changed.set()
            with outage_logged("queue positions cannot be published"):
                await self._choose_strategy()
                await self._account()
                refuse_unloaded(self.pipe.registry, self._lanes, self.pipe.now())
                self._measure()
                for key, lanes in list(self._lanes.items()):
                    lanes.shares.look(lanes.needed(), self.pipe.now())
                    await self._news.tell(*key, lanes)
                self._forget()

    def _forget(self) -> None:
        """Forget the models and revisions whose lanes were removed, once nothing waits for them here."""
        known = self.pipe.registry.lanes
        for key in [key for key, lanes in self._lanes.items() if not lanes and lanes_of(*key) not in known]:
            del self._lanes[key]
            self._workers.forget(*key)
        self._news.keep(self._lanes)

    def _measure(self) -> None:
        metrics.OLDEST_WAITING.clear()
        now = self.pipe.now()
        for (model, _), lanes in self._lanes.items():
            for priority, created in lanes.oldest():
                metrics.OLDEST_WAITING.labels(model, priority).set(max(0.0, now - created))

    async def _account(self) -> None:
        """Say what is in flight, and free the seats of what went astray."""
        self._workers.check_integrity()
        in_flight = self._workers.in_flight
        self._strategy.keep(in_flight.seats)
        metrics.SEATS_IN_FLIGHT.clear()
        for worker, seats in in_flight.seats.items():
            metrics.SEATS_IN_FLIGHT.labels(worker).set(seats)
        await self.pipe.broker.notify(
            self.pipe.subjects.in_flight(in_flight.sender), in_flight.model_dump_json().encode()
        )
        await self._workers.heal(self.lease, self._stored_for)

    async def _stored_for(self, worker: str) -> set[int]:
        return {one.sequence for one in await self.pipe.broker.replay("INFER", self.pipe.subjects.infer(worker))}

    async def _choose_strategy(self) -> None:
        """What `penstock scheduling` said last, else what the settings say."""
        entry = await (await self.pipe.broker.bucket("state")).get("scheduling")
        wanted = STRATEGIES.get(entry.value.decode() if entry else self.pipe.settings.scheduling)
        if wanted is not None and not isinstance(self._strategy, wanted):
            self._strategy = wanted()
            log.info("scheduling strategy changed", strategy=wanted.__name__)


def _leaving() -> Transient:
    return Transient("this copy of the batch stage is leaving", delay=0.1)


def _expire(sent: asyncio.Future[bool]) -> None:
    if not sent.done():
        sent.set_exception(DeadlineExceeded("No worker had room for the request before its deadline."))

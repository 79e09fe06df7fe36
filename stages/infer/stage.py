"""infer: where the broker meets the engine. It takes batches and publishes every token as soon as it exists.

A request's first output announces its epoch and is stored only if nothing is stored before it, so a batch that was
dispatched twice runs once. A worker that takes over a request announces a newer epoch right behind the last output:
this fences off the previous worker, and generation continues with the next token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

import structlog

from ...config import metrics
from ...engine import InferenceEngine
from ...engine.cpu.machine import available_cores
from ...engine.grammar.checker import SIMPLE
from ...engine.vision.images import PromptImage
from ...schemas.canaries import CANARY
from ...schemas.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, Refusal
from ...schemas.events import FINAL
from ...schemas.jobs import InferenceBatch, ValidatedJob
from ...schemas.params import GenerationParams
from ...schemas.registry import RETURNED, WorkerCard
from ...schemas.wire import codec
from ...streams.beats import until_beat
from ...streams.family import share_metrics, watch_loop
from ...streams.lanes import open_lanes, reopen_lanes
from ...streams.outages import outage_logged, through_outages
from ...streams.port import MESSAGE_ID, SCHEMA, Delivery
from ...streams.topology import CONSUMER_IDLE, EVENTS, INFER
from .. import endings
from ..contract import SETTLED, Intake, Pipe, Stage
from ..images import StoredImages
from ..transcript import Transcript
from ..visits import CURRENT
from .adapters import WorkerAdapters
from .relay import OutputPublisher, pace
from .request_metrics import RequestMetrics, Unmeasured, WorkerMetrics, exposed
from .requests import request_of, requests_of
from .room import FreeRoom
from .spans import InferSpan

log = structlog.get_logger(__name__)


class Infer(Stage):
    """Runs every job of a batch in the engine's continuous batch; a failure ends that job alone."""

    name = "infer"
    is_brief = False  # and it counts deaths itself, by request
    concurrency = 1024
    prefetch = 16

    def __init__(self, pipe: Pipe, engine: InferenceEngine, card: WorkerCard, own: WorkerMetrics | None = None) -> None:
        """`own` metrics count its requests; by default those of its name."""
        super().__init__(pipe)
        self._engine = engine
        self._card = card
        self._publishers: dict[tuple[str, str], OutputPublisher] = {}  # by tenant and request; set by _publish_outputs
        self._seen = (-1, False)  # the engine's progress, and whether it had anything to do; set by _watch
        self._stood = 0.0  # seconds since that last changed, of those in which somebody looked; set by _watch, like
        self._looked = 0.0  # the loop time until which they count
        self._adapters = WorkerAdapters(engine)
        self._images = StoredImages(pipe.broker)
        self._metrics = own or WorkerMetrics(card.model.name, card.id)
        self.room = FreeRoom(pipe, engine, card, self._metrics)
        self.cores = available_cores()  # of the machine; a simulated one has others
        self._alone = asyncio.Lock()  # held while a request begins that may have killed a worker

    async def run(self, intake: Intake) -> None:
        await self.pipe.registry.claim(self._card)
        await open_lanes(self.pipe.broker, self.pipe.settings, self._card.model.name, self._card.model.revision)
        name, subject = f"infer-{self._card.id}", self.pipe.subjects.infer(self._card.id)
        await intake.consume(INFER, name, subject, idle_limit=CONSUMER_IDLE)
        interval = self.pipe.settings.heartbeat_interval
        async with asyncio.TaskGroup() as group:
            group.create_task(self.room.report())
            group.create_task(self._adapters.watch(self.pipe.registry, self._card.model, interval))
            group.create_task(self._prepare_grammars())
            group.create_task(self._expose())
            await self._heartbeats()

    async def leave(self) -> None:
        self.room.is_leaving = True
        await self.pipe.registry.withdraw(self._card)

    async def _expose(self) -> None:
        """Show operators how the worker fares, until cancelled."""
        with exposed(self._engine.stats, self._card.model.name, self._card.id):
            metrics.serve_metrics(self.pipe.settings.host, self.pipe.settings.metrics_port)
            worker, broker = self._card.id, self.pipe.broker
            await asyncio.gather(share_metrics(broker, self.pipe.subjects, worker), watch_loop(worker))

    async def _heartbeats(self) -> None:
        model = self._card.model
        while self._engine.healthy:
            if self.room.is_leaving:
                await asyncio.Event().wait()  # what runs is finished; nothing more is asked for
            with outage_logged("heartbeat missed", stage=self.name):
                await self.pipe.registry.announce_worker(self._card)
                await reopen_lanes(self.pipe.broker, self.pipe.settings, model.name, model.revision)
            self.room.tell()
            await asyncio.sleep(until_beat(self.pipe.settings.heartbeat_interval))
            self._watch()
        raise RuntimeError("the engine has died") from self._engine.error

    async def _prepare_grammars(self) -> None:
        """Load what grammars need before the first request with one, but not while others wait for this start."""
        await asyncio.sleep(SETTLED)
        with contextlib.suppress(InvalidRequest):  # a model without grammars
            await self._engine.prepare(GenerationParams(grammar=SIMPLE))

    def _watch(self) -> None:
        """End this worker if its engine hangs, so that another worker takes over its requests."""
        stats = self._engine.stats()
        seen = (self._engine.progress, stats.num_running + stats.num_waiting > 0)
        self._stood = self._standing() if seen == self._seen else 0.0
        self._seen, self._looked = seen, asyncio.get_running_loop().time()
        if self._stood > self.pipe.settings.stall_timeout:
            raise RuntimeError(f"the engine has made no progress for {self.pipe.settings.stall_timeout:g} s")

    def _standing(self) -> float:
        """For how many seconds the engine has had something to do and made no progress.

        A look that is late tells of a machine that stood still itself, as a laptop that sleeps.
        """
        late = 2 * self.pipe.settings.heartbeat_interval
        unseen = min(asyncio.get_running_loop().time() - self._looked, late)
        return self._stood + unseen if self._seen[1] else 0.0

    def alive(self) -> bool:
        """Keep leases through a long step, but not for an engine that `_watch` would end."""
        return self._engine.healthy and self._standing() <= self.pipe.settings.stall_timeout

    async def handle(self, delivery: Delivery) -> None:
        if (visit := CURRENT.get()) is not None:
            CURRENT.set(visit := visit.noting(worker=self._card.id))
        message = delivery.message
        batch = codec.decode_model(InferenceBatch, message.data, message.headers.get(SCHEMA))
        epochs = batch.epochs or (0,) * len(batch.jobs)
        if any((job.model, job.revision) != (self._card.model.name, self._card.model.revision) for job in batch.jobs):
            await self._give_back(batch, epochs, delivery)
            return
        is_ours = batch.incarnation == self._card.incarnation
        if is_ours:
            self.room.arrivals.add(batch.sender, batch.number, batch.oldest)
        elif visit is not None:
            CURRENT.set(visit.noting(lost=batch.worker))
        # An earlier process with this worker's name may have used this epoch already: start above it.
        used = delivery.attempt - (1 if is_ours else 0)
        for job in batch.jobs:
            self.room.arrive(job)
        if len(batch.jobs) == 1:  # a task takes a turn of the event loop
            try:
                await self._run(batch.jobs[0], epochs[0] + used)
            finally:
                self.room.depart(batch.jobs[0])
            return
        async with asyncio.TaskGroup() as group:
            for job, epoch in zip(batch.jobs, epochs, strict=True):
                running = group.create_task(self._run(job, epoch + used))
                running.add_done_callback(partial(self.room.depart, job))

    async def _give_back(self, batch: InferenceBatch, epochs: Sequence[int], delivery: Delivery) -> None:
        """Leave what an earlier process of this worker's name had, which served another model, to the batch stage: for
        the workers of that model, or until there is one.

        Raises `DeadlineExceeded`, as there may be no room to give it back, and `Transient`.
        """
        if all(job.deadline <= self.pipe.now() for job in batch.jobs):
            raise DeadlineExceeded("No worker began the request before its deadline.")
        headers, reached = delivery.message.headers, tuple(epoch + delivery.attempt for epoch in epochs)
        await self.pipe.broker.publish(
            self.pipe.subjects.infer(RETURNED),
            codec.encode(batch.model_copy(update={"epochs": reached})),
            message_id=f"{headers[MESSAGE_ID]}.{RETURNED}",
            headers=headers,
        )
        log.warning("a request for another model is given back", requests=[job.id for job in batch.jobs])

    async def _run(self, job: ValidatedJob, newest: int) -> None:
        """Run one job to its end. `newest` is the highest epoch that another worker may have used.

        Raises only if the engine has died: any other failure ends this job alone.
        """
        try:
            # These wait, and the checks below must not be followed by a wait.
            await self._note_keep_alive(job)
            compiled = await self._engine.prepare(job.params)
            images = await self._images.of(job)
            async with self._adapters.using(job.adapter) as adapter:
                if running := self._publishers.get((job.tenant, job.id)):
                    # Redelivered after a lost lease, or dispatched twice: this delivery ends when the running one does.
                    await running.ended.wait()
                    if not self._engine.healthy:
                        raise RuntimeError("the engine has died") from self._engine.error
                    return
                if job.deadline <= self.pipe.now():
                    raise DeadlineExceeded("No worker began the request before its deadline.")
                await self._publish_outputs(job, newest, adapter, images)
            del compiled  # kept until here: meanwhile others may have made the engine forget it
        except Exception as error:
            if not self._engine.healthy:
                raise
            if not isinstance(error, Refusal):
                log.error(
                    "a request failed", request=job.id, reason=type(error).__name__, where=endings.location(error)
                )
                error = GenerationFailed("The request failed in the worker.")
            event = endings.ending(job.id, error)
            await self.pipe.emit(event, tenant=job.tenant, bridge=job.bridge, key="end", priority=job.priority)

    async def _note_keep_alive(self, job: ValidatedJob) -> None:
        """Tell the agent, before the worker is idle again, how long it is to stay."""
        if job.keep_alive != self._card.keep_alive and not self.room.is_leaving:
            self._card = self._card.model_copy(update={"keep_alive": job.keep_alive})
            with outage_logged("keep_alive cannot be announced"):
                await self.pipe.registry.announce_worker(self._card)

    def _measured(self, job: ValidatedJob) -> RequestMetrics:
        return (Unmeasured if job.tenant == CANARY else RequestMetrics)(job, self._metrics, self.pipe.now)

    def _pace(self) -> float:
        return pace(len(self._publishers), self.pipe.settings.relay_interval, self.cores)

    async def _publish_outputs(
        self, job: ValidatedJob, newest: int, adapter: str | None, images: tuple[PromptImage, ...]
    ) -> None:
        publisher = OutputPublisher(self.pipe, job, self._pace, self._measured(job), adapter, images)
        publisher.fallback = self._engine.fallback_for(request_of(job, job.prompts[0], adapter, images))
        if (visit := CURRENT.get()) is not None and visit.span is not None:
            publisher.span = InferSpan(visit.span, job, self._card.id)
        self._publishers[job.tenant, job.id] = publisher
        timer = asyncio.get_running_loop().call_later(job.deadline - self.pipe.now(), publisher.expire)
        try:
            if newest == 0:
                publisher.metrics.began()
                await self._continue(publisher, Transcript())
                if not publisher.is_ours:
                    await self._announce_end_again(publisher, await self.pipe.transcript(job.tenant, job.id))
                return
            transcript = await self.pipe.transcript(job.tenant, job.id)
            if transcript.finished:
                await self._announce_end_again(publisher, transcript)
                return
            if transcript.kills >= self.pipe.settings.max_kills:
                reason = f"{transcript.kills} workers died while they began it"
                await endings.give_up(self.pipe, self.name, job, reason)
            elif transcript.silent:
                # Begin suspects one at a time, so that a request that kills workers can be identified.
                async with self._alone:
                    continuing = asyncio.create_task(self._take_over(publisher, newest, transcript))
                    begun = asyncio.create_task(publisher.begun.wait())
                    try:
                        await asyncio.wait({continuing, begun}, return_when=asyncio.FIRST_COMPLETED)
                    except asyncio.CancelledError:
                        continuing.cancel()
                        raise
                    finally:
                        begun.cancel()
                await continuing
            else:
                await self._take_over(publisher, newest, transcript)
        finally:
            timer.cancel()
            publisher.cancel()
            del self._publishers[job.tenant, job.id]
            publisher.ended.set()

    async def _announce_end_again(self, publisher: OutputPublisher, transcript: Transcript) -> None:
        """Announce an epoch behind a finished request whose final event is no longer stored: the stage stream stores it
        again. That happens when a client repeats a request after its events have left their stream."""
        job, broker = publisher.job, self.pipe.broker
        if transcript.finished:
            events = self.pipe.subjects.events(job.tenant, job.bridge, job.id)
            newest = await through_outages(lambda: broker.last(EVENTS, events), events)
            if newest is None or not isinstance(codec.decode_event(newest.data), FINAL):
                publisher.epoch, publisher.last = transcript.epoch + 1, transcript.last
                await publisher.announce()

    async def _take_over(self, publisher: OutputPublisher, newest: int, transcript: Transcript) -> None:
        """Announce an epoch newer than `newest` right behind `transcript`, and continue from there."""
        while True:
            publisher.epoch, publisher.last = max(newest, transcript.epoch) + 1, transcript.last
            if await publisher.announce():
                publisher.metrics.continued(transcript.token_ids) if transcript.started else publisher.metrics.began()
                job, tokens = publisher.job, sum(map(len, transcript.token_ids))
                log.warning("request taken over", request=job.id, tenant=job.tenant, tokens=tokens)
                if publisher.span is not None:
                    publisher.span.taken_over(transcript.trace, tokens)
                await self._continue(publisher, transcript)
                return
            before, transcript = transcript, await self.pipe.transcript(publisher.job.tenant, publisher.job.id)
            if transcript.epoch > before.epoch or transcript.finished:
                return  # another worker has taken it over, or the previous one finished it

    async def _continue(self, publisher: OutputPublisher, transcript: Transcript) -> None:
        """Generate and publish what `transcript` does not hold yet."""
        publisher.finished = frozenset(choice for choice, reason in enumerate(transcript.finish_reasons) if reason)
        publisher.handles += self._engine.open_all(requests_of(publisher, transcript))
        if publisher.expired:  # meanwhile
            publisher.cancel()
        with self.pipe.cancellations.calling(publisher.job.tenant, publisher.job.id, publisher.cancel):
            if len(publisher.handles) == 1:
                await publisher.relay(publisher.handles[0])
            else:
                await asyncio.gather(*(publisher.relay(handle) for handle in publisher.handles))
        if publisher.is_ours and not publisher.is_cut:
            publisher.metrics.ended()
        if publisher.is_cut:
            raise DeadlineExceeded("The deadline passed before every input was embedded.")

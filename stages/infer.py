"""infer: the one place where the broker meets the engine. Batches in, every token out as soon as it exists.

A request's first output announces its epoch. Its store refuses a second announcement of the same epoch, so a batch
that was dispatched twice runs once; a later delivery of the same batch begins a new epoch where the last one ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Sequence

import structlog

from ..engine import EngineRequest, InferenceEngine, RequestHandle
from ..schemas import codec
from ..schemas.errors import BrokerUnavailable, DeadlineExceeded, GenerationFailed, Overloaded, Refusal
from ..schemas.events import Delta, Output, Started
from ..schemas.jobs import InferenceBatch, ValidatedJob
from ..schemas.registry import WorkerCard
from ..streams.port import SCHEMA, Delivery
from ..streams.topology import partition
from . import endings
from .contract import Intake, Pipe, Stage
from .transcript import Transcript

log = structlog.get_logger(__name__)

_MESSAGES = 1_000  # of a worker's streams in a second, above which they are made larger instead


class Infer(Stage):
    """Runs every job of a batch in the engine's continuous batch; a job's failure is its own."""

    name = "infer"
    concurrency = 1024
    prefetch = 16

    def __init__(self, pipe: Pipe, engine: InferenceEngine, card: WorkerCard) -> None:
        super().__init__(pipe)
        self._engine = engine
        self._card = card
        self._progress = -1  # the engine's, when leases were last renewed; set by alive
        self._voices: dict[str, Voice] = {}  # by request; set by _speak
        self._leaving = False  # set by leave
        self._seen = (-1, False)  # the engine's progress, and whether it had anything to do; set by _watch
        self._moved = 0.0  # loop time when that last changed; set by _watch

    @property
    def lease(self) -> float:
        return self.pipe.settings.worker_lease

    async def run(self, intake: Intake) -> None:
        await intake.consume("INFER", f"infer-{self._card.id}", self.pipe.subjects.infer(self._card.id))
        await self._heartbeats()

    async def leave(self) -> None:
        self._leaving = True
        await self.pipe.registry.withdraw(self._card)

    async def _heartbeats(self) -> None:
        while self._engine.healthy:
            if self._leaving:
                await asyncio.Event().wait()  # what runs is finished; nothing more is asked for
            try:
                await self.pipe.registry.announce_worker(self._card)
            except BrokerUnavailable as error:
                log.warning("heartbeat missed", reason=str(error))
            await asyncio.sleep(self.pipe.settings.heartbeat_interval)
            self._watch()
        raise RuntimeError("the engine has died") from self._engine.error

    def _watch(self) -> None:
        """End a worker whose engine hangs: nothing else would, and a new one can go on with its requests."""
        now = asyncio.get_running_loop().time()
        stats = self._engine.stats()
        seen = (self._engine.progress, stats.num_running + stats.num_waiting > 0)
        if seen != self._seen or not seen[1]:
            self._seen, self._moved = seen, now
        elif now - self._moved > self.pipe.settings.stall_timeout:
            raise RuntimeError(f"the engine has made no progress for {self.pipe.settings.stall_timeout:g} s")

    def alive(self) -> bool:
        before, self._progress = self._progress, self._engine.progress
        stats = self._engine.stats()
        return self._engine.healthy and (self._progress != before or not (stats.num_running or stats.num_waiting))

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        batch = codec.decode_model(InferenceBatch, message.data, message.headers.get(SCHEMA))
        async with asyncio.TaskGroup() as group:
            for job in batch.jobs:
                group.create_task(self._run(job, epoch=delivery.attempt))

    async def _run(self, job: ValidatedJob, epoch: int) -> None:
        """Run one job to its end. Only the engine's own death reaches the rest of the batch."""
        if running := self._voices.get(job.id):
            # It came again, since a lease was lost or it was dispatched twice: its end is this delivery's end too.
            await running.ended.wait()
            return
        try:
            if job.model != self._card.model.name:
                raise Overloaded(f"The worker does not serve {job.model} any more.", retry_after=1.0)
            if job.deadline <= self.pipe.now():
                raise DeadlineExceeded("No worker began the request before its deadline.")
            await self._speak(job, Voice(self.pipe, job, epoch, self._interval), epoch)
        except Exception as error:
            if not self._engine.healthy:
                raise
            if not isinstance(error, Refusal):
                log.error("a request failed", request=job.id, reason=type(error).__name__, where=endings.place(error))
                error = GenerationFailed("The request failed in the worker.")
            event = endings.ending(job.id, error)
            await self.pipe.emit(event, tenant=job.tenant, bridge=job.bridge, place="end")

    def _interval(self) -> float:
        """Seconds between two messages of one stream, so that all together make no more than `_MESSAGES`."""
        return max(self.pipe.settings.relay_interval, len(self._voices) / _MESSAGES)

    async def _speak(self, job: ValidatedJob, voice: Voice, epoch: int) -> None:
        handles: list[RequestHandle] = []
        self._voices[job.id] = voice
        try:
            # A successor announces itself before it reads what was said: nothing can be added after that.
            said = await voice.transcript() if epoch > 1 and await voice.announce() else Transcript()
            handles += self._open(job, epoch, said)
            with self.pipe.cancellations.calling(job.id, lambda: _cancel(handles)):
                await asyncio.gather(*(voice.relay(handle) for handle in handles))
        finally:
            _cancel(handles)
            del self._voices[job.id]
            voice.ended.set()

    def _open(self, job: ValidatedJob, epoch: int, said: Transcript) -> list[RequestHandle]:
        """One engine request for each prompt that is not finished yet."""
        handles = []
        n, seed = job.params.n, job.params.seed
        for place, prompt in enumerate(job.prompts):
            choices = slice(place * n, (place + 1) * n)
            if said.finish_reasons and None not in said.finish_reasons[choices]:
                continue
            request = EngineRequest(
                id=f"{job.id}.{epoch}.{place}",
                prompt=prompt,
                params=job.params,
                seed=seed if seed is not None else 0,
                epoch=epoch,
                first_choice=choices.start,
                generated=tuple(map(tuple, said.token_ids[choices])),
                cache_salt=job.tenant,
            )
            handles.append(self._engine.open(request))
        return handles


def _cancel(handles: list[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()


class Voice:
    """Publishes the outputs of one request in one epoch; an outage of the broker makes it wait, never skip.

    The epoch's announcement goes out with its first token, or before it where `announce` is called. If somebody else
    has announced the same epoch, the request is theirs, and this voice stays silent.
    """

    def __init__(self, pipe: Pipe, job: ValidatedJob, epoch: int, interval: Callable[[], float]) -> None:
        self._pipe = pipe
        self._interval = interval  # least seconds between two deltas of the same choices
        self._job = job
        self._epoch = epoch
        share = partition(job.id, pipe.settings.stream_partitions)
        self._subject = pipe.subjects.stream(share, job.id)
        self.ended = asyncio.Event()  # set by Infer
        self._turn = asyncio.Lock()  # outputs are stored one after the other
        self._ours: bool | None = None  # None until announced; set by announce

    async def announce(self, *first: Delta) -> bool:
        """Say that the epoch begins, with its first output if there is one; False if the request is another's."""
        job, holder = self._job, uuid.uuid4().hex
        started = Started(job.id, self._epoch, holder, job.tenant, job.bridge, job.choices, job.prompt_tokens)
        self._ours = await self._say((started, *first), "started")
        if not self._ours:  # somebody else's, or our own, stored by a publish whose answer was lost
            stored = (await self.transcript()).started
            self._ours = stored is not None and stored.holder == holder
        return self._ours

    async def transcript(self) -> Transcript:
        """What has been said of the request so far."""
        said = Transcript()
        for message in await self._pipe.broker.replay("STREAM", self._subject):
            for output in codec.decode_outputs(message.data):
                said.apply(output)
        return said

    async def relay(self, handle: RequestHandle) -> None:
        """Publish the deltas of one engine request to its end; those made during a publish go out together.

        So do those of an interval: an engine of a thousand steps a second would spend its time on messages.
        """
        loop = asyncio.get_running_loop()
        while not handle.finished and self._ours is not False:
            told = loop.time()
            for delta in await handle.take():
                await self._tell(dataclasses.replace(delta, request=self._job.id))
            if not handle.finished and (early := told + self._interval() - loop.time()) > 0:
                await asyncio.sleep(early)

    async def _tell(self, delta: Delta) -> None:
        async with self._turn:
            if self._ours is None:
                await self.announce(delta)
            elif self._ours:
                await self._say((delta,), f"{delta.choice}.{delta.index}")

    async def _say(self, outputs: Sequence[Output], place: str) -> bool:
        """Publish outputs, however long it takes; False if something else is stored in their place."""
        data = codec.encode_outputs(outputs)
        message_id = f"{self._job.id}.{self._epoch}.{place}"
        return not (await self._pipe.store(self._subject, data, message_id, codec.OUTPUTS)).duplicate

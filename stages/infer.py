"""infer: the one place where the broker meets the engine. Batches in, every token out as soon as it exists.

A request's first output announces its epoch, where nothing was said before, so a batch that was dispatched twice runs
once. Whoever gets a request that may have run elsewhere announces a newer epoch right behind the last output, which
fences the former holder off, and goes on where that one ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import structlog

from ..engine import EmbeddingInput, EngineRequest, InferenceEngine
from ..schemas import codec
from ..schemas.errors import DeadlineExceeded, GenerationFailed, Overloaded, Refusal
from ..schemas.events import FINAL
from ..schemas.jobs import InferenceBatch, Priority, ValidatedJob
from ..schemas.registry import Room, WorkerCard, reserve_of
from ..streams.outages import outage_logged, through_outages
from ..streams.port import SCHEMA, Delivery
from ..streams.topology import CONSUMER_IDLE, INFER
from . import endings
from .arrivals import Arrivals
from .contract import Intake, Pipe, Stage
from .degradation import slots
from .relay import Voice
from .transcript import Transcript

log = structlog.get_logger(__name__)

_RANKS: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}
_MESSAGES = 1_000  # of a worker's streams in a second, above which they are made larger instead
_ROOM_PAUSE = 0.0005  # seconds between two words about the worker's room


class Infer(Stage):
    """Runs every job of a batch in the engine's continuous batch; a job's failure is its own."""

    name = "infer"
    is_brief = False  # and it counts deaths itself, by request
    concurrency = 1024
    prefetch = 16

    def __init__(self, pipe: Pipe, engine: InferenceEngine, card: WorkerCard) -> None:
        super().__init__(pipe)
        self._engine = engine
        self._card = card
        self._voices: dict[tuple[str, str], Voice] = {}  # by tenant and request; set by _speak
        self._leaving = False  # set by leave
        self._seen = (-1, False)  # the engine's progress, and whether it had anything to do; set by _watch
        self._moved = 0.0  # loop time when that last changed; set by _watch
        self._arrivals = Arrivals()  # set by handle
        self._active = Counter[str]()  # seats that are taken, by tenant; set by _arrive and _depart
        self._welcome = 0  # of the room told last, what has not come yet; set by _tell_room
        self._has_news = asyncio.Event()  # about the room
        self._alone = asyncio.Lock()  # held by whoever begins a request that may have killed a worker

    async def run(self, intake: Intake) -> None:
        await self.pipe.registry.claim(self._card)
        name, subject = f"infer-{self._card.id}", self.pipe.subjects.infer(self._card.id)
        await intake.consume(INFER, name, subject, idle_limit=CONSUMER_IDLE)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_room())
            await self._heartbeats()

    async def leave(self) -> None:
        self._leaving = True
        await self.pipe.registry.withdraw(self._card)

    async def _heartbeats(self) -> None:
        while self._engine.healthy:
            if self._leaving:
                await asyncio.Event().wait()  # what runs is finished; nothing more is asked for
            with outage_logged("heartbeat missed", stage=self.name):
                await self.pipe.registry.announce_worker(self._card)
            self._has_news.set()
            await asyncio.sleep(self.pipe.settings.heartbeat_interval)
            self._watch()
        raise RuntimeError("the engine has died") from self._engine.error

    async def _tell_room(self) -> None:
        """Say how much more is welcome: while little is, at rest, and with each heartbeat, as words can be lost."""
        subject = self.pipe.subjects.room(self._card.id)
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            room = self._room()
            self._welcome = room.free
            await self.pipe.broker.notify(subject, room.model_dump_json().encode())
            await asyncio.sleep(_ROOM_PAUSE)

    def _room(self) -> Room:
        cache = self._engine.stats().cache
        pressure = cache.usage if cache else 0.0
        high, others = slots(pressure, self._card.capacity, reserve_of(self._card.capacity))
        active = self._active.total()
        return Room(
            worker=self._card.id,
            incarnation=self._card.incarnation,
            free=0 if self._leaving else others - active,
            free_high=0 if self._leaving else high - active,
            received=self._arrivals.numbers,
            active=active,
            free_tokens=round(cache.num_tokens * (1 - pressure)) if cache else 1 << 30,
            total_tokens=cache.num_tokens if cache else 0,
            tenants=dict(self._active),
        )

    def _arrive(self, tenant: str, seats: int) -> None:
        self._active[tenant] += seats
        self._welcome -= seats

    def _depart(self, tenant: str, seats: int, _: asyncio.Task[None]) -> None:
        self._active[tenant] -= seats
        if not self._active[tenant]:
            del self._active[tenant]
        if self._welcome <= self._card.capacity // 2 or not self._active:
            self._has_news.set()

    def _watch(self) -> None:
        """End a worker whose engine hangs: nothing else would, and another one can go on with its requests."""
        now = asyncio.get_running_loop().time()
        stats = self._engine.stats()
        seen = (self._engine.progress, stats.num_running + stats.num_waiting > 0)
        if seen != self._seen or not seen[1]:
            self._seen, self._moved = seen, now
        elif now - self._moved > self.pipe.settings.stall_timeout:
            raise RuntimeError(f"the engine has made no progress for {self.pipe.settings.stall_timeout:g} s")

    def alive(self) -> bool:
        """A long step is no reason to lose a lease; an engine that `_watch` would end is."""
        standing = asyncio.get_running_loop().time() - self._moved if self._seen[1] else 0.0
        return self._engine.healthy and standing <= self.pipe.settings.stall_timeout

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        batch = codec.decode_model(InferenceBatch, message.data, message.headers.get(SCHEMA))
        epochs = batch.epochs or (0,) * len(batch.jobs)
        is_ours = batch.incarnation == self._card.incarnation
        if is_ours:
            self._arrivals.add(batch.sender, batch.number, batch.oldest)
        async with asyncio.TaskGroup() as group:
            for job, epoch in zip(batch.jobs, epochs, strict=True):
                seats = self._card.seats_of(job)
                self._arrive(job.tenant, seats)
                # A process of our name that is gone may have announced, or be about to, what we would.
                running = group.create_task(self._run(job, epoch + delivery.attempt - (1 if is_ours else 0)))
                running.add_done_callback(partial(self._depart, job.tenant, seats))

    async def _run(self, job: ValidatedJob, newest: int) -> None:
        """Run one job, whose newest epoch may be `newest`, to its end. The rest of the batch notices nothing but the
        engine's own death."""
        try:
            await self._engine.prepare(job.params)  # before anything counts on what follows being at once
            if running := self._voices.get((job.tenant, job.id)):
                # It came again, since a lease was lost or it was dispatched twice: its end is this delivery's end too.
                await running.ended.wait()
                if not self._engine.healthy:
                    raise RuntimeError("the engine has died") from self._engine.error
                return
            if job.model != self._card.model.name:
                raise Overloaded(f"The worker does not serve {job.model} any more.", retry_after=1.0)
            if job.deadline <= self.pipe.now():
                raise DeadlineExceeded("No worker began the request before its deadline.")
            await self._speak(job, newest)
        except Exception as error:
            if not self._engine.healthy:
                raise
            if not isinstance(error, Refusal):
                log.error("a request failed", request=job.id, reason=type(error).__name__, where=endings.place(error))
                error = GenerationFailed("The request failed in the worker.")
            event = endings.ending(job.id, error)
            await self.pipe.emit(event, tenant=job.tenant, bridge=job.bridge, place="end", priority=job.priority)

    def _interval(self) -> float:
        """Seconds between two messages of one stream, so that all together make no more than `_MESSAGES`."""
        return max(self.pipe.settings.relay_interval, len(self._voices) / _MESSAGES)

    async def _speak(self, job: ValidatedJob, newest: int) -> None:
        voice = self._voices[job.tenant, job.id] = Voice(self.pipe, job, self._interval)
        timer = asyncio.get_running_loop().call_later(job.deadline - self.pipe.now(), voice.expire)
        try:
            if newest == 0:
                await self._go_on(voice, Transcript())
                if not voice.is_ours:
                    await self._tell_again(voice, await self.pipe.transcript(job.tenant, job.id))
                return
            said = await self.pipe.transcript(job.tenant, job.id)
            if said.finished:
                await self._tell_again(voice, said)
                return
            if said.kills >= self.pipe.settings.max_kills:
                reason = f"{said.kills} workers died while they began it"
                await endings.give_up(self.pipe, self.name, job, reason)
            elif said.silent:
                # Whichever of a dead worker's requests killed it, if one did, must show alone.
                async with self._alone:
                    going_on = asyncio.create_task(self._take_over(voice, newest, said))
                    begun = asyncio.create_task(voice.begun.wait())
                    try:
                        await asyncio.wait({going_on, begun}, return_when=asyncio.FIRST_COMPLETED)
                    except asyncio.CancelledError:
                        going_on.cancel()
                        raise
                    finally:
                        begun.cancel()
                await going_on
            else:
                await self._take_over(voice, newest, said)
        finally:
            timer.cancel()
            voice.silence()
            del self._voices[job.tenant, job.id]
            voice.ended.set()

    async def _tell_again(self, voice: Voice, said: Transcript) -> None:
        """Something was said of the request before this worker had it. If all was, have the stage stream see that its
        events are stored: they may have been pushed out of their stream, and the request been asked for again."""
        job, broker = voice.job, self.pipe.broker
        if said.finished:
            events = self.pipe.subjects.events(job.tenant, job.bridge, job.id)
            newest = await through_outages(lambda: broker.last("EVENTS", events), events)
            if newest is None or not isinstance(codec.decode_event(newest.data), FINAL):
                voice.epoch, voice.last = said.epoch + 1, said.last
                await voice.announce()

    async def _take_over(self, voice: Voice, newest: int, said: Transcript) -> None:
        """Announce an epoch newer than `newest` right behind `said`, and go on from there."""
        while True:
            voice.epoch, voice.last = max(newest, said.epoch) + 1, said.last
            if await voice.announce():
                await self._go_on(voice, said)
                return
            before, said = said, await self.pipe.transcript(voice.job.tenant, voice.job.id)
            if said.epoch > before.epoch or said.finished:
                return  # somebody else has taken it over, or its former holder came to the end

    async def _go_on(self, voice: Voice, said: Transcript) -> None:
        """Say what is left to be said."""
        voice.finished = frozenset(choice for choice, reason in enumerate(said.finish_reasons) if reason is not None)
        voice.handles += [self._engine.open(request) for request in _requests(voice.job, voice.epoch, said)]
        if voice.expired:  # while this was waited for
            voice.silence()
        with self.pipe.cancellations.calling(voice.job.tenant, voice.job.id, voice.silence):
            await asyncio.gather(*(voice.relay(handle) for handle in voice.handles))
        if voice.is_cut:
            raise DeadlineExceeded("The deadline passed before every input was embedded.")


def _requests(job: ValidatedJob, epoch: int, said: Transcript) -> list[EngineRequest]:
    """One engine request for each prompt that is not finished yet."""
    requests = []
    n, seed = job.params.n, job.params.seed
    embeds = job.endpoint == "/v1/embeddings"
    kind = partial(EmbeddingInput, dimensions=job.dimensions) if embeds else EngineRequest
    for place, prompt in enumerate(job.prompts):
        choices = slice(place * n, (place + 1) * n)
        if said.finish_reasons and None not in said.finish_reasons[choices]:
            continue
        request = kind(
            id=f"{job.tenant}.{job.id}.{epoch}",
            prompt=prompt,
            params=job.params,
            seed=seed if seed is not None else 0,
            epoch=epoch,
            first_choice=choices.start,
            generated=tuple(map(tuple, said.token_ids[choices])),
            cache_salt=job.tenant,
            priority=_RANKS[job.priority],
        )
        requests.append(request)
    return requests

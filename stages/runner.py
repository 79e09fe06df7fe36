"""Runs one stage: takes deliveries, bounds how many are in hand, keeps their leases, settles each exactly once, drains.

What an outcome of `handle` means:

    returned            ack
    Refusal             tell the client, then ack
    Transient           nak with its delay; `NotYet` says nothing of it
    anything else       nak, later each time, and another copy is offered it first; after `max_attempts` of these the
                        message goes to the dead letters, its clients are told, and it is terminated
    cancelled (drain)   nak: another copy takes it at once

A delivery is no failure: a message comes again after an outage, a lost lease or a full stream, however often. Only what
may have ended the process that handled it is counted too: a message that has come many times, and that this process has
not survived before, is handled alone, and its beginning is noted before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from ..config import metrics
from ..schemas.bounds import LONG
from ..schemas.errors import (
    BrokerUnavailable,
    ModelLoadError,
    NotYet,
    Overloaded,
    PenstockError,
    Refusal,
    StartupError,
    Transient,
)
from ..schemas.jobs import Priority
from ..schemas.threads import ADVICE, lacks_threads, threads_exhausted
from ..streams.beats import until_beat
from ..streams.outages import through_outages
from ..streams.port import MESSAGE_ID, Consumer, ConsumerSpec, Delivery
from ..streams.topology import FAILURES, PRIORITIES, lane_stream
from . import endings
from .contract import Pipe, Stage
from .failures import Count, FailedHere
from .turns import Turn, Turns
from .visits import CURRENT, Visit, traced

log = structlog.get_logger(__name__)

LEAST_UNSETTLED = 1024  # deliveries of a consumer that may be unsettled, of whatever stage
_OFFER = 0.1  # seconds for which another copy may take what this one has failed to handle
_LONGEST = 200  # characters of a message's id that the log shows


class Runner:
    """Owns one stage's tasks. `run` returns when `stop` has drained it, and raises what the stage's `run` raises."""

    def __init__(self, stage: Stage, pipe: Pipe) -> None:
        self._stage = stage
        self._pipe = pipe
        self._in_hand: dict[asyncio.Task[None], Delivery] = {}
        self._consumers: set[Consumer] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._has_consumed = False  # set by _open
        self._stopping = asyncio.Event()
        self._has_room = asyncio.Event()  # in one of the pumps, or they are to end
        self._failed = FailedHere()
        self._one_by_one = asyncio.Lock()  # held for a step of the event loop before a long message is handled
        self._alone = asyncio.Lock()  # held while a message is handled that may end the process
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # a pump's

    async def run(self) -> None:
        owned = [asyncio.create_task(self._stage.run(self)), asyncio.create_task(self._beat())]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await self._until(stopping, owned)
            with contextlib.suppress(Transient):
                await self._stage.leave()
            for consumer in list(self._consumers):
                await consumer.close()
            self._has_room.set()
            if self._pumps:
                await asyncio.wait(self._pumps)
            if self._in_hand:
                await asyncio.wait(self._in_hand, timeout=self._pipe.settings.drain_timeout)
        finally:
            left = [stopping, *owned, *self._pumps, *self._in_hand]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def stop(self) -> None:
        """Take nothing new, finish what is in hand within the drain time-out."""
        self._stopping.set()

    async def consume(
        self, stream: str, name: str, subject: str, *, takeover: bool = False, idle_limit: float = 0.0
    ) -> Consumer:
        """Raises `BrokerUnavailable` where the broker refuses to a stage that runs what it may allow later, as when
        there are as many consumers as the account may have."""
        spec = self._spec(stream, name, subject, takeover=takeover, idle_limit=idle_limit)
        try:
            return await self._open(spec, Turns(self._stage.concurrency))
        except StartupError as error:
            if not self._has_consumed:
                raise
            raise BrokerUnavailable(str(error)) from error

    async def consume_lanes(self, stream: str, name: str, subjects: Callable[[Priority], str]) -> None:
        turns = Turns(self._stage.concurrency, len(PRIORITIES))
        for rank, priority in enumerate(PRIORITIES):
            await self._open(self._spec(lane_stream(stream, priority), name, subjects(priority)), turns, rank)

    def _spec(
        self, stream: str, name: str, subject: str, *, takeover: bool = False, idle_limit: float = 0.0
    ) -> ConsumerSpec:
        return ConsumerSpec(
            stream=stream,
            name=name,
            subject=subject,
            ack_wait=self._stage.lease,
            max_deliver=-1,  # attempts are counted here: the broker would keep a spent message and tell nobody
            max_ack_pending=max(LEAST_UNSETTLED, 2 * self._stage.concurrency, self._stage.most_unsettled),
            takeover=takeover,
            idle_limit=idle_limit,
        )

    async def _open(self, spec: ConsumerSpec, turns: Turns, rank: int = 0) -> Consumer:
        consumer = await self._pipe.broker.consume(spec, prefetch=self._stage.prefetch)
        self._has_consumed = True
        if self._stopping.is_set():  # a stage may still be opening some while the others are closed
            await consumer.close()
        self._consumers.add(consumer)
        pump = asyncio.create_task(self._pump(consumer, turns, rank))
        self._pumps.add(pump)
        pump.add_done_callback(self._pump_ended)
        return consumer

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        self._pumps.discard(pump)
        if not pump.cancelled() and (error := pump.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _until(self, stopping: asyncio.Task[bool], owned: list[asyncio.Task[None]]) -> None:
        waiting: set[asyncio.Future[None] | asyncio.Task[bool]] = {stopping, self._failure, *owned}
        while not stopping.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _pump(self, consumer: Consumer, turns: Turns, rank: int) -> None:
        """Take what the stage has room for; of a lane that shares it one more, so that it is seen to wait."""

        def release(task: asyncio.Task[None]) -> None:
            del self._in_hand[task]
            self._has_room.set()

        while True:
            while (turns.is_waiting(rank) if turns.is_shared else turns.free <= 0) and not self._stopping.is_set():
                self._has_room.clear()
                await self._has_room.wait()
            deliveries = await consumer.take(max(1, turns.free))
            if not deliveries:
                break
            for delivery in deliveries:
                if self._stage.sets_aside(delivery):
                    continue
                if turns.is_shared and self._failed.offers(delivery.message):
                    await delivery.nak(_OFFER)
                    continue
                task = asyncio.create_task(self._work(delivery, turns, rank))
                self._in_hand[task] = delivery
                task.add_done_callback(release)
            await asyncio.sleep(0)  # they take their turns
        self._consumers.discard(consumer)

    async def _work(self, delivery: Delivery, turns: Turns, rank: int) -> None:
        try:
            await turns.take(rank)
        except asyncio.CancelledError:
            await delivery.nak()
            raise
        turn = Turn(turns, self._has_room.set)
        visit = Visit(self._stage.name, delivery, self._pipe.now(), turn=turn)
        CURRENT.set(visit)
        try:
            if (tracer := self._pipe.tracer) is None or not self._stage.is_traced:
                await self._settle(delivery, visit)
            else:
                with traced(visit, tracer):
                    await self._settle(delivery, visit)
        finally:
            turn.end()

    async def _settle(self, delivery: Delivery, visit: Visit) -> None:
        if delivery.attempt > 1:
            reason = "turn" if self._stage.gives_turns(delivery.message) else "failure"
            metrics.REDELIVERIES.labels(self._stage.name, reason).inc()
        try:
            is_frequent = delivery.attempt > self._pipe.settings.max_attempts
            if self._stage.is_brief and is_frequent and delivery.message not in self._failed:
                async with self._alone:
                    if not await self._handle_suspect(delivery):
                        return
            else:
                if len(delivery.message.data) > LONG:
                    async with self._one_by_one:
                        await asyncio.sleep(0)  # what else happens in the event loop goes on between long messages
                await self._stage.handle(delivery)
            self._failed.discard(delivery.message)
            await delivery.ack()
        except Refusal as refusal:
            visit.failed(refusal.code or refusal.type)
            await self._refuse(delivery, refusal)
            _let_go(refusal)
        except NotYet as error:
            await delivery.nak(error.delay)
            _let_go(error)
        except Transient as error:
            metrics.RETRIES.labels(self._stage.name).inc()
            visit.failed("retry")
            named = _named(delivery)
            log.warning("will retry", stage=self._stage.name, message=named, reason=str(error), delay=error.delay)
            await delivery.nak(error.delay)
            _let_go(error)
        except asyncio.CancelledError:
            await delivery.nak()
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust, such as tokenizers, is no Exception
            visit.failed(type(error).__name__)
            await self._fail(delivery, error)

    async def _handle_suspect(self, delivery: Delivery) -> bool:
        """Handle what has come often, perhaps because it ends every process that tries; False if it was buried."""
        deaths = Count(await self._pipe.broker.bucket(FAILURES), self._stage.name, delivery.message, "begun")
        if await deaths.read() >= self._pipe.settings.max_attempts:
            reason = f"{await deaths.read()} processes ended while they handled it"
            await endings.bury(self._pipe, self._stage.name, delivery, reason, delivery.attempt)
            return False
        await deaths.add(1)
        try:
            await self._stage.handle(delivery)
        finally:
            # Through any outage: a mark that stays would count as a death.
            await asyncio.shield(through_outages(lambda: deaths.add(-1), delivery.message.subject))
        return True

    async def _refuse(self, delivery: Delivery, refusal: Refusal) -> None:
        try:
            await endings.refuse(self._pipe, delivery, refusal)
        except Exception as error:
            await self._fail(delivery, error)
        else:
            await delivery.ack()

    async def _fail(self, delivery: Delivery, error: BaseException) -> None:
        stage = self._stage.name
        metrics.RETRIES.labels(stage).inc()
        self._failed.add(delivery.message)
        # A traceback of ours may be logged; the text of a foreign exception might quote a prompt.
        reason = str(error) if isinstance(error, PenstockError) else type(error).__name__
        if lacks_threads(error):
            reason = ADVICE
        failures = 1
        try:
            failures = await Count(await self._pipe.broker.bucket(FAILURES), stage, delivery.message, "failed").add(1)
            where, named = endings.location(error), _named(delivery)
            log.error("failed", stage=stage, message=named, failures=failures, reason=reason, where=where)
            if failures >= self._pipe.settings.max_attempts:
                await endings.bury(self._pipe, stage, delivery, reason, failures, _refusal(error))
                return
        except Exception as second:
            log.error("could not be buried", stage=stage, reason=type(second).__name__)
        await delivery.nak(min(2.0 ** (failures - 1), 30.0))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(until_beat(self._stage.lease / 3))
            if self._stage.alive():
                for delivery in list(self._in_hand.values()):
                    with contextlib.suppress(Transient):
                        await delivery.in_progress()


def _named(delivery: Delivery) -> str:
    """The id of a message, for the log: its tenant and request, in most stages."""
    return delivery.message.headers.get(MESSAGE_ID, "")[:_LONGEST]


def _refusal(error: BaseException) -> Refusal | None:
    """What the clients of a message that is given up hear, where that says more than that it failed."""
    if lacks_threads(error):
        return threads_exhausted()
    if isinstance(error, ModelLoadError):
        return Overloaded(f"The model cannot be served here: {error}", code="model_unavailable")
    return None


def _let_go(error: Exception) -> None:
    """Of its frames, which hold the message: a stage may have the error in a future that they hold, too, and all of
    them would stay until garbage is collected."""
    error.__traceback__ = None

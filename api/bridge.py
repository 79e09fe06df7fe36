"""The way from a request to its events and back: publishes jobs, and reads each one's events once, in order.

Knows the broker and nothing of HTTP; `penstock submit` reads the same way. Events are heard live, on one wildcard
subscription for the requests that were opened here and on one each for those that may have been opened elsewhere; what
was missed, in an outage or a change of publisher, is read back from the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from ..schemas import codec
from ..schemas.errors import (
    STORE_FULL,
    BrokerUnavailable,
    DeadlineExceeded,
    Overloaded,
    QuotaExceeded,
    Refusal,
    StorageFull,
    StreamFull,
    StreamNotFound,
)
from ..schemas.events import FINAL, Accepted, Cancelled, Done, ErrorBody, Event, Failed, Item, Queued, Token, Turn
from ..schemas.jobs import TOKEN_PATTERN, Job, Priority
from ..schemas.loops import is_response
from ..streams.port import DEADLINE, SCHEMA, Broker, Message, Subscription
from ..streams.topology import Subjects
from .admission import Gate

log = structlog.get_logger(__name__)

SILENCE = 5.0  # seconds without an event before the stream is asked whether one was missed
GRACE = 2.0  # seconds after a deadline in which the stages may say so themselves
CANCELS = 5  # times that a request is asked to stop, a second apart: a stage that restarts does not hear it


class Bridge:
    """One listener with a name of its own; requests opened here answer here, and any may be followed."""

    def __init__(self, broker: Broker, subjects: Subjects, name: str | None = None) -> None:
        self.name = name or f"b{secrets.token_hex(8)}"
        self.draining = False  # set by drain
        self.broker = broker
        self.subjects = subjects
        self._gate = Gate()
        self._open: set[Reading] = set()
        self._heard: dict[str, Reading] = {}  # by subject: those that live on our own wildcard
        self._idle = asyncio.Event()  # nothing is open; set by _closed
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.broker.listen(self.subjects.events_of(self.name), self._hear)
        await self._gate.start(self.broker, self.subjects)

    def admit(self, priority: Priority) -> None:
        """Raises `Overloaded` where a request of this priority would be refused; asks nobody."""
        if self.draining:
            raise _leaving()
        self._gate.check(priority)

    async def open(
        self,
        job: Job,
        *,
        priority: Priority,
        tenant: str,
        deadline: float | None = None,
        kept: bool = False,
        shared: bool = False,
    ) -> Reading:
        """Publish a job, which must name this bridge and have an id; `deadline` in Unix seconds.

        `kept`: it goes on though its reader leaves. `shared`: another bridge may publish it too, and get the events.
        Raises `Overloaded`, `QuotaExceeded` or `StorageFull` where it is not taken, and `BrokerUnavailable`.
        """
        assert job.id is not None and job.bridge == self.name
        self.admit(priority)
        reading = await self._reading(job.id, tenant, deadline, kept=kept or shared, shared=shared)
        headers = {SCHEMA: codec.JOB} | ({DEADLINE: f"{deadline:.3f}"} if deadline else {})
        try:
            subject, name = self.subjects.jobs(priority, tenant), f"{tenant}.{job.id}"
            await self.broker.publish(subject, codec.encode(job), message_id=name, headers=headers)
        except BaseException as error:
            reading.close()
            match error:
                case StreamFull(storage=True):
                    raise StorageFull(STORE_FULL) from None
                case StreamFull(per_subject=True):
                    raise QuotaExceeded("Too many requests of yours wait to be looked at.", retry_after=1.0) from None
                case StreamFull():
                    raise Overloaded("Too many requests are waiting to be looked at.", retry_after=1.0) from None
            raise
        return reading

    async def follow(self, request: str, tenant: str, *, deadline: float | None = None) -> Reading:
        """Read a request's events from the first one on, whichever bridge it was opened at.

        Raises `StreamNotFound` where there are none, or not from the first one on, and `BrokerUnavailable`.
        """
        if self.draining:
            raise _leaving()
        if re.fullmatch(TOKEN_PATTERN, request):
            reading = await self._reading(request, tenant, deadline, kept=True, shared=True)
            with contextlib.ExitStack() as undo:
                undo.callback(reading.close)
                if await reading.restore():
                    undo.pop_all()
                    return reading
        raise StreamNotFound("There is no such request, or its events are kept no more.")

    async def turn(self, root: Reading, request: str) -> Reading:
        """Read the events of a turn of the response `root`, which were perhaps told before."""
        reading = await self._reading(request, root.tenant, root.deadline, kept=True, shared=root.shared)
        reading.look_back()
        return reading

    async def drain(self, patience: float) -> None:
        """Take nothing new and let what is open end; what still is after `patience` seconds is told to go elsewhere."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while self._open:
                    self._idle.clear()
                    await self._idle.wait()
        for reading in list(self._open):
            reading.end(_leaving())
            if not reading.kept:
                await reading.ask_to_stop()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reading(self, request: str, tenant: str, deadline: float | None, *, kept: bool, shared: bool) -> Reading:
        at = self.subjects.events_at(tenant, request)
        subject = at if shared else self.subjects.events(tenant, self.name, request)
        reading = Reading(self, request, subject, kept, tenant, deadline)
        if shared:
            await reading.listen()
        else:
            self._heard[subject] = reading
        self._open.add(reading)
        if deadline is not None:
            reading.expire_at(deadline)
        return reading

    def closed(self, reading: Reading) -> None:
        """A reading tells that it is."""
        self._open.discard(reading)
        if self._heard.get(reading.subject) is reading:
            del self._heard[reading.subject]
        if not self._open:
            self._idle.set()

    def _hear(self, message: Message) -> None:
        reading = self._heard.get(message.subject)
        if reading is not None:
            reading.feed(message)


class Reading:
    """The events of one request: every one once, tokens in order, the final one last."""

    def __init__(
        self, bridge: Bridge, request: str, subject: str, kept: bool, tenant: str, deadline: float | None
    ) -> None:
        self.request = request
        self.kept = kept
        self.tenant = tenant
        self.deadline = deadline
        self.ended = False  # the final event was taken; set by take
        self.final: Event | None = None  # set by feed and end
        self.is_cut = False  # the final event is this bridge's own, and the request may go on; set by end
        self._bridge = bridge
        self._broker = bridge.broker
        self.subject = subject
        self._listening: Subscription | None = None  # set by listen
        self._expiry: asyncio.TimerHandle | None = None  # set by expire_at
        self._ready: list[Event] = []
        self._news = asyncio.Event()
        self._next: dict[int, int] = {}  # choice → index of its next token
        self._told = 0  # of a response's own events
        self._is_response = is_response(request) is not None  # its tokens are those of its turns
        self._accepted = False
        self._finished: set[int] = set()  # choices
        self._missed = False

    async def listen(self) -> None:
        """Hear what another bridge may have asked for; what was said before is missed, and asked for by `take`."""
        self._listening = await self._broker.listen(self.subject, self.feed)
        self.look_back()

    @property
    def shared(self) -> bool:
        """Whether another bridge may have been asked for it."""
        return self._listening is not None

    def look_back(self) -> None:
        """Something may have been told before anybody listened."""
        self._missed = True

    def feed(self, message: Message) -> None:
        """Hear one event: repetitions are dropped, a gap is noted and filled by the next `take`."""
        if self.final is not None:
            return
        self.subject = message.subject  # a wildcard, which it may have been, costs the broker ten times as much
        event = codec.decode_event(message.data)
        match event:
            case Token():
                place = self._next.get(event.choice, 0)
                if event.choice in self._finished:
                    pass
                elif event.index == place:
                    if event.finish_reason is not None:
                        self._finished.add(event.choice)
                    self._next[event.choice] = place + len(event.token_ids)
                    self._ready.append(event)
                elif event.index > place:
                    self._missed = True
            case Accepted():
                if not self._accepted:
                    self._accepted = True
                    self._ready.append(event)
            case Item() | Turn():
                if event.index == self._told:
                    self._told += 1
                    self._ready.append(event)
                elif event.index > self._told:
                    self._missed = True
            case _ if isinstance(event, FINAL) and self._is_response and not message.sequence:
                self._missed = True  # nothing in it tells how much came before, so that is looked up
            case Done(finish_reasons=reasons) if len(reasons) > len(self._finished) and not self._is_response:
                self._missed = True
            case Cancelled(usage=usage) if usage.completion_tokens > sum(self._next.values()) and not self._is_response:
                self._missed = True
            case Queued() if message.sequence:
                pass  # old news, read back
            case _ if isinstance(event, FINAL) and self._accepted and not (message.sequence or isinstance(event, Done)):
                self._missed = True  # heard, but is it stored? If the request had just ended otherwise, it is not
            case _ if isinstance(event, FINAL):
                self.final = event
                self._ready.append(event)
            case _:
                self._ready.append(event)
        self._news.set()

    def end(self, refusal: Refusal) -> None:
        """Stop reading: what `take` gives last is this."""
        if self.final is None:
            self.is_cut = True
            self.final = Failed(self.request, ErrorBody.of(refusal))
            self._ready.append(self.final)
            self._news.set()

    async def take(self, patience: float) -> list[Event]:
        """Wait for news and return all there is, oldest first; empty after `patience` seconds of silence."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        while True:
            if self._missed:
                await self._catch_up()
            if self._ready:
                break
            if loop.time() >= until:
                return []
            self._news.clear()
            try:
                async with asyncio.timeout(min(SILENCE, until - loop.time())):
                    await self._news.wait()
            except TimeoutError:
                self._missed = True  # perhaps; asking costs a millisecond
        events, self._ready = self._ready, []
        self.ended = self.final is not None
        return events

    async def restore(self) -> bool:
        """Take in what is stored; False where that does not begin at the beginning. Raises `BrokerUnavailable`."""
        stored = await self._broker.replay("EVENTS", self.subject)
        for _ in range(2):  # after an outage, two events may be stored in the wrong order
            for message in stored:
                self.feed(message)
        self._missed = False  # what is still missing is asked for again after a silence
        return self._accepted or bool(self._next) or bool(self._told) or self.final is not None

    async def cancel(self) -> None:
        """Ask whoever has the request to stop, until the final event, which then says so, is taken."""
        clock = asyncio.get_running_loop().time
        for _ in range(CANCELS):
            await self.ask_to_stop()
            until = clock() + 1.0
            while clock() < until:
                await self.take(until - clock())
                if self.ended:
                    return

    async def ask_to_stop(self) -> None:
        await self._broker.notify(self._bridge.subjects.cancel(self.tenant, self.request), b"")

    def expire_at(self, deadline: float) -> None:
        """End it soon after `deadline` (Unix seconds) should nobody else have: all stages may be dead."""
        wait = max(0.0, deadline + GRACE - time.time())
        self._expiry = asyncio.get_running_loop().call_later(wait, self._expire)

    def leave(self) -> None:
        """The reader goes. Unless it has seen the end or the request is kept for it, the request is cancelled."""
        if self.ended or self.kept:
            self.close()
        else:
            self._bridge.spawn(self._abandon())

    def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self._listening is not None:
            self._bridge.spawn(self._listening.close())
            self._listening = None
        self._bridge.closed(self)

    async def _abandon(self) -> None:
        try:
            await self.cancel()
        finally:
            self.close()

    def _expire(self) -> None:
        if self.final is None:
            self.end(DeadlineExceeded("The deadline passed, and nobody has answered."))
            if self._listening is None:  # else others may read it, with more patience
                self._bridge.spawn(self.ask_to_stop())

    async def _catch_up(self) -> None:
        try:
            await self.restore()
        except BrokerUnavailable as error:
            self._missed = False
            log.warning("cannot catch up yet", request=self.request, reason=str(error))


def _leaving() -> Refusal:
    return Overloaded("Penstock is shutting down.", code="shutting_down", retry_after=5.0)

"""The way from a request to its events and back: publishes jobs, and reads each one's events once, in order.

Knows the broker and nothing of HTTP; `penstock submit` reads the same way. Events are heard live on one wildcard
subscription; what was missed, in an outage or a change of publisher, is read back from the stream.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import structlog

from ..schemas import codec
from ..schemas.errors import BrokerUnavailable, Overloaded, Refusal, StreamFull
from ..schemas.events import FINAL, Accepted, Cancelled, Done, ErrorBody, Event, Failed, Token
from ..schemas.jobs import Job, Priority
from ..streams.port import DEADLINE, SCHEMA, Broker, Message
from ..streams.topology import Subjects

log = structlog.get_logger(__name__)

SILENCE = 5.0  # seconds without an event before the stream is asked whether one was missed


class Bridge:
    """One listener with a name of its own; requests opened here answer here."""

    def __init__(self, broker: Broker, subjects: Subjects, name: str | None = None) -> None:
        self.name = name or f"b{secrets.token_hex(8)}"
        self._broker = broker
        self._subjects = subjects
        self._readings: dict[str, Reading] = {}

    async def start(self) -> None:
        await self._broker.listen(self._subjects.events_of(self.name), self._hear)

    async def open(self, job: Job, *, priority: Priority, tenant: str, deadline: float | None = None) -> Reading:
        """Publish a job, which must name this bridge and have an id. Raises `Overloaded` where it is not taken."""
        assert job.id is not None and job.bridge == self.name
        subject = self._subjects.events(tenant, self.name, job.id)
        reading = Reading(self._broker, job.id, subject, self._subjects.cancel(job.id), self._close)
        self._readings[job.id] = reading
        headers = {SCHEMA: codec.JOB} | ({DEADLINE: f"{deadline:.3f}"} if deadline else {})
        try:
            await self._broker.publish(
                self._subjects.jobs(priority, tenant), codec.encode(job), message_id=job.id, headers=headers
            )
        except StreamFull:
            self._close(job.id)
            raise Overloaded("Too many requests are waiting to be looked at.", retry_after=1.0) from None
        except BrokerUnavailable:
            self._close(job.id)
            raise Overloaded("The message broker does not answer.", code="broker_away", retry_after=2.0) from None
        except BaseException:
            self._close(job.id)
            raise
        return reading

    async def shut(self, refusal: Refusal) -> None:
        """End every open reading with this, and stop what it asked for: the process is about to go."""
        for reading in list(self._readings.values()):
            reading.end(refusal)
            await reading.cancel()

    def _close(self, request: str) -> None:
        self._readings.pop(request, None)

    def _hear(self, message: Message) -> None:
        reading = self._readings.get(message.subject.rpartition(".")[2])
        if reading is not None:
            reading.feed(message)


class Reading:
    """The events of one request: every one once, tokens in order, the final one last."""

    def __init__(
        self, broker: Broker, request: str, subject: str, cancel_subject: str, on_close: Callable[[str], None]
    ) -> None:
        self.request = request
        self.ended = False  # the final event was taken; set by take
        self._broker = broker
        self._subject = subject
        self._cancel_subject = cancel_subject
        self._on_close = on_close
        self._ready: list[Event] = []
        self._news = asyncio.Event()
        self._next: dict[int, int] = {}  # choice → index of its next token
        self._accepted = False
        self._final: Event | None = None
        self._missed = False

    def feed(self, message: Message) -> None:
        """Hear one event: repetitions are dropped, a gap is noted and filled by the next `take`."""
        if self._final is not None:
            return
        event = codec.decode_event(message.data)
        match event:
            case Token():
                place = self._next.get(event.choice, 0)
                if event.index == place:
                    self._next[event.choice] = place + len(event.token_ids)
                    self._ready.append(event)
                elif event.index > place:
                    self._missed = True
            case Accepted():
                if not self._accepted:
                    self._accepted = True
                    self._ready.append(event)
            case Done(usage=usage) | Cancelled(usage=usage) if usage.completion_tokens > sum(self._next.values()):
                self._missed = True
            case _ if isinstance(event, FINAL):
                self._final = event
                self._ready.append(event)
            case _:
                self._ready.append(event)
        self._news.set()

    def end(self, refusal: Refusal) -> None:
        """Stop reading: what `take` gives last is this."""
        if self._final is None:
            self._final = Failed(self.request, ErrorBody.of(refusal))
            self._ready.append(self._final)
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
        self.ended = self._final is not None
        return events

    async def cancel(self) -> None:
        """Ask whoever has the request to stop; the final event then says so."""
        await self._broker.notify(self._cancel_subject, b"")

    def close(self) -> None:
        self._on_close(self.request)

    async def _catch_up(self) -> None:
        try:
            stored = await self._broker.replay("EVENTS", self._subject)
            for _ in range(2):  # after an outage, two events may be stored in the wrong order
                for message in stored:
                    self.feed(message)
        except BrokerUnavailable as error:
            log.warning("cannot catch up yet", request=self.request, reason=str(error))
        self._missed = False  # what is still missing is asked for again after a silence

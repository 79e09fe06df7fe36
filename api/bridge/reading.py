"""Reads the events of one request: live, and from the stream where some were missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import structlog

from ...schemas.errors import BrokerUnavailable, DeadlineExceeded, Refusal
from ...schemas.events import (
    FINAL,
    Accepted,
    Cancelled,
    Done,
    ErrorBody,
    Event,
    Expired,
    Failed,
    ItemEvent,
    Queued,
    Token,
    Turn,
)
from ...schemas.loops import is_response
from ...schemas.wire import codec
from ...schemas.wire.hops import worker_of
from ...streams.port import HOPS, Broker, Message, Subscription
from ...streams.topology import Subjects
from .spans import RequestSpan

log = structlog.get_logger(__name__)

SILENCE = 5.0  # seconds without an event before the stored ones are replayed, for one may have been missed
GRACE = 2.0  # seconds after a deadline in which the stages may publish `Expired` themselves
CANCELS = 5  # cancel messages, a second apart: a stage that restarts misses some


class Opener(Protocol):
    """What a reading needs of its bridge."""

    @property
    def broker(self) -> Broker: ...

    @property
    def subjects(self) -> Subjects: ...

    last_answer: float  # when the newest answer began, by the monotonic clock; set by Reading.feed
    last_failure: float  # when a request failed last; set by Reading.feed and end

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background."""

    def closed(self, reading: Reading) -> None:
        """Forget a reading; it calls this when it closes."""


class Reading:
    """The events of one request: every one once, tokens in order, the final one last."""

    def __init__(
        self, bridge: Opener, request: str, subject: str, kept: bool, tenant: str, deadline: float | None
    ) -> None:
        self.request = request
        self.kept = kept
        self.tenant = tenant
        self.deadline = deadline
        self.ended = False  # whether `take` has returned the final event; set by take
        self.final: Event | None = None  # set by feed and end
        self.is_cut = False  # whether `final` is this bridge's own, and the request may continue; set by end
        self.model: str | None = None  # that answers; set by feed
        self.worker: str | None = None  # that answered last; set by feed with the final event
        self.first_token: float | None = None  # seconds from the opening to the first token; set by feed
        self.span: RequestSpan | None = None  # set by Bridge, and by _end_span
        self._opened = time.monotonic()
        self._bridge = bridge
        self._broker = bridge.broker
        self.subject = subject
        self._listening: Subscription | None = None  # set by listen
        self._expiry: asyncio.TimerHandle | None = None  # set by expire_at
        self._ready: list[Event] = []
        self._news = asyncio.Event()
        self._next: dict[int, int] = {}  # choice → index of its next token
        self._next_item = 0  # index of a response's next own event
        self._is_response = is_response(request) is not None  # its turns have the tokens
        self._accepted = False
        self._finished: set[int] = set()  # choices
        self._missed = False
        self._heard: list[Message] | None = None  # during a replay

    async def listen(self) -> None:
        """Subscribe to events that another bridge may have asked for; `take` replays those published before."""
        self._listening = await self._broker.listen(self.subject, self.feed)
        self.look_back()

    @property
    def shared(self) -> bool:
        """Whether another bridge may have opened the request."""
        return self._listening is not None

    def look_back(self) -> None:
        """Have `take` replay what was published before this reading subscribed."""
        self._missed = True

    def feed(self, message: Message) -> None:
        """Take one event from the broker: a repetition is dropped, and after a gap the next `take` replays.

        During a replay it waits for what is stored, which may fill the gap before it.
        """
        if self.final is not None:
            return
        if self._heard is not None:
            self._heard.append(message)
            return
        self.subject = message.subject  # to replay a wildcard, as it may have been, costs the broker ten times as much
        event = codec.decode_event(message.data)
        match event:
            case Token():
                expected = self._next.get(event.choice, 0)
                if event.choice in self._finished:
                    pass
                elif event.index == expected:
                    if event.finish_reason is not None:
                        self._finished.add(event.choice)
                    self._next[event.choice] = expected + len(event.token_ids)
                    if self.first_token is None:
                        self._bridge.last_answer = now = time.monotonic()
                        self.first_token = now - self._opened
                        if self.span is not None:
                            self.span.first_token()
                    self._ready.append(event)
                elif event.index > expected:
                    self._missed = True
            case Accepted():
                if not self._accepted:
                    self._accepted = True
                    self.model = event.model
                    self._ready.append(event)
            case ItemEvent() | Turn():
                if event.index == self._next_item:
                    self._next_item += 1
                    self._ready.append(event)
                elif event.index > self._next_item:
                    self._missed = True
            case _ if isinstance(event, FINAL) and self._is_response and not message.sequence:
                self._missed = True  # it does not say how many events precede it
            case Done(finish_reasons=reasons) if len(reasons) > len(self._finished) and not self._is_response:
                self._missed = True
            case Cancelled(usage=usage) if usage.completion_tokens > sum(self._next.values()) and not self._is_response:
                self._missed = True
            case Queued() if message.sequence:
                pass  # a replayed queue position is out of date
            case _ if isinstance(event, FINAL) and self._accepted and not (message.sequence or isinstance(event, Done)):
                self._missed = True  # it is not stored if the request had just ended otherwise; the stream decides
            case _ if isinstance(event, FINAL):
                self.final = event
                self.worker = worker_of(message.headers.get(HOPS))
                self._end_span()
                self._ready.append(event)
                if isinstance(event, Expired) or (isinstance(event, Failed) and event.error.status == 500):
                    self._bridge.last_failure = time.monotonic()
            case _:
                self._ready.append(event)
        self._news.set()

    def end(self, refusal: Refusal) -> None:
        """Stop reading: the last event that `take` returns is this failure."""
        if self.final is None:
            self.is_cut = True
            self._bridge.last_failure = time.monotonic()
            self.final = Failed(self.request, ErrorBody.of(refusal))
            self._ready.append(self.final)
            self._news.set()

    async def take(self, patience: float) -> list[Event]:
        """Wait for events and return all there are, oldest first; none after `patience` seconds of silence."""
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
                self._missed = True  # perhaps; a replay costs a millisecond
        events, self._ready = self._ready, []
        self.ended = self.final is not None
        return events

    async def restore(self) -> bool:
        """Replay the stored events; False where the first ones are not among them. Raises `BrokerUnavailable`."""
        self._heard, stored = [], list[Message]()
        try:
            stored = await self._broker.replay("EVENTS", self.subject)
        finally:
            heard, self._heard = self._heard, None
            for _ in range(2):  # after an outage, two events may be stored in the wrong order
                for message in stored:
                    self.feed(message)
            self._missed = False  # what is still missing is replayed after a silence, or now if it was heard meanwhile
            for message in heard or ():
                self.feed(message)
        return self._accepted or bool(self._next) or bool(self._next_item) or self.final is not None

    async def cancel(self) -> None:
        """Ask the stages to stop the request, several times, until `take` has returned the final event."""
        clock = asyncio.get_running_loop().time
        for _ in range(CANCELS):
            await self.ask_to_stop()
            until = clock() + 1.0
            while clock() < until:
                await self.take(until - clock())
                if self.ended:
                    return

    async def ask_to_stop(self) -> None:
        """Publish one cancel message."""
        await self._broker.notify(self._bridge.subjects.cancel(self.tenant, self.request), b"")

    def expire_at(self, deadline: float) -> None:
        """End the reading soon after `deadline` (Unix seconds) unless a stage has: all may be dead."""
        wait = max(0.0, deadline + GRACE - self._broker.now())
        self._expiry = asyncio.get_running_loop().call_later(wait, self._expire)

    def leave(self) -> None:
        """Close the reading, and cancel the request unless it has ended or is kept."""
        if self.ended or self.kept:
            self.close()
        else:
            self._bridge.spawn(self._abandon())

    def close(self) -> None:
        """Unsubscribe; the request continues."""
        self._end_span()
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

    def _end_span(self) -> None:
        if self.span is not None:
            self.span.end(self.final)
            self.span = None

    def _expire(self) -> None:
        if self.final is None:
            self.end(DeadlineExceeded("The deadline passed before the request was answered."))
            if self._listening is None:  # else other clients may read it, with later deadlines
                self._bridge.spawn(self.ask_to_stop())

    async def _catch_up(self) -> None:
        try:
            await self.restore()
        except BrokerUnavailable as error:
            self._missed = False
            log.warning("broker unavailable, waiting to replay", request=self.request, reason=str(error))

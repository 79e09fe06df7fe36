"""The events of one request as its client gets them: heard live, read back where something was missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import structlog

from ...schemas import codec
from ...schemas.errors import BrokerUnavailable, DeadlineExceeded, Refusal
from ...schemas.events import FINAL, Accepted, Cancelled, Done, ErrorBody, Event, Failed, ItemEvent, Queued, Token, Turn
from ...schemas.loops import is_response
from ...streams.port import Broker, Message, Subscription
from ...streams.topology import Subjects

log = structlog.get_logger(__name__)

SILENCE = 5.0  # seconds without an event before the stream is asked whether one was missed
GRACE = 2.0  # seconds after a deadline in which the stages may say so themselves
CANCELS = 5  # times that a request is asked to stop, a second apart: a stage that restarts does not hear it


class Opener(Protocol):
    """The bridge, as a reading sees it."""

    @property
    def broker(self) -> Broker: ...

    @property
    def subjects(self) -> Subjects: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what nobody waits for."""

    def closed(self, reading: Reading) -> None:
        """A reading tells that it is."""


class Reading:
    """The events of one request: every one once, tokens in order, the final one last."""

    def __init__(
        self, bridge: Opener, request: str, subject: str, kept: bool, tenant: str, deadline: float | None
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
            case ItemEvent() | Turn():
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

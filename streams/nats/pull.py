"""A JetStream pull consumer that keeps requests outstanding, so that a message waits for no round trip.

One task a consumer opens it, watches its heartbeats, and opens it again after a loss (outage, deletion, a new leader).
Between two losses the work is done by the callback and by `take`: count what was asked for and has not come, and ask
for more when that and the buffer together have fallen to half the prefetch.

A consumer with `takeover` belongs to the last process that opened it, named in the consumer's metadata; a former
holder that notices hands back what still reaches it and delivers nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import orjson
from nats import nuid
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error

from ...schemas.errors import PenstockError, StartupError
from ..port import ConsumerSpec, Delivery, Message
from .link import Link, status
from .management import (
    CONSUMER_EXISTS,
    CONSUMER_MISSING,
    ApiError,
    Json,
    allowed,
    call,
    consumer_config,
    nanoseconds,
)

log = logging.getLogger(__name__)

_EXPIRES = 30.0  # seconds until the server gives a request up
_HEARTBEAT = 3.0  # seconds between signs of life while nothing is delivered
_RETRY_WAIT = 0.25  # seconds before a consumer that could not be opened is tried again
_IDLE = "100"
_EXPIRED = ("404", "408")
_HOLDER = "penstock-holder"


class Origin(NamedTuple):
    """What the server writes into a delivery's reply subject."""

    attempt: int
    sequence: int


def origin(reply: str) -> Origin:
    """Parse `$JS.ACK.<stream>.<consumer>.<attempt>.<sequence>.…`, or its later form with domain and account (ADR-15).

    Raises `ValueError` for anything else.
    """
    tokens = reply.split(".")
    if len(tokens) == 9:
        return Origin(int(tokens[4]), int(tokens[5]))
    if len(tokens) >= 11:
        return Origin(int(tokens[6]), int(tokens[7]))
    raise ValueError(f"not the reply subject of a delivery: {reply!r}")


class JetStreamDelivery:
    """Implements `Delivery`: every answer is a plain publish to the reply subject."""

    __slots__ = ("_link", "_reply", "attempt", "message", "received")

    def __init__(self, link: Link, reply: str, message: Message, attempt: int, received: float) -> None:
        self._link = link
        self._reply = reply
        self.message = message
        self.attempt = attempt
        self.received = received

    async def ack(self) -> None:
        await self._link.send(self._reply, b"+ACK")

    async def nak(self, delay: float = 0.0) -> None:
        await self._link.send(self._reply, b'-NAK {"delay": %d}' % nanoseconds(delay) if delay else b"-NAK")

    async def term(self, reason: str) -> None:
        await self._link.send(self._reply, f"+TERM {reason}".encode())

    async def in_progress(self) -> None:
        await self._link.send(self._reply, b"+WPI")


class PullConsumer:
    """Implements `Consumer`. Made by `open`."""

    def __init__(self, link: Link, stream: str, spec: ConsumerSpec, prefetch: int) -> None:
        self._link = link
        self._stream = stream
        self._spec = spec
        self._prefetch = prefetch
        self._holder = nuid.NUID().next().decode()
        self._inbox = link.new_inbox()
        self._clock = asyncio.get_running_loop().time
        self._buffer: deque[JetStreamDelivery] = deque()
        self._requested = 0  # asked for and not come; `_start` resets it
        self._generation = 0  # of requests; an end reported for an older one counts no more
        self._pulling = False  # set by `_start`, reset by `_lose`
        self._heard = 0.0
        self._pause = 0.0  # before opening again; `_lose` sets it
        self._lost = asyncio.Event()
        self._arrived = asyncio.Event()
        self._closed = False
        self._subscription: Subscription  # `open` sets these
        self._keeper: asyncio.Task[None]
        self._forget: Callable[[], None]

    @classmethod
    async def open(cls, link: Link, stream: str, spec: ConsumerSpec, *, prefetch: int) -> PullConsumer:
        """Create the consumer, or join it, and begin to ask. Raises `StartupError` if the server refuses it."""
        consumer = cls(link, stream, spec, prefetch)
        try:
            await (consumer._take_over() if spec.takeover else consumer._create(consumer_config(spec)))
        except ApiError as error:
            raise StartupError(f"consumer {spec.name} of stream {stream}: {error}") from error
        consumer._subscription = await link.subscribe(f"{consumer._inbox}.*", consumer._receive)
        consumer._forget = link.on_restored(consumer._lose)
        consumer._keeper = asyncio.create_task(consumer._keep())
        await consumer._start()
        return consumer

    @property
    def closed(self) -> bool:
        return self._closed

    async def take(self, limit: int) -> list[Delivery]:
        while not self._closed:
            if not self._buffer:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            taken = self._pop(limit)
            try:
                await self._ask()
            except asyncio.CancelledError:
                self._buffer.extendleft(reversed(taken))
                raise
            if taken:
                return list(taken)
        return []

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        self._forget()
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        await self._hand_back()
        await self._link.unsubscribe(self._subscription, drain=True)

    def _pop(self, limit: int) -> list[JetStreamDelivery]:
        taken: list[JetStreamDelivery] = []
        stale = self._clock() - self._spec.ack_wait
        while self._buffer and len(taken) < limit:
            delivery = self._buffer.popleft()
            # A lease that ran out in the buffer is no longer ours: the server has lent the message again.
            if delivery.received > stale:
                taken.append(delivery)
        return taken

    async def _ask(self) -> None:
        wanted = self._prefetch - len(self._buffer) - self._requested
        # A request sent while disconnected would reach the server beside those made after the reconnect.
        if 2 * wanted < self._prefetch or not self._pulling or not self._link.connected:
            return
        self._requested += wanted
        self._heard = self._clock()
        request = {"batch": wanted, "expires": nanoseconds(_EXPIRES), "idle_heartbeat": nanoseconds(_HEARTBEAT)}
        await self._link.send(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._spec.name}",
            orjson.dumps(request),
            reply=f"{self._inbox}.{self._generation}",
        )

    async def _receive(self, message: Msg) -> None:
        self._heard = self._clock()
        if not message.reply:
            await self._request_ended(message)
            return
        self._requested = max(0, self._requested - 1)
        attempt, sequence = origin(message.reply)
        stored = Message(message.subject, message.data, message.headers or {}, sequence)
        delivery = JetStreamDelivery(self._link, message.reply, stored, attempt, self._heard)
        if self._closed or self._keeper.done():
            await delivery.nak()
        else:
            self._buffer.append(delivery)
            self._arrived.set()

    async def _request_ended(self, message: Msg) -> None:
        code = status(message.headers)
        if code == _IDLE or message.subject != f"{self._inbox}.{self._generation}":
            return
        remaining = (message.headers or {}).get("Nats-Pending-Messages")
        if code in _EXPIRED and remaining is not None:
            self._requested = max(0, self._requested - int(remaining))
            await self._ask()
        else:
            # Deleted, a new leader, a server going down, nobody there: one answer to all of them.
            self._lose(_RETRY_WAIT)

    def _lose(self, pause: float = 0.0) -> None:
        self._pulling = False
        self._pause = pause
        self._lost.set()

    async def _start(self) -> None:
        self._lost.clear()
        self._generation += 1
        self._requested = 0
        self._pulling = True
        await self._ask()

    async def _keep(self) -> None:
        """Open the consumer again after every loss; ends when another holder has taken it over."""
        while True:
            await self._loss()
            self._pulling = False
            await asyncio.sleep(self._pause)
            try:
                if self._spec.takeover and await self._deposed():
                    break
                if not self._spec.takeover:
                    await self._create(consumer_config(self._spec))
            except (PenstockError, Error) as error:
                log.warning("consumer %s of stream %s: %s", self._spec.name, self._stream, error)
                self._lose(_RETRY_WAIT)
            else:
                await self._start()
        log.warning("consumer %s of stream %s has a new holder", self._spec.name, self._stream)
        await self._hand_back()

    async def _loss(self) -> None:
        """Return when the server has said that requests are void, or has been silent where it owes heartbeats."""
        silence = 2 * _HEARTBEAT
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence):
                    await self._lost.wait()
            if self._requested and self._link.connected and self._clock() - self._heard > silence:
                log.warning("consumer %s of stream %s: heartbeats missing", self._spec.name, self._stream)
                self._pause = 0.0
                return

    async def _create(self, config: Json, *, only_new: bool = False) -> None:
        request = {"stream_name": self._stream, "config": config, "action": "create" if only_new else ""}
        await call(self._link, f"CONSUMER.CREATE.{self._stream}.{self._spec.name}", request)

    async def _info(self) -> Json | None:
        try:
            return await call(self._link, f"CONSUMER.INFO.{self._stream}.{self._spec.name}")
        except ApiError as error:
            if error.code == CONSUMER_MISSING:
                return None
            raise

    async def _take_over(self) -> None:
        """Replace whatever consumer there is by ours, which starts behind what was acked without a gap."""
        while True:
            start = 1
            if (info := await self._info()) is not None:
                start = info["ack_floor"]["stream_seq"] + 1
                with allowed(CONSUMER_MISSING):
                    await call(self._link, f"CONSUMER.DELETE.{self._stream}.{self._spec.name}")
            with allowed(*CONSUMER_EXISTS):  # somebody was faster, and is the former holder now
                await self._create(self._held_config(start), only_new=True)
                return

    async def _deposed(self) -> bool:
        """Whether another holder has the consumer; if nobody has, it becomes ours again from the start."""
        if (info := await self._info()) is None:
            with allowed(*CONSUMER_EXISTS):
                await self._create(self._held_config(1), only_new=True)
                return False
            info = await self._info()
        holder: str | None = info["config"].get("metadata", {}).get(_HOLDER) if info is not None else None
        return holder != self._holder

    def _held_config(self, start: int) -> Json:
        place = {"deliver_policy": "by_start_sequence", "opt_start_seq": start}
        return consumer_config(self._spec) | place | {"metadata": {_HOLDER: self._holder}}

    async def _hand_back(self) -> None:
        while self._buffer:
            await self._buffer.popleft().nak()

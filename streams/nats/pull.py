"""A JetStream pull consumer that keeps requests outstanding, so that no message waits for a round trip.

One task per consumer opens it, watches its heartbeats, and reopens it after a loss (outage, deletion, new leader).
Otherwise the callback and `take` do the work: they count the messages requested but not received, and request more when
these and the buffer together have fallen to half the prefetch.

A consumer with `takeover` belongs to the last process that opened it, which the consumer's metadata names. A former
holder that finds another name there returns the messages that still arrive and delivers nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

import orjson
from nats import nuid
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error

from ...schemas.errors import PenstockError, StartupError
from ..beats import until_beat
from ..port import ConsumerSpec, Delivery, Message
from .connection.link import Link, status
from .header_names import with_our_names
from .management import (
    CONSUMER_EXISTS,
    CONSUMER_MISSING,
    INSUFFICIENT,
    STREAM_MISSING,
    TOO_MANY_UNSETTLED,
    ApiError,
    Json,
    advice,
    allowed,
    call,
    consumer_config,
    nanoseconds,
)

log = logging.getLogger(__name__)

_EXPIRES = 30.0  # seconds until the server drops a request
_HEARTBEAT = 3.0  # seconds between the server's heartbeats while it delivers nothing
_MOST_BYTES = 16 << 20  # that a request may bring, and half of what lies here unread when the next one is sent
_RETRY_WAIT = 0.25  # seconds before a failed open is retried
_UNTOLD = 4  # times that a stream is not found: that of a model which was removed, while its stage has yet to learn it
_IDLE = "100"
_EXPIRED = ("404", "408")
_BROUGHT = ("Batch Completed", "Message Size Exceeds MaxBytes")  # all messages, or the bytes, that were requested
_HOLDER = "penstock-holder"


class ReplySubject(NamedTuple):
    """What the server writes into the reply subject of a delivery."""

    attempt: int
    sequence: int
    time: float  # when the message was stored, in Unix seconds


def parse_reply_subject(reply: str) -> ReplySubject:
    """Parse `$JS.ACK.<stream>.<consumer>.<attempt>.<sequence>.<n>.<time>.…`, or its later form with domain and account
    (ADR-15).

    Raises `ValueError` for anything else.
    """
    tokens = reply.split(".")
    if len(tokens) == 9:
        return ReplySubject(int(tokens[4]), int(tokens[5]), int(tokens[7]) / 1e9)
    if len(tokens) >= 11:
        return ReplySubject(int(tokens[6]), int(tokens[7]), int(tokens[9]) / 1e9)
    raise ValueError(f"not the reply subject of a delivery: {reply!r}")


class JetStreamDelivery:
    """Implements `Delivery`: every acknowledgement is a plain publish to the reply subject, `ack` one without haste."""

    __slots__ = ("_link", "_reply", "attempt", "message", "received")

    def __init__(self, link: Link, reply: str, message: Message, attempt: int, received: float) -> None:
        self._link = link
        self._reply = reply
        self.message = message
        self.attempt = attempt
        self.received = received

    async def ack(self) -> None:
        await self._link.send(self._reply, b"+ACK", linger=True)

    async def nak(self, delay: float = 0.0) -> None:
        await self._link.send(self._reply, b'-NAK {"delay": %d}' % nanoseconds(delay) if delay else b"-NAK")

    async def term(self, reason: str) -> None:
        await self._link.send(self._reply, f"+TERM {reason}".encode())

    async def in_progress(self) -> None:
        await self._link.send(self._reply, b"+WPI")

    def shed(self) -> None:
        self.message = replace(self.message, data=b"")


def _description(message: Msg) -> str:
    return (message.headers or {}).get("Description", "")


class PullConsumer:
    """Implements `Consumer`. Create it with `open`."""

    def __init__(self, link: Link, stream: str, spec: ConsumerSpec, prefetch: int) -> None:
        self._link = link
        self._stream = stream
        self._spec = spec
        self._prefetch = prefetch
        self._holder = nuid.NUID().next().decode()
        self._inbox = link.new_inbox()
        self._clock = asyncio.get_running_loop().time
        self._buffer: deque[JetStreamDelivery] = deque()
        self._held = 0  # bytes in the buffer
        self._requested = 0  # messages requested and not received; `_start` resets it
        self._generation = 0  # of requests; the end of an older one is ignored
        self._pulling = False  # set by `_start`, reset by `_lose`
        self._heard = 0.0
        self._pause = 0.0  # seconds before reopening; set by `_lose`
        self._lost = asyncio.Event()
        self._arrived = asyncio.Event()
        self._closed = False
        self._subscription: Subscription  # `open` sets these
        self._keeper: asyncio.Task[None]
        self._forget: Callable[[], None]

    @classmethod
    async def open(cls, link: Link, stream: str, spec: ConsumerSpec, *, prefetch: int) -> PullConsumer:
        """Create or join the consumer and start pulling. Raises `StartupError` if the server refuses it."""
        consumer = cls(link, stream, spec, prefetch)
        try:
            await (consumer._take_over() if spec.takeover else consumer._create(consumer_config(spec)))
        except ApiError as error:
            raise StartupError(f"consumer {spec.name} of stream {stream}: {error}{advice(error)}") from error
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
                self._held += sum(len(delivery.message.data) for delivery in taken)
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
            self._held -= len(delivery.message.data)
            # If its lease has expired in the buffer, the server has delivered the message again.
            if delivery.received > stale:
                taken.append(delivery)
        return taken

    async def _ask(self) -> None:
        wanted = self._prefetch - len(self._buffer) - self._requested
        # A request sent while disconnected would reach the server in addition to those after the reconnect.
        if 2 * wanted < self._prefetch or not self._pulling or not self._link.connected:
            return
        # The server cuts off whoever has too much to read, and with it everything else on the connection.
        most = max(_MOST_BYTES, 2 * self._link.max_payload)
        if 2 * self._held >= most:
            return
        self._requested += wanted
        self._heard = self._clock()
        request = {"batch": wanted, "max_bytes": most, "expires": nanoseconds(_EXPIRES)}
        request["idle_heartbeat"] = nanoseconds(_HEARTBEAT)
        await self._link.send(
            f"{self._link.access.api}CONSUMER.MSG.NEXT.{self._stream}.{self._spec.name}",
            orjson.dumps(request),
            reply=f"{self._inbox}.{self._generation}",
        )

    def _receive(self, message: Msg) -> Awaitable[None] | None:
        self._heard = self._clock()
        if not message.reply:
            is_of_ours = message.subject == f"{self._inbox}.{self._generation}"
            code = status(message.headers)
            return self._request_ended(message, code) if is_of_ours and code != _IDLE else None
        self._requested = max(0, self._requested - 1)
        attempt, sequence, time = parse_reply_subject(message.reply)
        stored = Message(message.subject, message.data, with_our_names(message.headers), sequence, time)
        delivery = JetStreamDelivery(self._link, message.reply, stored, attempt, self._heard)
        if self._closed or self._keeper.done():
            return delivery.nak()
        self._buffer.append(delivery)
        self._held += len(message.data)
        self._arrived.set()
        return None

    async def _request_ended(self, message: Msg, code: str | None) -> None:
        remaining = (message.headers or {}).get("Nats-Pending-Messages")
        if remaining is not None and (code in _EXPIRED or _description(message) in _BROUGHT):
            self._requested = max(0, self._requested - int(remaining))
            await self._ask()
        else:
            # Consumer deleted, new leader, server shutting down or absent: reopen in every case.
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
        """Reopen the consumer after every loss; return when another holder has taken it over."""
        failed = 0  # times in a row; each is told less often
        while True:
            await self._loss()
            self._pulling = False
            await asyncio.sleep(self._pause)
            try:
                if self._spec.takeover and await self._is_replaced():
                    break
                if not self._spec.takeover:
                    await self._create(consumer_config(self._spec))
            except (PenstockError, Error) as error:
                failed += 1
                is_missing = isinstance(error, ApiError) and error.code == STREAM_MISSING
                if failed.bit_count() == 1 and failed > (_UNTOLD if is_missing else 0):
                    log.warning("consumer %s of stream %s: %s%s", self._spec.name, self._stream, error, advice(error))
                self._lose(_RETRY_WAIT)
            else:
                failed = 0
                await self._start()
        log.warning("consumer %s of stream %s has a new holder", self._spec.name, self._stream)
        await self._hand_back()

    async def _loss(self) -> None:
        """Return when the server has cancelled the requests, or has missed its heartbeats."""
        silence = 2 * _HEARTBEAT
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(silence)):
                    await self._lost.wait()
            if self._requested and self._link.connected and self._clock() - self._heard > silence:
                log.warning("consumer %s of stream %s: heartbeats missing", self._spec.name, self._stream)
                self._link.isolation.asked(silence)
                self._pause = 0.0
                return

    async def _create(self, config: Json, *, only_new: bool = False) -> None:
        request = {"stream_name": self._stream, "config": config, "action": "create" if only_new else ""}
        # With the filter in the subject, permissions can bind it.
        method = f"CONSUMER.CREATE.{self._stream}.{self._spec.name}.{self._spec.subject}"
        try:
            await call(self._link, method, request, retry_on=INSUFFICIENT)
        except ApiError as error:
            most = re.search(r"limit of ([0-9]+)", str(error))
            if error.code != TOO_MANY_UNSETTLED or most is None:
                raise
            log.warning(
                "consumer %s of stream %s: the account allows %s unsettled messages of %d wanted; raise its "
                "max_ack_pending, or the slow requests of some may keep those of others waiting",
                self._spec.name,
                self._stream,
                most[1],
                config["max_ack_pending"],
            )
            await self._create(config | {"max_ack_pending": int(most[1])}, only_new=only_new)

    async def _info(self) -> Json | None:
        try:
            return await call(self._link, f"CONSUMER.INFO.{self._stream}.{self._spec.name}")
        except ApiError as error:
            if error.code == CONSUMER_MISSING:
                return None
            raise

    async def _take_over(self) -> None:
        """Replace any existing consumer by ours, which starts behind the contiguous acknowledged messages."""
        while True:
            start = 1
            if (info := await self._info()) is not None:
                start = info["ack_floor"]["stream_seq"] + 1
                with allowed(CONSUMER_MISSING):
                    await call(self._link, f"CONSUMER.DELETE.{self._stream}.{self._spec.name}")
            with allowed(*CONSUMER_EXISTS):  # another process was faster: replace its consumer
                await self._create(self._held_config(start), only_new=True)
                return

    async def _is_replaced(self) -> bool:
        """Whether another holder has the consumer; if none has, recreate it as ours, from the first message."""
        if (info := await self._info()) is None:
            with allowed(*CONSUMER_EXISTS):
                await self._create(self._held_config(1), only_new=True)
                return False
            info = await self._info()
        holder: str | None = info["config"].get("metadata", {}).get(_HOLDER) if info is not None else None
        return holder != self._holder

    def _held_config(self, start: int) -> Json:
        position = {"deliver_policy": "by_start_sequence", "opt_start_seq": start}
        return consumer_config(self._spec) | position | {"metadata": {_HOLDER: self._holder}}

    async def _hand_back(self) -> None:
        while self._buffer:
            await self._buffer.popleft().nak()

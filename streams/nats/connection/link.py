"""One connection to NATS: exchanges (request and reply), one-way sends, and subscriptions. Knows nothing of JetStream.

The link resends an exchange, under the same token, until it is answered or times out, so every request must be harmless
to repeat. First sends leave in the order of the calls. During an outage the link holds ordinary exchanges; after the
reconnect it runs the recovery hook, which restores what the server may have lost, then sends them in the same order.

It does not use nats-py's own `request` and `flush`: `request` costs several times as much, and a cancelled or timed-out
`flush` makes the next PONG raise inside nats-py's read loop, which then stops reading. nats-py's `subscribe` swallows a
cancellation that arrives while it waits for space in its buffer; the link raises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import (
    ConnectionClosedError,
    ConnectionDrainingError,
    Error,
    OutboundBufferLimitError,
)

from ....schemas.errors import BrokerAway, BrokerDenied, BrokerUnavailable, PayloadTooLarge, PenstockError, StartupError
from .access import Access
from .client import Callback, DirectClient, cancellations
from .isolation import Isolation
from .opening import Denial, close_client, denial, open_client, public_address, refusal

log = logging.getLogger(__name__)

NO_RESPONDERS = "503"

_SWEEP = 0.1  # seconds between checks of unanswered exchanges, and before one without responders is resent
_RESEND_AFTER = 1.0  # seconds without an answer
_LARGE = 64 << 10  # bytes that may be under way for longer than that
_RECOVERY_WAIT = 0.5  # seconds before a failed recovery is retried
_REFUSED_FOR = 2.0  # timeouts for which a server may refuse a part that it accepted before
_NOT_SENT = (ConnectionClosedError, ConnectionDrainingError, OutboundBufferLimitError)


@dataclass(slots=True, eq=False)
class _Exchange:
    """A message that waits for its answer. The sender sets `resend_at`; `_sweep` and `_answered` end it."""

    subject: str
    data: bytes
    headers: dict[str, str] | None
    deadline: float
    resend_at: float
    answer: asyncio.Future[Msg]
    trouble: str = "no answer"


class Link:
    """A connection that reconnects by itself; create it with `connect`, and use it in one event loop."""

    def __init__(self, url: str, timeout: float, access: Access) -> None:
        self.address = public_address(url)
        self.timeout = timeout
        self.access = access
        self._url = url
        self._client = DirectClient(access)
        self._loop = asyncio.get_running_loop()
        self.isolation = Isolation(self._loop.time)
        self._inbox = ""  # set by `connect`
        self._refused_at: float | None = None  # when a server first refused to have us back
        self.refused: asyncio.Future[StartupError] = self._loop.create_future()  # set when it goes on refusing
        self._denied: set[Denial] = set()  # that the server has told us
        self._is_deaf = False  # set when the server denies us the inbox
        self._count = 0
        self._open: dict[str, _Exchange] = {}
        self._hook: Callable[[], Awaitable[None]] | None = None  # set by `on_recover`
        self._restored: list[Callable[[], None]] = []
        self._unanswered = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._held = False  # set by `disconnected`, reset at the end of `_recover`
        self.outages = 0
        self._subscriptions: set[Subscription] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        timeout: float,  # noqa: ASYNC109  (of exchanges, not of this)
        access: Access | None = None,
    ) -> Link:
        """Connect to the first server in `url` that answers; every exchange times out after `timeout` seconds.

        Raises `BrokerAway` once each server has failed once, and `StartupError` if one of them refuses us or a file of
        `access` is of no use. Later the link reconnects however long that takes, but see `refused`.
        """
        link = cls(url, timeout, access or Access())
        await open_client(link._client, url, link.access, name, link)
        link._inbox = f"{link._client.new_inbox()}."
        await link.subscribe(f"{link._inbox}*", link._answered)
        link._tasks = [asyncio.create_task(link._sweep()), asyncio.create_task(link._recover())]
        try:
            await link.flush()
        except BaseException as error:
            await link.close()
            if isinstance(error, BrokerUnavailable):
                raise BrokerAway(f"NATS at {link.address} does not answer: {error}") from error
            raise
        return link

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def server_version(self) -> str:
        return str(self._client._server_info.get("version", ""))

    def has(self, what: str) -> bool:
        """Whether the server that we are connected to has a `cluster`, or `jetstream`, which others of it may."""
        return bool(self._client._server_info.get(what))

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    def on_recover(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run `hook` after each reconnect, before sending the exchanges held meanwhile."""
        self._hook = hook

    def on_restored(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each recovery; returns a function that removes it."""
        self._restored.append(callback)
        return lambda: self._restored.remove(callback)

    async def exchange(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None, *, at_once: bool = False
    ) -> Msg:
        """Send a request and return the answer. Raises `BrokerUnavailable` after the timeout.

        `at_once`: do not wait for a recovery in progress (for requests of the recovery itself).
        """
        self._count += 1
        token = str(self._count)
        now = self._loop.time()
        exchange = _Exchange(subject, data, headers, now + self.timeout, now, self._loop.create_future())
        self._open[token] = exchange
        self._unanswered.set()
        try:
            if self._client.is_connected and (at_once or not self._held):
                await self._send(token, exchange)
            elif not at_once:
                exchange.resend_at = exchange.deadline  # so that `_sweep` does not send it out of order
                exchange.trouble = "not connected"
            return await exchange.answer
        finally:
            del self._open[token]

    async def flush(self) -> None:
        """Return when the server has processed everything sent before."""
        await self.exchange(f"{self._inbox}{self._count + 1}", b"")  # to its own reply subject: it answers itself

    def check_allowed(self, subscription: Subscription) -> None:
        """After a flush: raises `BrokerDenied` if the server has denied the subscription."""
        if (found := Denial("subscribe to", subscription.subject.lower())) in self._denied:
            raise BrokerDenied(found.text(self.address, subscription.subject))

    async def send(self, subject: str, data: bytes, *, reply: str = "", linger: bool = False) -> None:
        """Send without an answer; during an outage the message may be sent later or be lost.

        `linger`: it may wait a moment to travel together with others.
        """
        with contextlib.suppress(*_NOT_SENT):
            await self._client.post(subject, data, reply, linger=linger)

    async def subscribe(self, subject: str, callback: Callback, *, group: str = "") -> Subscription:
        before = cancellations()
        try:
            subscription = await self._client.hear(subject, callback, group)
        except (ConnectionClosedError, ConnectionDrainingError) as error:
            raise BrokerUnavailable(f"the connection to {self.address} is closed") from error
        self._subscriptions.add(subscription)
        if cancellations() > before:
            await self.unsubscribe(subscription)
            raise asyncio.CancelledError
        return subscription

    async def unsubscribe(self, subscription: Subscription, *, drain: bool = False) -> None:
        """End `subscription`; with `drain`, only after the callback has received everything the server has sent."""
        if subscription not in self._subscriptions:
            return
        self._subscriptions.discard(subscription)
        if drain and self.connected:
            # Shielded because drain() flushes, and a cancelled flush breaks nats-py: see the module's docstring.
            with contextlib.suppress(Error):
                await asyncio.shield(asyncio.ensure_future(subscription.drain()))  # type: ignore[no-untyped-call]
        else:
            with contextlib.suppress(Error):
                await subscription.unsubscribe()

    async def close(self) -> None:
        """Wait for pending exchanges while the server answers, then disconnect."""
        if self._open and self.connected:
            await asyncio.wait([exchange.answer for exchange in self._open.values()], timeout=self.timeout)
        if self.connected and not self._is_deaf:
            with contextlib.suppress(BrokerUnavailable, TimeoutError):
                async with asyncio.timeout(self.timeout):  # a loop that ends has cancelled `_sweep`
                    await self.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for exchange in self._open.values():
            if not exchange.answer.done():
                exchange.answer.set_exception(BrokerUnavailable(f"the connection to {self.address} was closed"))
        for subscription in tuple(self._subscriptions):
            await self.unsubscribe(subscription)
        await close_client(self._client)

    async def _send(self, token: str, exchange: _Exchange) -> None:
        is_large = len(exchange.data) > _LARGE
        exchange.resend_at = exchange.deadline if is_large else self._loop.time() + _RESEND_AFTER
        try:
            await self._client.post(exchange.subject, exchange.data, self._inbox + token, exchange.headers)
            if is_large:
                await self._client.post(f"{self._inbox}-{token}", b"")  # comes back once the server has read both
        except _NOT_SENT as error:
            exchange.trouble = str(error)
        except (Error, ValueError, PayloadTooLarge) as error:  # a message that can never be sent
            if not exchange.answer.done():
                exchange.answer.set_exception(error)

    def _answered(self, message: Msg) -> None:
        token = message.subject[len(self._inbox) :]
        exchange = self._open.get(token.removeprefix("-"))
        if exchange is None or exchange.answer.done():
            return
        if token.startswith("-"):
            exchange.resend_at = min(exchange.resend_at, self._loop.time() + _RESEND_AFTER)
        elif message.headers and not message.data and message.headers.get("Status") == NO_RESPONDERS:
            # The stream is being created, or is electing a leader.
            exchange.trouble = f"no responder for {exchange.subject}"
            exchange.resend_at = self._loop.time() + _SWEEP
        else:
            exchange.answer.set_result(message)

    async def _sweep(self) -> None:
        """Time out or resend exchanges. One task serves all of them, because a timer each costs too much."""
        while True:
            await self._unanswered.wait()
            await asyncio.sleep(_SWEEP)
            if not self._open:
                self._unanswered.clear()
            if self.connected and self._client.has_others and self.isolation.is_due():
                log.warning("JetStream does not answer by this NATS server of %s: trying another", self.address)
                await self._client.leave()
            now = self._loop.time()
            for token, exchange in list(self._open.items()):
                if exchange.answer.done():
                    continue
                if now >= exchange.deadline:
                    exchange.answer.set_exception(
                        BrokerUnavailable(f"NATS at {self.address}: {exchange.trouble} within {self.timeout:g} s")
                    )
                elif now >= exchange.resend_at and self.connected:
                    await self._send(token, exchange)

    async def disconnected(self) -> None:
        self._held = True
        self.outages += 1
        if not self._client.is_closed:
            log.warning("lost the connection to NATS at %s", self.address)

    async def reconnected(self) -> None:
        self._refused_at = None
        # nats-py awaits this while it reconnects and treats errors as connection errors, so only set the event.
        log.info("reconnected to NATS at %s", self.address)
        self._reconnected.set()

    async def _recover(self) -> None:
        """After each reconnect, run the hook, resend unanswered exchanges in order, then admit new ones."""
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            outages = self.outages
            await self._restore()
            sent: set[str] = set()
            # Sending may wait, and a call made meanwhile must queue behind the older ones.
            while waiting := [token for token in self._open if token not in sent]:
                for token in waiting:
                    sent.add(token)
                    if (exchange := self._open.get(token)) is not None and not exchange.answer.done():
                        await self._send(token, exchange)
            if outages == self.outages:
                self._held = False
                for callback in tuple(self._restored):
                    callback()

    async def _restore(self) -> None:
        """Run the recovery hook until it succeeds or the connection is lost once more."""
        while self._hook is not None and self.connected:
            try:
                await self._hook()
                return
            except PenstockError as error:
                log.error("cannot restore the streams of NATS at %s, retrying: %s", self.address, error)
                await asyncio.sleep(_RECOVERY_WAIT)

    def report(self, error: Exception) -> None:
        if (denied := denial(error)) is not None:
            self._on_denial(denied)
        elif isinstance(error, OSError | Error | TimeoutError):
            if not self.connected and (why := refusal(error, self._url, self.access)) is not None:
                self._on_refusal(why)
            # While disconnected, every attempt fails; the log has the loss itself.
            log.log(logging.WARNING if self.connected else logging.DEBUG, "NATS at %s: %r", self.address, error)
        else:
            log.error("callback for NATS at %s failed", self.address, exc_info=error)

    def _on_refusal(self, why: str) -> None:
        """A server that accepted us before refuses us: its configuration may be about to change back."""
        now = self._loop.time()
        if self._refused_at is None:
            self._refused_at = now
            log.error("%s; giving up in %g s", why, _REFUSED_FOR * self.timeout)
        elif now - self._refused_at > _REFUSED_FOR * self.timeout and not self.refused.done():
            self.refused.set_result(StartupError(why))

    def _on_denial(self, denied: Denial) -> None:
        """End what waits for an answer that cannot come."""
        log.error("%s", denied.text(self.address))
        self._denied.add(denied)
        self._is_deaf = is_inbox = self._is_deaf or denied == Denial("subscribe to", f"{self._inbox}*".lower())
        for exchange in self._open.values():
            names = (exchange.subject, self.access.mapped(exchange.subject))
            is_it = is_inbox or denied in [Denial("publish to", name.lower()) for name in names]
            if is_it and not exchange.answer.done():
                subject = f"{self._inbox}*" if is_inbox else exchange.subject
                exchange.answer.set_exception(BrokerDenied(denied.text(self.address, subject)))


def status(headers: Mapping[str, str] | None) -> str | None:
    """The status code of a control message; None for an ordinary message."""
    return headers.get("Status") if headers else None

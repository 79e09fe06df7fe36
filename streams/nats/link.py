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
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, ConnectionDrainingError, Error, OutboundBufferLimitError

from ...schemas.errors import BrokerAway, BrokerUnavailable, PenstockError, StartupError
from .client import DirectClient, cancellations

log = logging.getLogger(__name__)

NO_RESPONDERS = "503"

_CONNECT_TIMEOUT = 2  # seconds for one server to accept the connection
_RECONNECT_WAIT = 0.2  # seconds between two attempts at one server
_PING_INTERVAL = 10  # seconds; a connection that misses two pongs in a row is closed
_FLUSH_TIMEOUT = 1.0  # seconds that a sender waits for nats-py's full buffer; otherwise until a reconnect
_SWEEP = 0.1  # seconds between checks of unanswered exchanges, and before one without responders is resent
_RESEND_AFTER = 1.0  # seconds without an answer
_RECOVERY_WAIT = 0.5  # seconds before a failed recovery is retried

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


def public_address(url: str) -> str:
    """`url` (or several, separated by commas) without credentials, fit for logs and error messages."""
    servers = (urlsplit(server if "://" in server else f"nats://{server}") for server in url.split(","))
    return ",".join(f"{server.scheme}://{server.netloc.rpartition('@')[2]}" for server in servers)


class Link:
    """A connection that reconnects by itself; create it with `connect`, and use it in one event loop."""

    def __init__(self, address: str, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self._client = DirectClient()
        self._loop = asyncio.get_running_loop()
        self._inbox = f"{self._client.new_inbox()}."
        self._count = 0
        self._open: dict[str, _Exchange] = {}
        self._hook: Callable[[], Awaitable[None]] | None = None  # set by `on_recover`
        self._restored: list[Callable[[], None]] = []
        self._unanswered = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._held = False  # set by `_disconnected`, reset at the end of `_recover`
        self.outages = 0
        self._subscriptions: set[Subscription] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(cls, url: str, *, name: str, timeout: float) -> Link:  # noqa: ASYNC109  (of exchanges, not of this)
        """Connect to the first server in `url` that answers; every exchange times out after `timeout` seconds.

        Raises `BrokerAway` once each server has failed once, and `StartupError` if the last one refuses us. Later the
        link reconnects however long that takes.
        """
        link = cls(public_address(url), timeout)
        await link._connect(url.split(","), name)
        await link.subscribe(f"{link._inbox}*", link._answered)
        link._tasks = [asyncio.create_task(link._sweep()), asyncio.create_task(link._recover())]
        return link

    async def _connect(self, servers: list[str], name: str) -> None:
        failed: asyncio.Future[Exception] = self._loop.create_future()
        failures = 0

        async def on_error(error: Exception) -> None:
            nonlocal failures
            failures += 1
            if connecting.done():
                self._report(error)
            elif failures >= len(servers) and not failed.done():
                failed.set_result(error)

        # nats-py would retry for minutes, so its first round of errors ends the attempt.
        connecting = asyncio.create_task(
            self._client.connect(
                servers,
                name=name,
                error_cb=on_error,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._connected_again,
                connect_timeout=_CONNECT_TIMEOUT,
                reconnect_time_wait=_RECONNECT_WAIT,  # type: ignore[arg-type]  # declared int, but only slept for
                max_reconnect_attempts=-1,
                ping_interval=_PING_INTERVAL,
                flush_timeout=_FLUSH_TIMEOUT,
            )
        )
        try:
            await asyncio.wait((connecting, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            await connecting
        except (OSError, Error, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            refused = isinstance(error, Error) and "Auth" in reason  # every authorization error says so
            if refused or not failed.done() or isinstance(error, ssl.SSLCertVerificationError):
                raise StartupError(f"NATS at {self.address}: {reason}; correct --nats-url") from error
            raise BrokerAway(
                f"no NATS server answers at {self.address}: {reason}; "
                "start one or leave --nats-url out to use the built-in one"
            ) from error
        finally:
            if not connecting.done():
                connecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await connecting
                await self._disconnect()

    @property
    def connected(self) -> bool:
        return self._client.is_connected

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

    async def send(self, subject: str, data: bytes, *, reply: str = "", linger: bool = False) -> None:
        """Send without an answer; during an outage the message may be sent later or be lost.

        `linger`: it may wait a moment to travel together with others.
        """
        with contextlib.suppress(*_NOT_SENT):
            await self._client.post(subject, data, reply, linger=linger)

    async def subscribe(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, group: str = ""
    ) -> Subscription:
        before = cancellations()
        try:
            # No limits: nats-py would drop messages.
            subscription = await self._client.subscribe(
                subject, queue=group, cb=callback, pending_msgs_limit=0, pending_bytes_limit=0
            )
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
        if self.connected:
            with contextlib.suppress(BrokerUnavailable):
                await self.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for exchange in self._open.values():
            if not exchange.answer.done():
                exchange.answer.set_exception(BrokerUnavailable(f"the connection to {self.address} was closed"))
        for subscription in tuple(self._subscriptions):
            await self.unsubscribe(subscription)
        await self._disconnect()

    async def _disconnect(self) -> None:
        # nats-py tries to flush its buffer to a socket that may be closed.
        with contextlib.suppress(OSError):
            await self._client.close()

    async def _send(self, token: str, exchange: _Exchange) -> None:
        exchange.resend_at = self._loop.time() + _RESEND_AFTER
        try:
            await self._client.post(exchange.subject, exchange.data, self._inbox + token, exchange.headers)
        except _NOT_SENT as error:
            exchange.trouble = str(error)
        except (Error, ValueError) as error:  # a message that can never be sent
            if not exchange.answer.done():
                exchange.answer.set_exception(error)

    async def _answered(self, message: Msg) -> None:
        exchange = self._open.get(message.subject[len(self._inbox) :])
        if exchange is None or exchange.answer.done():
            return
        if message.headers and not message.data and message.headers.get("Status") == NO_RESPONDERS:
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

    async def _disconnected(self) -> None:
        self._held = True
        self.outages += 1
        if not self._client.is_closed:
            log.warning("lost the connection to NATS at %s", self.address)

    async def _connected_again(self) -> None:
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

    def _report(self, error: Exception) -> None:
        if isinstance(error, OSError | Error | TimeoutError):
            # While disconnected, every attempt fails; the log has the loss itself.
            log.log(logging.WARNING if self.connected else logging.DEBUG, "NATS at %s: %r", self.address, error)
        else:
            log.error("callback for NATS at %s failed", self.address, exc_info=error)


def status(headers: Mapping[str, str] | None) -> str | None:
    """The status code of a control message; None for an ordinary message."""
    return headers.get("Status") if headers else None

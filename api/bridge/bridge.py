"""Publishes each request as a job, and reads the events of a job, each once and in order.

The bridge knows the broker and nothing of HTTP; `penstock submit` uses it too. It receives events live: on one wildcard
subscription for the requests that it opened, and on one subscription each for requests that another bridge may have
opened. What it missed, in an outage or when the publisher changed, it replays from the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from opentelemetry.trace import Tracer

from ...config.settings import Settings
from ...schemas.errors import (
    STORE_FULL,
    BrokerUnavailable,
    Overloaded,
    QuotaExceeded,
    Refusal,
    StorageFull,
    StreamFull,
    StreamNotFound,
)
from ...schemas.jobs import TOKEN_PATTERN, Job, Priority
from ...schemas.wire import codec
from ...streams.lanes import check_fits
from ...streams.port import DEADLINE, SCHEMA, TRACE_PARENT, Broker, Message
from ...streams.topology import Subjects
from .early_refusal import EarlyRefusal
from .loads import HeardLoads
from .rates import HeardRates
from .reading import Reading
from .spans import trace_of

_TOO_MANY = "Too many {} are waiting to be validated; try again in a second."


class Bridge:
    """Opens requests under its own name, which their events carry, and follows requests of any bridge."""

    def __init__(
        self,
        broker: Broker,
        subjects: Subjects,
        name: str | None = None,
        tracer: Tracer | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Without a `tracer`, the client's trace is passed on as it is; without `settings`, the limits of the broker
        are the only ones of a job's size."""
        self.name = name or f"b{secrets.token_hex(8)}"
        self.stopping = False  # not ready any more, and connections are to end; set by drain
        self.draining = False  # new requests are refused; set by drain
        self.last_answer = self.last_failure = time.monotonic()  # when the newest token and failure came
        self._tracer = tracer
        self._settings = settings
        self.broker = broker
        self.subjects = subjects
        self.rates = HeardRates()
        self.loads = HeardLoads()
        self._early_refusal = EarlyRefusal()
        self._open: set[Reading] = set()
        self._heard: dict[str, Reading] = {}  # by subject: those that live on our own wildcard
        self._idle = asyncio.Event()  # nothing is open; set by _closed
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscribe to the events of this bridge, the queue's admission state, what tenants have left, and loads."""
        await self.broker.listen(self.subjects.events_of(self.name), self._hear)
        await self._early_refusal.start(self.broker, self.subjects)
        await self.rates.start(self.broker, self.subjects)
        await self.loads.start(self.broker, self.subjects)

    def admit(self, job: Job, priority: Priority, tenant: str) -> None:
        """Check, without asking the broker, that the queue takes the tenant's jobs of this priority for the
        model.

        Raises `Overloaded` where it does not, or where the bridge drains, and `QuotaExceeded` where the tenant has no
        request or token left.
        """
        if self.draining:
            raise _leaving()
        self.rates.check(tenant)
        self._early_refusal.check(job.body.get("model"), priority, tenant)

    async def open(
        self,
        job: Job,
        *,
        priority: Priority,
        tenant: str,
        deadline: float | None = None,
        kept: bool = False,
        shared: bool = False,
        named: bool = False,
        trace: str | None = None,
    ) -> Reading:
        """Publish a job, which must name this bridge and have an id; `deadline` is in Unix seconds, and `trace` the
        client's traceparent.

        A `kept` request continues after its reader has left. A `shared` one may be published by another bridge too,
        under whose name its events then are; it is `named`: somebody knows its id and may follow it, whether or not
        this returns.
        Raises `Overloaded`, `QuotaExceeded`, `StorageFull` or `PayloadTooLarge` where the job is refused, and
        `BrokerUnavailable`, after which a job that is stored nevertheless is cancelled unless it is named.
        """
        assert job.id is not None and job.bridge == self.name
        self.admit(job, priority, tenant)
        data = codec.encode(job)
        if self._settings is not None:
            check_fits(len(data), self._settings)
        reading = await self._reading(job.id, tenant, deadline, kept=kept or shared, shared=shared)
        reading.span, traceparent = trace_of(self._tracer, job, tenant, trace)
        headers = {SCHEMA: codec.JOB} | ({DEADLINE: f"{deadline:.3f}"} if deadline else {})
        headers |= {TRACE_PARENT: traceparent} if traceparent else {}
        try:
            subject, name = self.subjects.jobs(priority, tenant), f"{tenant}.{job.id}"
            await self.broker.publish(subject, data, message_id=name, headers=headers)
        except BaseException as error:
            # The job may be stored all the same.
            reading.kept = shared or named or not isinstance(error, BrokerUnavailable | asyncio.CancelledError)
            reading.leave()
            match error:
                case StreamFull(storage=True):
                    raise StorageFull(STORE_FULL) from None
                case StreamFull(per_subject=True):
                    raise QuotaExceeded(_TOO_MANY.format("of your requests"), retry_after=1.0) from None
                case StreamFull():
                    raise Overloaded(_TOO_MANY.format("requests"), retry_after=1.0) from None
            raise
        return reading

    async def follow(self, request: str, tenant: str, *, deadline: float | None = None) -> Reading:
        """Read a request's events from the first one on, whichever bridge opened it.

        Raises `StreamNotFound` where no event is stored or the first ones have expired, and `BrokerUnavailable`.
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
        raise StreamNotFound("There is no such request, or its events have expired.")

    async def turn(self, root: Reading, request: str) -> Reading:
        """Read the events of a turn of the response `root`; some may have been published already."""
        reading = await self._reading(request, root.tenant, root.deadline, kept=True, shared=root.shared)
        reading.look_back()
        return reading

    async def drain(self, patience: float, delay: float = 0.0) -> None:
        """Serve on for `delay` seconds, unready, until load balancers have turned away; then refuse new requests, wait
        for open ones to end, and refuse those still open after `patience` seconds."""
        self.stopping = True
        if delay:
            await asyncio.sleep(delay)
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
        """Run `work` in the background."""
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
        """Forget a reading; it calls this when it closes."""
        self._open.discard(reading)
        if self._heard.get(reading.subject) is reading:
            del self._heard[reading.subject]
        if not self._open:
            self._idle.set()

    def _hear(self, message: Message) -> None:
        reading = self._heard.get(message.subject)
        if reading is not None:
            reading.feed(message)


def _leaving() -> Refusal:
    return Overloaded("Penstock is shutting down; try again.", code="shutting_down", retry_after=5.0)

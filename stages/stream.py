"""stream: turns the engine's outputs into one event stream a request, and ends it.

Copies share the work by partitions, each held under a lease; a new holder goes on at the first output that the former
one had not settled, and rebuilds what it must know of a request by reading its subject from the start.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from ..engine.reader import AnswerReader
from ..schemas import codec
from ..schemas.errors import GenerationFailed
from ..schemas.events import Cancelled, Delta, Done, ErrorBody, Event, Failed, Output, Started
from ..schemas.jobs import Form
from ..streams.port import Consumer, Delivery, Message
from ..streams.topology import LEASE_TTL
from .contract import Intake, Pipe, Stage
from .leases import Leases
from .transcript import Transcript

MOST_TELLERS = 10_000  # one that is forgotten and needed again is rebuilt


class Stream(Stage):
    """Engine outputs in, client events out: one event a delta, so that a repetition looks the same every time."""

    name = "stream"
    concurrency = 1024

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self._tellers: OrderedDict[str, Teller] = OrderedDict()  # by request, the least recently told first
        self._consumers: dict[int, Consumer] = {}

    async def run(self, intake: Intake) -> None:
        subjects, settings = self.pipe.subjects, self.pipe.settings

        async def gained(share: int) -> None:
            self._consumers[share] = await intake.consume(
                "STREAM", f"stream-{share}", subjects.stream_all(share), takeover=True
            )

        async def lost(share: int) -> None:
            await self._consumers.pop(share).close()
            for request in [request for request, teller in self._tellers.items() if teller.share == share]:
                del self._tellers[request]

        bucket = await self.pipe.broker.bucket("leases")
        leases = Leases(bucket, self.name, settings.stream_partitions, interval=LEASE_TTL / 4)
        await leases.hold(gained, lost)

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        outputs = codec.decode_outputs(message.data)
        share, request = message.subject.split(".")[-2:]
        teller = self._tellers.get(request)
        if teller is None:
            teller = self._tellers[request] = Teller(self.pipe, int(share))
            if len(self._tellers) > MOST_TELLERS:
                self._tellers.popitem(last=False)
        self._tellers.move_to_end(request)
        try:
            await teller.tell(outputs, message)
        except BaseException:
            # It may have counted what was never published: a new one will read that again.
            self._tellers.pop(request, None)
            raise
        if teller.ended:
            self._tellers.pop(request, None)


class Teller:
    """One request's way from outputs to events. Outputs come in stored order, each perhaps more than once."""

    def __init__(self, pipe: Pipe, share: int) -> None:
        self.share = share
        self.ended = False  # the final event is stored; set by tell
        self._over = False  # the final event is decided, and nothing may follow it; set by tell
        self._pipe = pipe
        self._said = Transcript()
        self._reader: AnswerReader | None = None  # made with the first announcement; set by _heard
        self._order = asyncio.Lock()

    async def tell(self, outputs: list[Output], message: Message) -> None:
        """Publish what these outputs mean to the client; returns when it is stored."""
        async with self._order:
            first = outputs[0]
            if self._said.started is None and not (isinstance(first, Started) and first.epoch == 1):
                await self._rebuild(message)
            events = self._heard(outputs)
            if self._said.gap:
                # What is between may only be late, lent to a connection that broke: it is stored all the same.
                self._said, self._reader = Transcript(), None
                events = self._heard(await self._stored(message.subject, message.sequence))
            self._over = self._over or any(place == "end" for _, place in events)
            if self._said.gap:
                # Pushed out by the stream's limits, or lost with a disk: nobody has them any more.
                request = message.subject.rpartition(".")[2]
                await self._pipe.broker.notify(self._pipe.subjects.cancel(request), b"")
                raise GenerationFailed("The broker has lost a part of the answer.")
        # Nothing suspends between here and the sending, so events leave in the order of their outputs.
        for event, place in events:
            await self._emit(event, place)
            self.ended = self.ended or place == "end"

    async def _rebuild(self, message: Message) -> None:
        self._said, self._reader = Transcript(), None
        self._heard(await self._stored(message.subject, message.sequence - 1))

    async def _stored(self, subject: str, last: int) -> list[Output]:
        stored = await self._pipe.broker.replay("STREAM", subject)
        return [output for one in stored if one.sequence <= last for output in codec.decode_outputs(one.data)]

    def _heard(self, outputs: list[Output]) -> list[tuple[Event, str]]:
        events: list[tuple[Event, str]] = []
        for output in outputs:
            if not self._said.apply(output):
                continue
            if isinstance(output, Started):
                form = Form.model_validate(output.form) if output.form else None
                self._reader = self._reader or AnswerReader(output.request, form, output.choices)
            elif self._reader is not None and not self._over:
                events += self._events(output, self._reader)
        return events

    def _events(self, delta: Delta, reader: AnswerReader) -> list[tuple[Event, str]]:
        said, request = self._said, delta.request
        if delta.finish_reason == "error":
            error = delta.error or ErrorBody(500, "The engine failed.", "server_error", "generation_failed")
            return [(Failed(request, error), "end")]
        events: list[tuple[Event, str]] = [(reader.read(delta), f"{delta.choice}.{delta.index}")]
        if said.finished:
            reasons = tuple(
                reason
                for choice, own in enumerate(said.finish_reasons)
                if (reason := reader.reason(choice, own)) is not None
            )
            usage = reader.usage(said.usage)
            events.append(
                (Cancelled(request, usage) if "cancelled" in reasons else Done(request, reasons, usage), "end")
            )
        return events

    async def _emit(self, event: Event, place: str) -> None:
        started = self._said.started
        assert started is not None  # no delta counts before
        await self._pipe.emit(event, tenant=started.tenant, bridge=started.bridge, place=place)

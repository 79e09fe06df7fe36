"""stream: turns the engine's outputs into one event stream a request, and ends it.

Copies share the work by partitions, each held under a lease; a new holder goes on at the first output that the former
one had not settled, and rebuilds what it must know of a request by reading its subject from the start.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from ..engine.text.answer_reader import AnswerReader
from ..schemas import codec
from ..schemas.errors import GenerationFailed
from ..schemas.events import FINAL, Cancelled, Delta, Done, ErrorBody, Event, Failed, Output, Started, Token
from ..schemas.jobs import Form
from ..streams.port import Consumer, Delivery, Message
from .contract import Intake, Pipe, Stage
from .filters import Filter, FilteredAnswer
from .leases import Leases
from .transcript import Transcript

TOKENS = 5  # of the subject of outputs
MOST_TELLERS = 10_000  # one that is forgotten and needed again is rebuilt


class Stream(Stage):
    """Engine outputs in, client events out: one event a delta, so that a repetition looks the same every time."""

    name = "stream"
    concurrency = 1024

    def __init__(self, pipe: Pipe, filters: Sequence[type[Filter]] = ()) -> None:
        super().__init__(pipe)
        self._filters = filters
        self._tellers: OrderedDict[str, Teller] = OrderedDict()  # by subject, the least recently told first
        self._consumers: dict[int, Consumer] = {}

    async def run(self, intake: Intake) -> None:
        subjects, settings = self.pipe.subjects, self.pipe.settings

        async def gained(share: int) -> None:
            self._consumers[share] = await intake.consume(
                "STREAM", f"stream-{share}", subjects.stream_all(share), takeover=True
            )

        async def lost(share: int) -> None:
            await self._consumers.pop(share).close()
            for subject in [subject for subject, teller in self._tellers.items() if teller.share == share]:
                del self._tellers[subject]

        bucket = await self.pipe.broker.bucket("leases")
        leases = Leases(bucket, self.name, settings.stream_partitions, interval=settings.partition_ttl / 4)
        await leases.hold(gained, lost)

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        if len(message.subject.split(".")) != TOKENS:
            return  # of a version without the tenant in it: whoever runs the request begins it anew
        outputs = codec.decode_outputs(message.data)
        teller = self._tellers.get(message.subject)
        if teller is None:
            share = int(message.subject.split(".")[-3])
            teller = self._tellers[message.subject] = Teller(self.pipe, share, self._filters)
            if len(self._tellers) > MOST_TELLERS:
                self._tellers.popitem(last=False)
        self._tellers.move_to_end(message.subject)
        await teller.tell(outputs, message)
        if teller.settled:
            self._tellers.pop(message.subject, None)


class Teller:
    """One request's way from outputs to events. Outputs come perhaps more than once, and seldom out of order."""

    def __init__(self, pipe: Pipe, share: int, filters: Sequence[type[Filter]] = ()) -> None:
        self.share = share
        self._pipe = pipe
        self._filters = filters
        self._order = asyncio.Lock()
        self._forget()

    def _forget(self) -> None:
        """Know nothing of the request: the next output has all of it read again."""
        self._said = Transcript()
        self._reader: AnswerReader | None = None  # made with the first announcement; set by _heard
        self._filtered: FilteredAnswer | None = None  # where there are filters; set by _heard
        self._over = False  # the final event is decided, and nothing may follow it; set by _heard
        self._told = 0  # sequence of the newest output whose events are stored; set by tell
        self._ended = False  # the final event is stored; set by _emit

    async def tell(self, outputs: list[Output], message: Message) -> None:
        """Publish what these outputs mean to the client, and whatever of those before is missing; returns when it is
        stored."""
        async with self._order:
            if message.sequence <= self._told or self.settled:
                return
            if self._ended:
                for output in outputs:
                    self._said.apply(output)
                await self._stop_unsettled()
                return
            try:
                for event in await self._news(outputs, message):
                    for told in await self._filtered.read(event) if self._filtered else (event,):
                        await self._emit(told)
            except BaseException:
                self._forget()  # it may have counted what was never published
                raise
            self._told = message.sequence

    @property
    def settled(self) -> bool:
        """The client has been told the end, and no worker says anything more."""
        return self._ended and self._said.finished

    async def _news(self, outputs: list[Output], message: Message) -> list[Event]:
        first, is_alone = outputs[0], len(outputs) == 1
        begins = isinstance(first, Started) and first.epoch == 1
        if self._said.started is None and not begins:
            outputs = await self._stored(message)
        events = self._heard(outputs)
        if is_alone and isinstance(first, Started) and self._said.finished:
            # Behind the end, an announcement has it told again: its events may have been pushed out of their stream.
            self._pipe.trails.pop(self._pipe.subjects.events(first.tenant, first.bridge, first.request), None)
        if self._said.gap:
            # What is between may only be late, lent to a connection that broke: it is stored all the same.
            self._forget()
            events = self._heard(await self._stored(message))
        if self._said.gap:
            # Pushed out by the stream's limits, or lost with a disk: nobody has them any more.
            await self._stop(message.subject)
            raise GenerationFailed("The broker has lost a part of the answer.")
        return events

    async def _stored(self, message: Message) -> list[Output]:
        """All outputs of the request up to those of `message`."""
        stored = await self._pipe.broker.replay("STREAM", message.subject)
        return [
            output for one in stored if one.sequence <= message.sequence for output in codec.decode_outputs(one.data)
        ]

    async def _stop(self, subject: str) -> None:
        """Have whoever still runs the request stop."""
        tenant, request = subject.split(".")[-2:]
        await self._pipe.broker.notify(self._pipe.subjects.cancel(tenant, request), b"")

    def _heard(self, outputs: list[Output]) -> list[Event]:
        events: list[Event] = []
        for output in outputs:
            if not self._said.apply(output):
                continue
            if isinstance(output, Started):
                form = Form.model_validate(output.form) if output.form else None
                self._reader = self._reader or AnswerReader(output.request, form, output.choices)
                if self._filters and output.endpoint != "/v1/embeddings":
                    self._filtered = self._filtered or FilteredAnswer(
                        self._filters, output, self._pipe.settings.stall_timeout
                    )
            elif self._reader is not None and not self._over:
                events += self._events(output, self._reader)
                self._over = isinstance(events[-1], FINAL)
        return events

    def _events(self, delta: Delta, reader: AnswerReader) -> list[Event]:
        said, request = self._said, delta.request
        if delta.finish_reason == "error":
            error = delta.error or ErrorBody(500, "The engine failed.", "server_error", "generation_failed")
            return [Failed(request, error)]
        events: list[Event] = [reader.read(delta)]
        if said.finished:
            reasons = tuple(
                reason
                for choice, own in enumerate(said.finish_reasons)
                if (reason := reader.reason(choice, own)) is not None
            )
            usage = reader.usage(said.usage)
            events.append(Cancelled(request, usage) if "cancelled" in reasons else Done(request, reasons, usage))
        return events

    async def _emit(self, event: Event) -> None:
        started = self._said.started
        assert started is not None  # no delta counts before
        if self._ended:
            return
        place = f"{event.choice}.{event.index}" if isinstance(event, Token) else "end"
        self._ended = await self._pipe.emit(
            event, tenant=started.tenant, bridge=started.bridge, place=place, priority=started.priority
        )
        if self._ended:
            await self._stop_unsettled()

    async def _stop_unsettled(self) -> None:
        """Stop the work on an answer whose end was told: by a filter, or by somebody else who refused or cancelled."""
        started = self._said.started
        if not self.settled and started is not None:
            await self._stop(self._pipe.outputs_of(started.tenant, started.request))

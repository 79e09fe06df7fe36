"""stream: turns the engine's outputs into one event stream a request, and ends it.

Copies share the partitions of the work, each held under a lease. A new holder continues at the first output that the
previous one had not settled, and rebuilds a request's state by reading its subject from the start.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from opentelemetry.trace import SpanKind

from ..config.tracing import parent
from ..engine.text.answer_reader import AnswerReader
from ..schemas.errors import GenerationFailed
from ..schemas.events import (
    FINAL,
    Accepted,
    Cancelled,
    Delta,
    Done,
    ErrorBody,
    Event,
    Failed,
    FinishReason,
    Output,
    Started,
    Token,
    Usage,
)
from ..schemas.jobs import POOLED, Form
from ..schemas.wire import codec
from ..schemas.wire.hops import worker_of
from ..streams.outages import through_outages
from ..streams.port import HOPS, TRACE_PARENT, Consumer, Delivery, Message
from .contract import Intake, Pipe, Stage
from .custom.filters import Filter, FilteredAnswer
from .leases import Leases
from .transcript import Transcript
from .visits import CURRENT

TOKENS = 5  # of the subject of outputs
LEAST_PUBLISHERS = 10_000  # that are kept; one that is forgotten and needed again is rebuilt


class Stream(Stage):
    """Engine outputs in, client events out: one event a delta, so that a repetition always looks the same."""

    name = "stream"
    is_traced = False  # the publisher of a request is
    concurrency = 1024

    def __init__(self, pipe: Pipe, filters: Sequence[type[Filter]] = ()) -> None:
        super().__init__(pipe)
        self._filters = filters
        self._publishers: OrderedDict[str, EventPublisher] = OrderedDict()  # by subject, least recently used first
        self._consumers: dict[int, Consumer] = {}

    async def run(self, intake: Intake) -> None:
        subjects, settings = self.pipe.subjects, self.pipe.settings

        async def gained(partition: int) -> None:
            self._consumers[partition] = await intake.consume(
                "STREAM", f"stream-{partition}", subjects.stream_all(partition), takeover=True
            )

        async def lost(partition: int) -> None:
            await self._consumers.pop(partition).close()
            for subject in [
                subject for subject, publisher in self._publishers.items() if publisher.partition == partition
            ]:
                del self._publishers[subject]

        bucket = await self.pipe.broker.bucket("leases")
        leases = Leases(bucket, self.name, settings.stream_partitions, interval=settings.partition_ttl / 4)
        await leases.hold(gained, lost)

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        if message.subject.count(".") != TOKENS - 1:
            return  # of 0.1.0, without the tenant: its worker begins the request anew
        outputs = codec.decode_outputs(message.data)
        publisher = self._publishers.get(message.subject)
        if publisher is None:
            partition = int(message.subject.split(".")[-3])
            publisher = self._publishers[message.subject] = EventPublisher(self.pipe, partition, self._filters)
            if len(self._publishers) > max(LEAST_PUBLISHERS, self.pipe.settings.infer_limit):  # so many run at once
                self._publishers.popitem(last=False)
        self._publishers.move_to_end(message.subject)
        await publisher.publish(outputs, message)
        if publisher.settled:
            self._publishers.pop(message.subject, None)


class EventPublisher:
    """Converts one request's outputs to events. Outputs may repeat and, rarely, arrive out of order."""

    def __init__(self, pipe: Pipe, partition: int, filters: Sequence[type[Filter]] = ()) -> None:
        self.partition = partition
        self._pipe = pipe
        self._filters = filters
        self._order = asyncio.Lock()
        self._is_open = False  # its acceptance is stored; set by _open and _new_events
        self._forget()

    def _forget(self) -> None:
        """Drop what is known of the request: the next output has all of it read again."""
        self._transcript = Transcript()
        self._reader: AnswerReader | None = None  # made with the first announcement; set by _read
        self._filtered: FilteredAnswer | None = None  # where there are filters; set by _read
        self._worker: str | None = None  # that has the request; set by _note_headers, like these
        self._trace: str | None = None  # its traceparent
        self._since = 0.0  # when the first output was stored, in Unix seconds
        self._at = 0.0  # when the newest output was; set by publish
        self._final_decided = False  # the final event is decided, and nothing may follow it; set by _read
        self._last_sequence = 0  # sequence of the newest output whose events are stored; set by publish
        self._final_stored = False  # the final event is stored; set by _emit

    async def publish(self, outputs: list[Output], message: Message) -> None:
        """Publish the events of these outputs, and of earlier ones that were missed; returns when they are stored."""
        async with self._order:
            # Where somebody has deleted the stream, or restored an older one, new outputs have low sequences.
            is_repeated = message.sequence <= self._last_sequence and message.time <= self._at
            if is_repeated or self.settled:
                return
            if self._final_stored:
                for output in outputs:
                    self._transcript.apply(output)
                await self._stop_unsettled()
                return
            self._note_headers(message)
            self._at = message.time
            try:
                for event in await self._new_events(outputs, message):
                    for filtered in await self._filtered.read(event) if self._filtered else (event,):
                        await self._emit(filtered)
            except BaseException:
                self._forget()  # it may count outputs whose events were never published
                raise
            self._last_sequence = message.sequence

    @property
    def settled(self) -> bool:
        """The final event is stored, and no worker publishes any more."""
        return self._final_stored and self._transcript.finished

    async def _new_events(self, outputs: list[Output], message: Message) -> list[Event]:
        first, is_alone = outputs[0], len(outputs) == 1
        begins = isinstance(first, Started) and first.epoch == 1
        if self._transcript.started is None and not begins:
            outputs = await self._stored(message)
        events = self._read(outputs)
        if is_alone and isinstance(first, Started) and self._transcript.finished:
            # An announcement behind the end asks for the final event again, which may have left its stream.
            self._pipe.trails.pop(self._pipe.subjects.events(first.tenant, first.bridge, first.request), None)
            self._is_open = False
        if self._transcript.gap:
            # What is missing may be held by a connection that broke; it is stored all the same.
            self._forget()
            events = self._read(await self._stored(message))
        if self._transcript.gap:
            # Pushed out by the stream's limits, or lost with a disk.
            await self._stop(message.subject)
            raise GenerationFailed("Part of the answer is no longer stored; send the request again.")
        return events

    async def _stored(self, message: Message) -> list[Output]:
        """All outputs of the request up to those of `message`."""
        stored = await self._pipe.broker.replay("STREAM", message.subject)
        for earlier in stored:
            self._note_headers(earlier)
        return [
            output for one in stored if one.sequence <= message.sequence for output in codec.decode_outputs(one.data)
        ]

    def _note_headers(self, message: Message) -> None:
        """Take the worker's name and its trace from an announcement; the final event passes them on."""
        self._since = self._since or message.time
        self._worker = worker_of(message.headers.get(HOPS)) or self._worker
        self._trace = message.headers.get(TRACE_PARENT, self._trace)

    async def _stop(self, subject: str) -> None:
        """Have the worker that still runs the request stop."""
        tenant, request = subject.split(".")[-2:]
        await self._pipe.broker.notify(self._pipe.subjects.cancel(tenant, request), b"")

    def _read(self, outputs: list[Output]) -> list[Event]:
        events: list[Event] = []
        for output in outputs:
            if not self._transcript.apply(output):
                continue
            if isinstance(output, Started):
                form = Form.model_validate(output.form) if output.form else None
                self._reader = self._reader or AnswerReader(output.request, form, output.choices)
                if self._filters and output.endpoint not in POOLED:
                    self._filtered = self._filtered or FilteredAnswer(
                        self._filters, output, self._pipe.settings.stall_timeout
                    )
            elif self._reader is not None and not self._final_decided:
                events += self._events(output, self._reader)
                self._final_decided = isinstance(events[-1], FINAL)
        return events

    def _events(self, delta: Delta, reader: AnswerReader) -> list[Event]:
        said, request = self._transcript, delta.request
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
            events.append(Cancelled(request, usage) if "cancelled" in reasons else self._done(request, reasons, usage))
        return events

    def _done(self, request: str, reasons: tuple[FinishReason, ...], usage: Usage) -> Done:
        started = self._transcript.started
        return Done(request, reasons, usage, fallback=started.fallback if started else None)

    async def _emit(self, event: Event) -> None:
        started = self._transcript.started
        assert started is not None  # no delta counts before
        if self._final_stored:
            return
        is_final = isinstance(event, FINAL)
        if is_final and (rates := self._pipe.rates) is not None:
            said = event.usage if isinstance(event, Done | Cancelled) else self._transcript.usage
            charge = partial(rates.end, started.tenant, started.request, said.completion_tokens, self._at)
            await through_outages(charge, f"rates of {started.tenant}")
        if not self._is_open:
            await self._open(started)
        key = f"{event.choice}.{event.index}" if isinstance(event, Token) else "end"
        if is_final and (visit := CURRENT.get()) is not None:
            visit.trace = self._trace
            if (tracer := self._pipe.tracer) is not None:
                since = int(self._since * 1e9) or None
                visit.span = tracer.start_span(Stream.name, parent(self._trace), SpanKind.CONSUMER, start_time=since)
                visit.span.end()
        notes = {"worker": self._worker} if self._worker else {}
        self._final_stored = await self._pipe.emit(
            event, tenant=started.tenant, bridge=started.bridge, key=key, priority=started.priority, notes=notes
        )
        if self._final_stored:
            await self._stop_unsettled()

    async def _open(self, started: Started) -> None:
        if started.created:
            accepted = Accepted(started.request, started.model, started.created, started.prompt_tokens, started.prompts)
            await self._pipe.open(accepted, tenant=started.tenant, bridge=started.bridge)
        self._is_open = True

    async def _stop_unsettled(self) -> None:
        """Stop the work on an answer that has ended already: by a filter, a refusal or a cancellation."""
        started = self._transcript.started
        if not self.settled and started is not None:
            await self._stop(self._pipe.outputs_of(started.tenant, started.request))

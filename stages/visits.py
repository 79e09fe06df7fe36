"""A visit: one delivery of a message to a stage, as the stage tells it in the headers of what it publishes.

The runner begins the visit before `handle`, and whatever is published from there on finds it. It outlives `handle`
where a stage sends a job later. With tracing on, it has a span.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Self

from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer

from ..config.tracing import link, links, parent, traceparent_of
from ..schemas.wire.hops import append_hop
from ..streams.port import HOPS, TRACE_PARENT, Delivery
from .turns import Turn

FIRST = "validate"  # whose messages clients publish


@dataclass(slots=True)
class Visit:
    """`began` is in Unix seconds; `more` goes into the hop. `trace` is the traceparent to pass on where there is no
    `span`; without either, the message's own goes on."""

    stage: str
    delivery: Delivery
    began: float
    more: Mapping[str, object] | None = None
    span: Span | None = None
    trace: str | None = None
    turn: Turn | None = None

    def noting(self, **more: object) -> Self:
        """The visit with more to tell."""
        return replace(self, more={**(self.more or {}), **more})

    @property
    def traceparent(self) -> str | None:
        if self.span is not None:
            return traceparent_of(self.span)
        return self.trace or self.delivery.message.headers.get(TRACE_PARENT)

    def headers(self, left: float | None, **more: object) -> dict[str, str]:
        """What the stage publishes tells: the message's hops, this one behind them, and the trace that continues."""
        message = self.delivery.message
        before = "" if self.stage == FIRST else message.headers.get(HOPS, "")  # a client's prove nothing
        hops = append_hop(
            before,
            self.stage,
            at=message.time,
            began=self.began,
            left=left,
            attempt=self.delivery.attempt,
            **(self.more or {}),
            **more,
        )
        trace = self.traceparent
        return {HOPS: hops, TRACE_PARENT: trace} if trace else {HOPS: hops}

    def failed(self, kind: str) -> None:
        """Have the span tell that the message was refused, or comes again."""
        if self.span is not None:
            self.span.set_attribute("error.type", kind)
            self.span.set_status(StatusCode.ERROR)


CURRENT: ContextVar[Visit | None] = ContextVar("visit", default=None)


def leave_turn() -> None:
    """The current delivery, though it stays in hand, no longer counts among those that its stage handles at a time."""
    visit = CURRENT.get()
    if visit is not None and visit.turn is not None:
        visit.turn.leave()


def headers_until(now: float, **more: object) -> dict[str, str]:
    """The headers of what the current visit publishes; empty outside of any."""
    visit = CURRENT.get()
    return {} if visit is None else visit.headers(now, **more)


def traceparent() -> dict[str, str]:
    """The header by which a message continues the trace of the current visit, if there is one."""
    visit = CURRENT.get()
    trace = visit and visit.traceparent
    return {TRACE_PARENT: trace} if trace else {}


@contextlib.contextmanager
def traced(visit: Visit, tracer: Tracer) -> Iterator[None]:
    """Give the visit a span, which lasts as long as the context."""
    message, attempt = visit.delivery.message, visit.delivery.attempt
    attributes: dict[str, str | int] = {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "penstock.attempt": attempt,
    }
    again = links(message.headers.get(TRACE_PARENT), "redelivery") if attempt > 1 else []
    visit.span = tracer.start_span(
        visit.stage,
        parent(message.headers.get(TRACE_PARENT)),
        SpanKind.CONSUMER,
        attributes,
        again,
    )
    try:
        yield
    finally:
        visit.span.end()


class Dispatch:
    """The span of a batch, linked with the jobs in it, and each of these with the batch; nothing without a tracer."""

    def __init__(self, tracer: Tracer | None, worker: str) -> None:
        self._size = 0
        self._span: Span | None = None
        if tracer is not None:
            attributes = {"penstock.worker": worker}
            self._span = tracer.start_span("dispatch", parent(None), SpanKind.PRODUCER, attributes)

    def sent(self, visit: Visit | None) -> None:
        """A job is on its way. Call it before its visit ends, as a span that has ended takes no link."""
        if self._span is None:
            return
        self._size += 1
        if visit is not None and visit.span is not None:
            link(self._span, traceparent_of(visit.span), "batched")
            link(visit.span, traceparent_of(self._span), "batch")

    def end(self) -> None:
        if self._span is not None and self._size:
            self._span.set_attribute("penstock.batch_size", self._size)
            self._span.end()

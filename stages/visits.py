"""A visit: one delivery of a message to a stage, as the stage tells it in the headers of what it publishes.

The runner begins the visit before `handle`, and whatever is published from there on finds it. It outlives `handle`
where a stage sends a job later. With tracing on, it has a span.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Self

from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer

from ..config.tracing import REASON, link, links, parent, traceparent_of
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


def trace_dispatch(tracer: Tracer | None, worker: str, visits: Sequence[Visit | None]) -> None:
    """A span for a batch, linked with the jobs in it, and each of these with the batch."""
    if tracer is None:
        return
    spans = [visit.span for visit in visits if visit is not None and visit.span is not None]
    jobs = [Link(span.get_span_context(), {REASON: "batched"}) for span in spans]
    attributes: dict[str, str | int] = {"penstock.worker": worker, "penstock.batch_size": len(visits)}
    dispatch = tracer.start_span("dispatch", parent(None), SpanKind.PRODUCER, attributes, jobs)
    for span in spans:
        link(span, traceparent_of(dispatch), "batch")
    dispatch.end()

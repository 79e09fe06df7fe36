"""The span of a request as its client sees it: from its arrival at the bridge to the final event."""

from __future__ import annotations

import secrets

from opentelemetry.trace import SpanKind, StatusCode, Tracer

from ...config.tracing import is_traceparent, parent, traceparent_of
from ...schemas.canaries import CANARY
from ...schemas.events import Cancelled, Done, Event, Expired, Failed
from ...schemas.gen_ai import request_attributes, span_name
from ...schemas.jobs import Job


class RequestSpan:
    """Continues the client's trace; ends once, with the final event or with the reading."""

    def __init__(self, tracer: Tracer, job: Job, tenant: str, client: str | None) -> None:
        name, attributes = span_name(job.endpoint, job.body.get("model")), request_attributes(job.endpoint, job.body)
        attributes |= {"gen_ai.response.id": str(job.id), "penstock.tenant": tenant}
        self._span = tracer.start_span(name, parent(client), SpanKind.SERVER, attributes)
        self.traceparent = traceparent_of(self._span)

    def first_token(self) -> None:
        self._span.add_event("first_token")

    def end(self, final: Event | None) -> None:
        """`final` is None for a reader that left before the end."""
        span = self._span
        match final:
            case Done(finish_reasons=reasons, usage=usage):
                span.set_attribute("gen_ai.response.finish_reasons", list(reasons))
                span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
                span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
            case Failed(error=error) | Expired(error=error):
                span.set_attribute("error.type", error.code or error.type)
                span.set_status(StatusCode.ERROR)
            case Cancelled():
                span.set_attribute("error.type", "cancelled")
            case _:
                span.set_attribute("error.type", "disconnected")
        span.end()


def trace_of(tracer: Tracer | None, job: Job, tenant: str, client: str | None) -> tuple[RequestSpan | None, str | None]:
    """The span of a request that a client sends with this traceparent, and the traceparent of its job.

    Canaries are in no trace: theirs says that it is not sampled.
    """
    if tracer is None:
        return None, client if is_traceparent(client) else None
    if tenant == CANARY:
        return None, f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
    span = RequestSpan(tracer, job, tenant, client)
    return span, span.traceparent
